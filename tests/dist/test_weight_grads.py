"""Gradients of 16-bit weights that products add in float32: the same bits in every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.ops.kernel_choice import LINEAR_MACS, leaving
from megacore.ops.linear import added_grad_of
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

BF16 = {"train.dtype": "bfloat16", "moe.num_experts": 0, "model.tie_embeddings": True}
PP2 = {**BF16, "parallel.pp": 2}
STEPS = 4
# Layouts with the arithmetic of another one.
ALIKE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "split backward passes": (2, PP2, {"pipeline.schedule": "zb_h1"}),
    "recomputed": (2, PP2, {"train.recompute": ["full"]}),
    "a copy of the state on each rank": (2, BF16, {"optimizer.distributed": False}),
    "overlapped": (2, {**BF16, "optimizer.bucket_numel": 2000}, {"optimizer.overlap": "all"}),
    "split and overlapped": (
        2,
        PP2,
        {"pipeline.schedule": "zb_h1", "optimizer.overlap": "all", "optimizer.bucket_numel": 2000},
    ),
    "captured layers": (1, BF16, {"graphs.mode": "partial", "graphs.warmup_steps": 1}),
    "a captured step": (1, BF16, {"graphs.mode": "full_step", "graphs.warmup_steps": 1}),
    "captured halves": (
        2,
        {**PP2, "pipeline.schedule": "zb_h1"},
        {"graphs.mode": "partial", "graphs.warmup_steps": 1},
    ),
}


def _train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[float]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    is_left = "run.torch_operations" in changes
    added = [added_grad_of(param) for chunk in trainer.chunks for param in chunk.parameters()]
    assert all(each is None for each in added) == is_left
    numbers = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
    assert trainer.optimizer.missing_grads() == []
    return numbers


def trained(world_size: int, changes: dict[str, Any]) -> list[float]:
    if world_size == 1:
        return _train(0, 1, changes)
    found: list[float] = run_ranks(world_size, _train, world_size, changes, timeout_s=120)[0]
    return found


@pytest.mark.parametrize(
    "case",
    representatives(ALIKE, ["split and overlapped", "captured layers", "captured halves"]),
)
def test_schedules_and_graphs_change_no_bit(case: str) -> None:
    world_size, base, change = ALIKE[case]
    assert trained(world_size, base | change) == trained(world_size, base)


def test_a_product_left_to_torch_trains_nearly_alike() -> None:
    own = trained(1, BF16)
    rounded = trained(1, {**BF16, "run.torch_operations": ["add_weight_grad_"]})
    assert own != rounded
    assert own == pytest.approx(rounded, rel=5e-3)


# Large enough for our products.
WIDE = {"model.hidden_size": 128, "model.seq_length": 64, "train.microbatch_size": 4}
SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (1, {"train.recompute": ["full"]}),
    "a pipeline": (2, {"parallel.pp": 2}),
    "split backward passes": (2, {"parallel.pp": 2, "pipeline.schedule": "zb_h1"}),
}


def _main_grads(
    _rank: int, world_size: int, changes: dict[str, Any], left: tuple[str, ...]
) -> dict[str, Tensor]:
    """The gradients of this rank after the backward passes of a step, by name."""
    config = make_config(world_size, {"moe.num_experts": 0, **WIDE, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    found: dict[str, Tensor] = {}
    update = trainer.optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for buffer in trainer.optimizer.buffers:
            found.update({info.name: param.main_grad.clone() for info, param in buffer.params})
        return update(*args, **kwargs)

    trainer.optimizer.step = step  # type: ignore[method-assign]
    with leaving(left, "cpu"):  # in place of the choice of the run, which was measured
        trainer.train_step(0)
    return found


@pytest.mark.parametrize("products", ["ours", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", SAME)
def test_main_grads_have_the_same_bits(case: str, dtype: str, products: str) -> None:
    settings: dict[str, Any] = {"train.dtype": dtype, "model.tie_embeddings": False}
    left = () if products == "ours" else tuple(LINEAR_MACS)
    world_size, change = SAME[case]
    expected = _main_grads(0, 1, settings, left)
    if world_size == 1:
        ranks = [_main_grads(0, 1, settings | change, left)]
    else:
        ranks = run_ranks(world_size, _main_grads, world_size, settings | change, left)
    found = {name: value for rank in ranks for name, value in rank.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any(), name
        assert torch.equal(found[name], value), name
