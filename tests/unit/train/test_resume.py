"""What a resumed run goes on with."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megacore.errors import CheckpointError
from megatrain.api import Callback, Sample, StepRecord
from megatrain.checkpoint import format as checkpoint_format
from megatrain.checkpoint import publish, read_index
from megatrain.config import Config, ResolvedConfig, resolve
from megatrain.data import write_indexed
from megatrain.models import init as init_module
from megatrain.report import read_run, write_report
from megatrain.train import loop as loop_module
from megatrain.train import trainer as trainer_module
from megatrain.train.loop import train
from tests.support.configs import rank_context


def _train(
    folder: Path,
    *,
    steps: int,
    batch_size: int,
    resume: str | None = None,
    restarts: int = 0,
    **changes: dict[str, Any],
) -> None:
    sections: dict[str, dict[str, Any]] = dict(
        model={"hidden_size": 16, "num_layers": 1, "num_heads": 2, "seq_length": 8},
        train={
            "steps": steps,
            "microbatch_size": 1,
            "global_batch_size": batch_size,
            "eval_interval": 0,
        },
        data={"source": str(folder / "text.txt"), "tokenizer": "bytes"},
        checkpoint={"interval": 1, "keep": 9, "resume": resume},
        run={"dir": str(folder / "run"), "plain": True},
        debug={"trace_step": -1},
    )
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=False)
    context = rank_context(0, 1)
    context.restarts = restarts
    assert train(config, context) == 0


def test_with_another_batch_size_the_data_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumed: list[int] = []
    real = trainer_module.microbatch

    def microbatch(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        consumed.extend(batch.sample_ids.tolist())
        return batch

    monkeypatch.setattr(trainer_module, "microbatch", microbatch)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=2, batch_size=6)
    _train(tmp_path, steps=4, batch_size=4, resume="auto")
    _train(tmp_path, steps=5, batch_size=8, resume="auto")
    assert consumed == list(range(2 * 6 + 2 * 4 + 8))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["samples"] for line in lines] == [6, 12, 16, 20, 28]
    newest = tmp_path / "run" / "checkpoints" / "step_00000005"
    assert read_index(newest).state.samples == 28


def test_a_run_that_fails_leaves_what_a_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)

    real = trainer_module.Trainer.train_step

    def fail_in(last: int) -> None:
        def train_step(self: Any, step: int, **options: Any) -> Any:
            if step == last:
                raise KeyboardInterrupt
            return real(self, step, **options)

        with monkeypatch.context() as patch:
            patch.setattr(trainer_module.Trainer, "train_step", train_step)
            with pytest.raises(KeyboardInterrupt):
                _train(tmp_path, steps=2, batch_size=6)

    fail_in(0)
    assert not (tmp_path / "run" / "run.json").exists()
    fail_in(1)
    assert not (tmp_path / "run" / "previous-1").exists(), "the first run left nothing to keep"
    assert write_report(tmp_path / "run").is_file()
    assert read_run(tmp_path / "run").info.wall_time_s is None
    _train(tmp_path, steps=2, batch_size=6)
    assert read_run(tmp_path / "run").info.wall_time_s is not None


# ---- decisions -----------------------------------------------------------------------------------

SPIKE_AT = 26  # step from 1


class Constant:
    """Samples of one token, which any model predicts soon, but for one of the others."""

    num_samples = 1000

    def sample(self, number: int) -> Sample:
        tokens = np.full(9, 7) if number != SPIKE_AT - 1 else np.arange(60, 69)
        return Sample(tokens=tokens[:-1], labels=tokens[1:])


def constant_data(config: ResolvedConfig) -> tuple[Constant, dict[str, Constant]]:
    del config
    return Constant(), {}


class Counting(Callback):
    """Callback whose number of steps goes on with the run."""

    seen: ClassVar[list[int]] = []

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.steps = 0

    def on_step(self, record: StepRecord) -> None:
        del record
        self.steps += 1
        self.seen.append(self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    keys = ("step", "loss", "grad_norm", "lr")
    return [{key: record[key] for key in keys} for record in map(json.loads, lines)]


def test_guards_and_callbacks_decide_as_in_an_unbroken_run(tmp_path: Path) -> None:
    changes = {
        "train": {"on_spike": "skip", "callbacks": [f"{__name__}:Counting"]},
        "data": {"factory": f"{__name__}:constant_data"},
        "optimizer": {"schedule": "constant", "lr": 0.05},
    }
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    Counting.seen.clear()
    _train(tmp_path / "whole", steps=30, batch_size=1, **changes)
    _train(tmp_path / "broken", steps=SPIKE_AT - 2, batch_size=1, **changes)
    _train(tmp_path / "broken", steps=30, batch_size=1, resume="auto", **changes)
    whole = _records(tmp_path / "whole")
    skipped = [record["step"] for record in whole if record["grad_norm"] is None]
    assert skipped == [SPIKE_AT]
    assert _records(tmp_path / "broken") == whole
    assert Counting.seen == [*range(1, 31), *range(1, 31)]


# ---- Megatron's order ----------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, (0.75, 0.25)])
def test_more_steps_and_other_batches_repeat_and_skip_nothing_of_megatrons_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, ...] | None
) -> None:
    consumed: list[tuple[int, ...]] = []
    real = trainer_module.microbatch

    def microbatch(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        consumed.extend(tuple(row) for row in batch.tokens.tolist())
        return batch

    monkeypatch.setattr(trainer_module, "microbatch", microbatch)
    # Each document fills one sample of 8 tokens, so a sample shows which document it is from.
    numbers = iter(range(10**6))
    paths = []
    for name, count in (("a", 148), ("b", 100)):
        rows = [[*divmod(next(numbers), 250), *[0] * 6] for _ in range(count)]
        write_indexed(tmp_path / name, [*rows, [0]], vocab_size=256)
        paths.append(str(tmp_path / name))
    data: dict[str, Any] = {"order": "megatron", "cache": str(tmp_path / "cache"), "split": "1,0"}
    if weights is None:
        data["source"] = paths[0]
    else:
        data["sources"] = [
            {"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)
        ]
    train: dict[str, Any] = {"data": data}
    _train(tmp_path, steps=10, batch_size=8, **train)
    _train(tmp_path, steps=13, batch_size=4, resume="auto", **train)
    _train(tmp_path, steps=15, batch_size=8, resume="auto", **train)
    assert len(consumed) == 80 + 12 + 16
    assert len(set(consumed)) == len(consumed)
    newest = tmp_path / "run" / "checkpoints" / "step_00000015"
    assert read_index(newest).state.data["order_sizes"]["train"] == 80
    if weights is None:
        _train(tmp_path, steps=20, batch_size=8, resume="auto", **train)
        assert len(set(consumed)) == 148, "one epoch, each of its samples"


def _become_version_2(folder: Path) -> None:
    """Rewrite the index of a checkpoint as the version before wrote it."""
    path = folder / "index.json"
    data = json.loads(path.read_text())
    data["format_version"] = 2
    for key in ("control", "data", "callbacks"):
        del data["state"][key]
    del data["crc32"]
    path.write_text(
        checkpoint_format._to_text({**data, "crc32": checkpoint_format._checksum(data)})
    )


def test_a_checkpoint_of_the_version_before_goes_on_in_its_order_of_megatron(
    tmp_path: Path,
) -> None:
    rows = [[number, *[0] * 7] for number in range(148)]
    write_indexed(tmp_path / "a", [*rows, [0]], vocab_size=256)
    data = {"order": "megatron", "cache": str(tmp_path / "cache"), "split": "1,0"}
    changes: dict[str, Any] = {"data": {**data, "source": str(tmp_path / "a")}}
    _train(tmp_path, steps=5, batch_size=8, **changes)
    _become_version_2(tmp_path / "run" / "checkpoints" / "step_00000005")
    _train(tmp_path, steps=30, batch_size=8, resume="auto", **changes)
    state = read_index(tmp_path / "run" / "checkpoints" / "step_00000030").state
    assert state.data["order_sizes"] == {"train": 40, "validation": 32}
    assert len(state.control["losses"]) == 25


# ---- notes ---------------------------------------------------------------------------------------


def _notes(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_jump_of_the_learning_rate_is_noted_with_its_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=3, batch_size=2, resume="auto")
    assert "no checkpoint in" in _notes(capsys)
    _train(tmp_path, steps=6, batch_size=2, resume="auto", optimizer={"weight_decay": 0.0})
    notes = _notes(capsys)
    rates = [record["lr"] for record in _records(tmp_path)]
    last, first = f"{rates[2]:.2e}".replace("e-0", "e-"), f"{rates[3]:.2e}".replace("e-0", "e-")
    assert f"learning rate {last} -> {first} at step 4: train.steps 3 -> 6" in notes
    assert "optimizer.weight_decay 0.1 -> 0 since the checkpoint" in notes
    assert "no checkpoint" not in notes
    _train(tmp_path, steps=6, batch_size=2, resume="auto", optimizer={"weight_decay": 0.0})
    assert "->" not in _notes(capsys)


@pytest.mark.parametrize(("unit", "batch", "seq_length"), [("samples", 4, 8), ("tokens", 4, 16)])
def test_a_schedule_over_samples_or_tokens_goes_on_where_it_was(
    tmp_path: Path, unit: str, batch: int, seq_length: int
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    per_step = {"samples": 2, "tokens": 2 * 8}[unit]
    optimizer: dict[str, Any] = {
        "schedule": "linear",
        "schedule_unit": unit,
        "warmup": 2 * per_step,
        "decay_end": 20 * per_step,
    }
    optimizer |= {"lr": 1.0, "min_lr": 0.0}
    _train(tmp_path, steps=4, batch_size=2, optimizer=optimizer)
    changes: dict[str, Any] = {"optimizer": optimizer, "model": {"seq_length": seq_length}}
    _train(tmp_path, steps=6, batch_size=batch, resume="auto", **changes)
    _train(tmp_path, steps=7, batch_size=batch, resume="auto", **changes)  # resumed twice
    growth = {"samples": 2, "tokens": 4}[unit]  # of a step, in that unit
    done = [2, 3, *(4 + growth * step for step in range(3))]
    assert [record["lr"] for record in _records(tmp_path)] == pytest.approx(
        [0.5, 1.0, *(1 - (each - 2) / 18 for each in done)]
    )


def test_a_restart_with_another_rate_is_the_same_run_and_with_another_seed_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=2, batch_size=2)
    _train(tmp_path, steps=4, batch_size=2, restarts=1, optimizer={"lr": 1e-3})
    assert "at step 3: train.steps 2 -> 4, optimizer.lr 3e-3 -> 1e-3" in _notes(capsys)
    assert [record["step"] for record in _records(tmp_path)] == [1, 2, 3, 4]
    _train(tmp_path, steps=4, batch_size=2, restarts=1, train={"seed": 1})
    assert "results of an earlier run were moved" in _notes(capsys)


def test_other_content_of_a_source_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=1, batch_size=2)
    (tmp_path / "text.txt").write_text("The quick brown fox! " * 100)
    _train(tmp_path, steps=2, batch_size=2, resume="auto")
    assert "have changed since the checkpoint (2,100 tokens -> 2,100)" in _notes(capsys)


# ---- the last save -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("failing", [2, 3])
def test_only_a_failure_of_the_last_save_ends_the_run_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, in_background: bool
) -> None:
    real = publish.check_room

    def check_room(directory: Path, *, num_bytes: int) -> None:
        if (directory / f"step_{failing - 1:08}").exists() and not (directory / "failed").exists():
            (directory / "failed").touch()
            raise CheckpointError("no room")
        real(directory, num_bytes=num_bytes)

    monkeypatch.setattr(publish, "check_room", check_room)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    checkpoint = {"on_failure": "continue", "async": in_background}
    if failing == 2:
        _train(tmp_path, steps=3, batch_size=2, checkpoint=checkpoint)
    else:
        with pytest.raises(CheckpointError, match="after step 3, but its last checkpoint was not"):
            _train(tmp_path, steps=3, batch_size=2, checkpoint=checkpoint)
    assert (tmp_path / "run" / "report.html").is_file()


def test_weights_that_a_file_fills_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    real = init_module.draw

    def draw(local: Any, info: Any, *args: Any, **options: Any) -> None:
        drawn.append(info.name)
        real(local, info, *args, **options)

    monkeypatch.setattr(init_module, "draw", draw)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=1, batch_size=2, resume="auto")
    assert "layers.0.attention.qkv" in drawn  # nothing to resume from
    drawn.clear()
    _train(tmp_path, steps=2, batch_size=2, resume="auto")
    other = {"dir": str(tmp_path / "other"), "plain": True}
    weights = {"load_weights": str(tmp_path / "run"), "interval": 0}
    _train(tmp_path, steps=1, batch_size=2, run=other, checkpoint=weights)
    assert drawn == []


def test_a_signal_ends_a_rank_at_once_while_it_prepares_data_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[str, bool] = {}
    context = rank_context(0, 1)

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            ends[name] = context.stop.ends_now(signal.SIGTERM)
            return real(*args, **options)

        return call

    for name in ("find_checkpoint", "build_trainer", "resume_run"):
        monkeypatch.setattr(loop_module, name, noted(name, getattr(loop_module, name)))
    monkeypatch.setattr(sys.modules[__name__], "rank_context", lambda *_: context)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=1, batch_size=2)
    # What changes the state of a run is finished first.
    assert ends == {"find_checkpoint": True, "build_trainer": True, "resume_run": False}
