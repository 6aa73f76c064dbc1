"""`megacore train --dry-run` on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.cli import main

TOML = """\
[model]
hidden_size = 32
num_layers = 4
num_heads = 4
vocab_size = 300
seq_length = 16
[parallel]
tp = 2
pp = 2
[train]
global_batch_size = 64
[data]
source = "missing"
tokenizer = "missing.json"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TOML)
    return "run.toml"


def test_a_dry_run_reports_one_rank_and_writes_nothing(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--dry-run", "--world-size=64", "--rank=50"]) == 0
    shown = capsys.readouterr().out
    assert "rank        50 of 64: tp 0 cp 0 dp 9 pp 1" in shown
    assert "predicted: " in shown
    assert "layers.2" in shown
    assert "1 of the results of the step (megacore/optim/step_result.py:" in shown
    assert "world 64, tp 2, dp 16" in shown
    # Of each parameter, the rank has at most one range: main weight and two moments.
    [pieces] = re.findall(r"for the last step; (\d+) pieces of a checkpoint", shown)
    assert int(pieces) % 3 == 0
    assert 0 < int(pieces) <= 3 * 20
    assert shown.rstrip().endswith("works")
    assert [path.name for path in Path().iterdir()] == [config]


def test_the_branches_of_a_device_are_run_if_asked_for(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--train.dtype=bfloat16", "--train.global_batch_size=4"]
    assert main(["train", config, "--dry-run", "--device=H100", *settings]) == 0
    assert "device      H100 (9.0), fake: forward passes and an update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rank=1"], "--rank belongs to a dry run; add --dry-run"),
        (["--world-size=4"], "--world-size belongs to a dry run; add --dry-run"),
        (["--dry-run", "--rank=4"], "--rank must be in [0, 4), got 4"),
        (["--dry-run", "--device=h10"], "--device must be one of a100, "),
        (["--dry-run", "--run.torch_operations=foo"], "run.torch_operations (--run.torch_operatio"),
        (["--dry-run", "--world-size=6"], "does not fit 6 processes (--world-size)"),
    ],
)
def test_wrong_options_are_one_sentence(
    config: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_failing_dry_run_names_the_place(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(output, batch, context):\n"
        "    from megatrain.api import token_loss\n"
        "    value = token_loss(output, batch, context)\n"
        "    return value if value.item() < 1e9 else 0 * value\n"
    )
    own = f"--train.loss={tmp_path / 'own'}:loss"
    assert main(["train", config, "--dry-run", "--world-size=64", "--rank=50", own]) == 1
    assert "own.py:4 in loss" in capsys.readouterr().out
