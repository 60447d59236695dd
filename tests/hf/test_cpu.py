from __future__ import annotations

import threading

import pytest
import torch

from oppo.hf.devices import available_cores, use_cores


def test_no_more_cores_are_used_than_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_cores() >= 1


def test_a_thread_that_has_said_how_many_cores_it_uses_keeps_them_whatever_another_says_next() -> None:
    said, another_said = threading.Event(), threading.Event()
    seen: list[int] = []

    def actor() -> None:
        use_cores(1)
        said.set()
        another_said.wait(10)
        seen.append(torch.get_num_threads())

    def trainer() -> None:
        said.wait(10)
        use_cores(2)
        seen.append(torch.get_num_threads())
        another_said.set()

    threads = [threading.Thread(target=work) for work in (actor, trainer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [1, 2]
