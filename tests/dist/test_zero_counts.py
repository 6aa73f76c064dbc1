"""Means over the labels that count, where ranks, samples or whole steps have none of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError
from megatrain.cli import main
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"parallel.cp": 2}),
    "cp2 ring": (2, {"parallel.cp": 2, "parallel.cp_comm": "ring"}),
    "dp2": (2, {}),
    "tp2 cp2 sp": (
        4,
        {"parallel.tp": 2, "parallel.cp": 2, "parallel.sequence_parallel": True},
    ),
    "pp2 cp2": (4, {"parallel.pp": 2, "parallel.cp": 2}),
}
MTP = {"model.num_mtp_layers": 1, "model.mtp_loss_coef": 1.0}


def make_trainer(world_size: int, kind: str, changes: dict[str, Any]) -> Trainer:
    base = {
        "data.factory": f"tests.support.own_data:{kind}",
        "model.seq_length": 16,
        "train.global_batch_size": 4,
        "train.microbatch_size": 1,
    }
    config = make_config(world_size, {**base, **changes})
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def train(_rank: int, world_size: int, kind: str, changes: dict[str, Any]) -> list[float]:
    trainer = make_trainer(world_size, kind, changes)
    steps = [trainer.train_step(step) for step in range(STEPS)]
    return [number for step in steps for number in (step.loss, step.grad_norm, *step.mtp_losses)]


def test_own_data_have_the_mean_over_labels_whatever_the_microbatches() -> None:
    small = train(0, 1, "uneven", {})
    assert small == pytest.approx(train(0, 1, "uneven", {"train.microbatch_size": 4}), rel=1e-6)
    by_microbatch = train(0, 1, "uneven", {"train.loss_normalization": "microbatch"})
    assert abs(by_microbatch[0] - small[0]) > 1e-4


@pytest.mark.dist
@pytest.mark.parametrize("layout", representatives(LAYOUTS, ["cp2", "dp2", "tp2 cp2 sp"]))
@pytest.mark.parametrize("kind", ["uneven", "second_half", "one"])
@pytest.mark.parametrize("mean", ["token", "microbatch"])
def test_every_layout_has_the_losses_of_one_process(layout: str, kind: str, mean: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    changes = {"train.loss_normalization": mean, **MTP}
    alone = train(0, 1, kind, changes)
    for result in run_ranks(world_size, train, world_size, kind, {**changes, **parallel}):
        assert result == pytest.approx(alone, rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("layout", representatives(LAYOUTS, ["tp2 cp2 sp"]))
def test_the_loss_of_the_docs_has_the_losses_of_one_process(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    changes = {"train.loss": "tests.support.own_data:spread"}
    alone = train(0, 1, "one", changes)
    assert abs(alone[0] - train(0, 1, "one", {})[0]) > 1e-2, "the penalty must matter"
    for result in run_ranks(world_size, train, world_size, "one", {**changes, **parallel}):
        assert result == pytest.approx(alone, rel=1e-5)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    return [value.clone() for piece in trainer.pieces() for value in piece.tensors.values()]


@pytest.mark.parametrize("mean", ["token", "microbatch"])
@pytest.mark.parametrize("overlap", ["none", "all"])
def test_a_step_without_labels_changes_nothing(mean: str, overlap: str) -> None:
    changes = {
        "train.global_batch_size": 8,
        "train.loss_normalization": mean,
        "optimizer.overlap": overlap,
        "optimizer.weight_decay": 0.5,
        "moe.num_experts": 4,
        "moe.expert_bias": True,
        "moe.z_loss_coef": 0.1,
    }
    trainer = make_trainer(1, "gaps", changes)
    first = trainer.train_step(0)
    assert (first.num_labels, first.skipped) == (8 * 16, False)
    before, scalars = state_of(trainer), trainer.optimizer.scalars()
    second = trainer.train_step(1)
    assert math.isnan(second.loss)
    assert (second.num_labels, second.skipped, second.num_skipped) == (0, True, 0)
    trainer.optimizer.finish_param_gather()
    assert trainer.optimizer.scalars() == scalars
    assert all(map(torch.equal, state_of(trainer), before))
    assert not trainer.train_step(2).skipped


def small_run(folder: Path) -> list[str]:
    """Command of a run of a small model with its results in ``folder/run``."""
    path = folder / "small.toml"
    path.write_text("[model]\nhidden_size = 32\nnum_layers = 1\nnum_heads = 4\nseq_length = 16\n")
    return ["train", str(path), f"--run.dir={folder / 'run'}", "--run.plain"]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_notes_steps_and_sets_without_labels(
    nproc: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        *small_run(tmp_path),
        f"--nproc={nproc}",
        "--data.factory=tests.support.own_data:gaps",
        "--train.steps=6",
        "--train.global_batch_size=8",
        "--train.microbatch_size=1",
        "--train.eval_interval=2",
        "--train.eval_steps=1",
        "--train.max_skipped_steps=1",
    ]
    assert main(command) == 0
    records = records_of(tmp_path / "run")
    assert ["loss" in record for record in records] == [True, False] * 3
    assert ["grad_norm" in record for record in records] == [True, False] * 3
    assert all(math.isfinite(record["validation_loss"]) for record in records[1::2])
    assert list(records[-1]["validation_losses"]) == ["held out"]
    printed = " ".join("".join(capfd.readouterr()).split())
    assert printed.count("step 2: no label of the batch counts, so nothing was updated") == 1
    assert printed.count("no label of the validation set nothing counts") == 1


def test_first_and_last_steps_without_labels_are_not_a_divergence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        *small_run(tmp_path),
        *("--data.factory=tests.support.own_data:rims", "--train.steps=3"),
        *("--train.global_batch_size=8", "--train.microbatch_size=1", "--train.eval_interval=1"),
        *("--train.eval_steps=1", "--checkpoint.interval=1", "--checkpoint.keep=1"),
        *("--model.num_mtp_layers=1",),
    ]
    assert main(command) == 0
    names = ("loss", "grad_norm", "mtp_losses")
    for record, has_labels in zip(records_of(tmp_path / "run"), (False, True, False), strict=True):
        assert [name in record for name in names] == [has_labels] * 3
        assert "validation_loss" not in record
    printed = "".join(capfd.readouterr())
    assert "not finite" not in printed
    assert "nan" not in printed
    report = (tmp_path / "run" / "report.html").read_text()
    assert "not finite" not in report
    folders = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert folders == {"latest", "step_00000003"}, "checkpoints before the last one are removed"


def test_predictions_without_tokens_have_no_loss() -> None:
    # Of a sample only the first label counts, which no earlier token predicts.
    step = make_trainer(1, "first", MTP).train_step(0)
    assert math.isfinite(step.loss)
    assert math.isnan(step.mtp_losses[0])


def test_long_prompts_leave_steps_without_labels(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {number}: {'x' * 100}", "completion": " yes"} for number in range(60)
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *small_run(tmp_path),
        *(f"--data.source={path}", "--data.field=prompt,completion", "--train.steps=30"),
        *("--train.global_batch_size=1", "--train.microbatch_size=1", "--train.eval_interval=0"),
        f"--data.cache={tmp_path / 'cache'}",
    ]
    assert main(command) == 0
    losses = [record.get("loss") for record in records_of(tmp_path / "run")]
    assert None in losses
    assert any(loss is not None for loss in losses)


def test_evaluation_counts_the_labels_of_its_mean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [
        *small_run(tmp_path),
        *("--data.factory=tests.support.own_data:uneven", "--train.steps=1"),
        *("--train.global_batch_size=4", "--train.microbatch_size=1", "--train.eval_steps=2"),
    ]
    assert main(command) == 0
    capfd.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["sets"]["held out"]["tokens"] == 2 * (1 + 5 + 1 + 5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("per_token", r"must return a scalar loss .*, got a tensor \(16, 1\)"),
        ("detached", "must return a loss with a gradient"),
        ("not_finite", "must return a finite loss in the first step, got inf"),
    ],
)
def test_a_loss_of_ones_own_is_checked_in_the_first_step(name: str, message: str) -> None:
    trainer = make_trainer(1, "uneven", {"train.loss": f"tests.support.own_data:{name}"})
    with pytest.raises(ConfigError, match=message):
        trainer.train_step(0)


def first_step(_rank: int) -> str:
    changes = {"train.loss": "tests.support.own_data:own_columns", "parallel.tp": 2}
    try:
        make_trainer(2, "uneven", changes).train_step(0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_a_loss_that_differs_between_tensor_parallel_ranks_is_refused() -> None:
    for message in run_ranks(2, first_step):
        assert "must return the same loss on every tensor-parallel rank" in message
        assert "reduce_from_group" in message
    trainer = make_trainer(1, "uneven", {"train.loss": "tests.support.own_data:own_columns"})
    assert math.isfinite(trainer.train_step(0).loss)


def test_float16_learns_from_masked_labels_in_the_first_steps() -> None:
    changes = {"train.dtype": "float16", "train.global_batch_size": 8}
    trainer = make_trainer(1, "uneven", changes)
    assert sum(trainer.train_step(step).skipped for step in range(8)) <= 1
