"""The moving average of the weights: its rule, other layouts, resumes, graphs and skipped steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import CheckpointError
from megatrain.checkpoint import StoredWeights
from megatrain.train.loop import train
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_invariance import make_config
from tests.support.configs import changed_config, rank_context
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

DECAY = 0.9
BASE: dict[str, Any] = {"optimizer.ema_decay": DECAY, "optimizer.bucket_numel": 2000}


def tensors(trainer: Trainer, kind: str) -> list[Tensor]:
    return [each.tensors[kind].clone() for each in trainer.pieces() if kind in each.tensors]


def make_trainer(changes: dict[str, Any]) -> Trainer:
    config = make_config(1, {**BASE, **changes})
    return build_trainer(config, world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.dtype": "bfloat16"},
        {"optimizer.overlap": "all"},
        {"graphs.mode": "full_step", "graphs.warmup_steps": 1},
    ],
    ids=lambda changes: str(list(changes.values())),
)
def test_the_average_follows_its_rule_bit_for_bit(changes: dict[str, Any]) -> None:
    trainer = make_trainer(changes)
    expected = tensors(trainer, "main_param")
    assert all(map(torch.equal, expected, tensors(trainer, "ema")))
    for step in range(4):
        trainer.train_step(step)
        weights = tensors(trainer, "main_param")
        expected = [
            torch.lerp(old, new, torch.tensor(1.0 - DECAY, dtype=torch.float64).float())
            for old, new in zip(expected, weights, strict=True)
        ]
        assert all(map(torch.equal, expected, tensors(trainer, "ema")))
    assert not any(map(torch.equal, weights, expected))


def test_a_skipped_step_leaves_the_average() -> None:
    trainer = make_trainer({})
    trainer.train_step(0)
    before = tensors(trainer, "ema")
    trainer.optimizer.zero_grads()
    trainer.optimizer.buffers[0].grad_data.fill_(math.nan)
    result = trainer.optimizer.step(lr=0.1)
    assert trainer.average is not None
    trainer.average.update(result)
    assert result.skipped
    assert all(map(torch.equal, before, tensors(trainer, "ema")))


# ---- checkpoints ---------------------------------------------------------------------------------

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_length": 16},
    "train": {"microbatch_size": 1, "global_batch_size": 4, "eval_interval": 0},
    "optimizer": {"lr": 5e-3, "ema_decay": DECAY, "schedule": "constant"},
    "checkpoint": {"interval": 1, "keep": 9},
    "moe": {"num_experts": 4, "top_k": 2, "expert_bias": True},
}


def run(rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> None:
    data = {"source": str(folder / "text.txt"), "tokenizer": "bytes"}
    config = changed_config(world_size, {**SECTIONS, "data": data}, changes)
    assert train(config, rank_context(rank, world_size)) == 0


def stored(folder: Path, step: int, *, averaged: bool = True) -> dict[str, Tensor]:
    path = folder / "checkpoints" / f"step_{step:08d}"
    with StoredWeights(path, averaged=averaged) as weights:
        return weights.read(weights.names())


def test_an_average_goes_on_in_other_layouts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    whole, parts = {"run.dir": str(tmp_path / "whole")}, {"run.dir": str(tmp_path / "parts")}
    run(0, 1, tmp_path, {**whole, "train.steps": 5})
    run_ranks(4, run, 4, tmp_path, {**parts, "train.steps": 2, "parallel.tp": 2, "parallel.ep": 2})
    resumed = {**parts, "train.steps": 4, "checkpoint.resume": "auto"}
    run_ranks(2, run, 2, tmp_path, {**resumed, "parallel.pp": 2})
    run(0, 1, tmp_path, {**resumed, "train.steps": 5})
    found, expected = stored(tmp_path / "parts", 5), stored(tmp_path / "whole", 5)
    last = stored(tmp_path / "whole", 5, averaged=False)
    assert found.keys() == expected.keys() == last.keys()
    for name, average in expected.items():
        torch.testing.assert_close(found[name], average, rtol=1e-3, atol=2e-5)
        # The biases of routers are no parameters, and are exported as they are.
        assert torch.equal(average, last[name]) == name.endswith("expert_bias"), name
    # The rule, over the stored steps.
    name = "layers.0.attention.qkv"
    average = stored(tmp_path / "whole", 1)[name]
    for step in range(2, 6):
        weight = torch.tensor(1.0 - DECAY, dtype=torch.float64).float()
        average = average.lerp(stored(tmp_path / "whole", step, averaged=False)[name], weight)
        assert torch.equal(average, stored(tmp_path / "whole", step)[name])


def test_an_average_may_begin_and_end_with_a_resume(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    base = {"run.dir": str(tmp_path / "run"), "checkpoint.resume": "auto"}
    run(0, 1, tmp_path, {**base, "train.steps": 1, "optimizer.ema_decay": 0.0})
    with pytest.raises(CheckpointError, match=r"has no moving average of the weights"):
        stored(tmp_path / "run", 1)
    run(0, 1, tmp_path, {**base, "train.steps": 2})
    before = stored(tmp_path / "run", 1, averaged=False)
    after = stored(tmp_path / "run", 2, averaged=False)
    for name, average in stored(tmp_path / "run", 2).items():
        if not name.endswith("expert_bias"):
            expected = before[name].lerp(after[name], 1.0 - DECAY)
            torch.testing.assert_close(average, expected, rtol=0, atol=1e-7)
    run(0, 1, tmp_path, {**base, "train.steps": 3, "optimizer.ema_decay": 0.0})
    with pytest.raises(CheckpointError, match=r"optimizer\.ema_decay"):
        stored(tmp_path / "run", 3)


def test_loaded_weights_are_where_the_average_starts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    run(0, 1, tmp_path, {"run.dir": str(tmp_path / "first"), "train.steps": 2})
    second = {
        "run.dir": str(tmp_path / "second"),
        "checkpoint.load_weights": str(tmp_path / "first"),
    }
    run(0, 1, tmp_path, {**second, "train.steps": 1})
    loaded = stored(tmp_path / "first", 2, averaged=False)
    after = stored(tmp_path / "second", 1, averaged=False)
    for name, average in stored(tmp_path / "second", 1).items():
        if not name.endswith("expert_bias"):
            expected = loaded[name].lerp(after[name], 1.0 - DECAY)
            torch.testing.assert_close(average, expected, rtol=0, atol=1e-7)


def test_the_average_is_sharded_as_the_state() -> None:
    whole = make_trainer({}).average
    assert whole is not None

    shares = run_ranks(2, bytes_of_average, 2)
    assert sum(shares) == whole.state_bytes
    assert max(shares) < 0.51 * whole.state_bytes


def bytes_of_average(_rank: int, world_size: int) -> int:
    config = make_config(world_size, BASE)
    average = build_trainer(config, world_size=world_size, device=torch.device("cpu")).average
    assert average is not None
    return average.state_bytes
