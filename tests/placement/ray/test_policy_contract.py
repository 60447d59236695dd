"""A policy in an actor keeps what one in a thread and one in a process keep: the tests of those are run again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from oppo.hf.loading import ModelRecipe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.weights import weights_digest
from oppo.models import Sampling
from oppo.placement.ray import Cluster, RayPlace
from tests.hf import child, tiny
from tests.hf.serve import test_decoder, test_policy, test_policy_process
from tests.hf.stories import SAMPLING, Serving

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

HELD = (test_decoder, test_policy, test_policy_process)

OF_THIS_MACHINE = {
    "test_the_model_that_was_given_has_the_weights_that_were_synced": "an actor has a model of its own",
    "test_logits_that_are_not_finite_are_an_error_that_names_the_rollouts": "no model is loaded whose weights are not",
}

globals().update(
    {
        name: test
        for module in HELD
        for name, test in vars(module).items()
        if name.startswith("test_") and "serving" in inspect.signature(test).parameters and name not in OF_THIS_MACHINE
    }
)


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[RayPlace]:
    with RayPlace("actor", cluster, setup=child.set_up, restarts=0) as place:
        yield place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.fixture
def serving(place: RayPlace, folder: Path) -> Serving:
    """Is called as :func:`tests.hf.stories.serving` is: the model that it is given is loaded in the actor."""

    @contextmanager
    def elsewhere(
        model: PreTrainedModel | None = None,
        *,
        sampling: Sampling = SAMPLING,
        deterministic: bool = False,
        keep: bool = False,
        portion: int = 8192,
    ) -> Iterator[HfPolicy]:
        given = tiny.causal() if model is None else model
        path = folder / weights_digest(given)
        if not path.exists():
            given.save_pretrained(path)
        yield HfPolicy(
            ModelRecipe(path=str(path)),
            sampling=sampling,
            place=place,
            deterministic=deterministic,
            kv_on_sync="keep" if keep else "recompute",
            prefill_tokens=portion,
        )

    return elsewhere
