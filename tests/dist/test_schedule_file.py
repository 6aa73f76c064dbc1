"""Training with a schedule from a file: bits of the named one, any placement, runs that move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.train.trainer import build_trainer
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks
from tests.support.jobs import Ended, start_function

pytestmark = pytest.mark.dist

STEPS = 4
BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS},
    "train": {"steps": STEPS, "microbatch_size": 2, "global_batch_size": 8, "eval_interval": 0},
    "optimizer": {"lr": 2e-3, "warmup": 1},
    "parallel": {"pp": 2},
}
NAMED: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved_1f1b": {"pipeline.num_chunks": 2},
    "zb_v": {},
}

TINY = """\
[model]
hidden_size = 32
num_layers = 2
num_heads = 2
seq_length = 16

[parallel]
pp = 2

[pipeline]
schedule_file = "own.csv"

[train]
steps = 2
microbatch_size = 2
global_batch_size = 8
eval_interval = 0

[data]
source = "text.txt"

[checkpoint]
interval = 1

[run]
dir = "run"
plain = true
"""


def train(_rank: int, changes: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and gradient norms of all steps and the validation, and this rank's weights."""
    trainer = build_trainer(
        changed_config(2, BASE, changes), world_size=2, device=torch.device("cpu")
    )
    metrics = [trainer.train_step(step) for step in range(STEPS)]
    numbers = [number for each in metrics for number in (each.loss, each.grad_norm)]
    numbers.append(trainer.mean_validation_loss(trainer.evaluate()))
    trainer.optimizer.finish_param_gather()
    weights = {
        info.name: param.detach().flatten().tolist()
        for chunk in trainer.chunks
        for info, param in chunk.param_infos()
    }
    return numbers, weights


def export(name: str, path: Path, *options: str) -> None:
    sizes = ("--pp=2", "--microbatches=4", *options)
    assert main(["schedule", name, *sizes, "--csv", str(path)]) == 0


@pytest.mark.parametrize("name", NAMED)
def test_an_exported_schedule_trains_bit_equal_to_the_named_one(name: str, tmp_path: Path) -> None:
    changes, path = NAMED[name], tmp_path / "own.csv"
    export(name, path, *(["--chunks=2"] if changes else []))
    named = run_ranks(2, train, {"pipeline.schedule": name, **changes})
    from_file = run_ranks(2, train, {"pipeline.schedule_file": str(path)})
    assert from_file == named


def test_a_file_may_place_the_stages_on_any_ranks(tmp_path: Path) -> None:
    # Stages 0 and 3 on the last rank: neither a loop nor a V from the first rank.
    export("zb_v", tmp_path / "v.csv")
    rows = (tmp_path / "v.csv").read_text().splitlines()
    (tmp_path / "own.csv").write_text("\n".join(reversed(rows)))
    numbers, weights = zip(
        *run_ranks(2, train, {"pipeline.schedule_file": str(tmp_path / "own.csv")}), strict=True
    )
    named, named_weights = zip(*run_ranks(2, train, {"pipeline.schedule": "zb_v"}), strict=True)
    assert numbers[0] == pytest.approx(named[0], rel=1e-5)
    assert [sorted(each) for each in weights] == [sorted(each) for each in named_weights[::-1]]


def run(folder: Path, *arguments: str) -> Ended:
    return start_function(lambda: main(arguments), folder).finish(timeout_s=60)


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_keeps_its_schedule_and_goes_on_without_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "tiny.toml").write_text(TINY)
    export("1f1b", tmp_path / "own.csv")
    first = run(tmp_path, "train", "tiny.toml")
    assert first.code == 0, first.err
    assert "own, 4 microbatches" in first.out
    folder = tmp_path / "run"
    assert 'schedule_file = "{here}/schedule.csv"' in (folder / "config.toml").read_text()
    assert (folder / "schedule.csv").read_text() == (tmp_path / "own.csv").read_text()
    assert "schedule.csv" in (folder / "report.html").read_text()
    planned = run(tmp_path, "plan", "tiny.toml")
    assert planned.code == 0, planned.err
    assert "own.csv, bubble 20.0%" in planned.out

    (tmp_path / "own.csv").unlink()
    refused = run(tmp_path, "train", "tiny.toml", "--checkpoint.resume=auto")
    assert refused.code == 2
    assert "own.csv (tiny.toml:11) cannot be read: No such file or directory" in refused.err
    assert "run keeps a copy, run/schedule.csv" in refused.err

    folder = folder.rename(tmp_path / "moved")
    settings = (f"--run.dir={folder}", "--checkpoint.resume=auto", "--train.steps=3")
    resumed = run(tmp_path, "train", f"{folder}/config.toml", *settings)
    assert resumed.code == 0, resumed.err
    assert steps_of(folder) == [1, 2, 3]
    written = run(tmp_path, "generate", str(folder), "--prompt=The", "--max-new-tokens=2")
    assert written.code == 0, written.err

    fresh = run(tmp_path, "train", f"{folder}/config.toml", f"--run.dir={folder}")
    assert fresh.code == 0, fresh.err
    for each in (folder, folder / "previous-1"):
        assert "{here}/schedule.csv" in (each / "config.toml").read_text()
        assert (each / "schedule.csv").is_file()
