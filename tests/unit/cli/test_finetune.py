"""The example that fine-tunes a model on conversations."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from megatrain.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "finetune"


def commands(folder: Path) -> list[list[str]]:
    """The commands of the page, in another folder and in this process."""
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    text = text.replace("runs/finetune", str(folder)).replace("--nproc 2", "--nproc 1")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        shlex.split(command, comments=True)
        for language, block in blocks
        if not language
        for command in re.split(r"\n(?=megacore )", block)
    ]


def commands_of_adapters(folder: Path) -> list[list[str]]:
    """The commands of the script after those of the page, which has imported the model."""
    text = (EXAMPLE / "lora.sh").read_text().replace("\\\n", " ").replace("$out", str(folder))
    text = text.replace("--nproc 2", "--nproc 1")
    return [shlex.split(line) for line in re.findall(r"^megacore .*", text, flags=re.MULTILINE)]


def test_the_example_learns_to_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    first, *rest = commands(tmp_path)
    assert rest.pop() == ["sh", "examples/finetune/lora.sh", str(tmp_path)]
    rest += commands_of_adapters(tmp_path)
    assert first[:2] == ["python", "examples/finetune/make_inputs.py"]
    runpy.run_path(str(EXAMPLE / "make_inputs.py"))["main"](Path(first[2]))
    printed: dict[str, str] = {}
    for command in rest:
        assert command[0] == "megacore"
        arguments = command[1:]
        if arguments[0] == "train":
            arguments += ["--run.plain=true", f"--data.cache={tmp_path / 'cache'}"]
        capfd.readouterr()
        assert main(arguments) == 0, command
        of_adapter = " adapter" if "--adapter" in command else ""
        printed[command[1] + of_adapter] = capfd.readouterr().out
    assert "assistant\nIt is five.\n" in printed["generate"]
    for run, most in {"tuned": 0.6, "adapted": 4.9}.items():
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert losses[-1] < most < 5.0 < losses[0]
    adapters, whole = (
        sum(path.stat().st_size for path in (tmp_path / run).rglob("*.distcp"))
        for run in ("adapted", "tuned")
    )
    assert adapters < 0.5 * whole
    assert (tmp_path / "answers" / "chat_template.jinja").is_file()
    assert "8,192 parameters in adapters of rank 4" in printed["export-hf adapter"]
    counted = map(json.loads, (tmp_path / "logprobs.jsonl").read_text().splitlines())
    assert sum(each is not None for one in counted for each in one["logprobs"]) == 468
