"""The example that trains on preferences."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from megatrain.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "preferences"


def commands(folder: Path) -> list[list[str]]:
    """The commands of the script, in another folder and in this process."""
    text = (EXAMPLE / "dpo.sh").read_text().replace("\\\n", " ").replace("$out", str(folder))
    text = text.replace("--nproc 2", "--nproc 1").replace("--parallel.tp=2", "")
    lines = re.findall(r"^(?:python|megacore) .*", text, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_the_example_learns_which_answer_is_preferred(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, *rest = commands(tmp_path)
    assert first[:2] == ["python", "examples/finetune/make_inputs.py"]
    runpy.run_path(str(EXAMPLE.parent / "finetune" / "make_inputs.py"))["main"](tmp_path)
    for command in rest:
        assert main(command[1:]) == 0, command
    printed = capfd.readouterr().out
    assert "36 pairs, mean log-prob of chosen answers -34.6816" in printed
    assert "perplexity" not in printed
    lines = (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    last = records[-1]
    assert last["groups"]["rewards/accuracies"] == 1.0
    assert last["validation_groups"]["validation"]["rewards/accuracies"] == 1.0
    assert main(["eval", str(tmp_path / "tuned"), "--all"]) == 0
    assert "9 groups  rewards/chosen" in capfd.readouterr().out
