"""What the README shows is what happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hf import tiny
from tests.workplace import tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?anyio\.run\(main\)\n)```", README, re.DOTALL)
    tiny.causal("llama", seed=1).save_pretrained(tmp_path / "policy")
    tiny.scalar("llama", seed=2).save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tokenizer().save_pretrained(tmp_path / name)
    lines = [json.dumps({"prompt": f"w{5 + n} w{9 + n}"}) for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[0] for line in ran.stdout.splitlines()] == ["0", "1", "2"]


def test_the_files_the_readme_names_exist() -> None:
    named = set(re.findall(r"`((?:tests|oppo|examples|benchmarks)/[\w./]+)`", README))
    named |= set(re.findall(r"\]\((?!http)([\w./]+)\)", README))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("example", ["00_serial_ppo.py", "01_streamed_ppo.py", "02_custom_pipeline.py"])
def test_the_examples_run(example: str) -> None:
    ran = subprocess.run([sys.executable, ROOT / "examples" / example], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "step 2" in ran.stdout
