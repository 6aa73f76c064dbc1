"""Muon on several ranks: whole matrices in every layout, bit for bit over data-parallel ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.optim import DistributedOptimizer, Muon, OptimizerOptions
from megacore.parallel import Matrices, ParamInfo, ProcessGroups, Topology
from megacore.parallel.instances import HybridShardGroups
from megacore.parallel.params import shard
from megatrain.config import Config
from megatrain.train.trainer import build_trainer
from tests.dist import test_invariance as dense
from tests.dist import test_moe_invariance as moe
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 20
MUON: dict[str, Any] = {"optimizer.name": "muon"}

# Model by name; layouts with the number of ranks.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "latent": dense.ARCHITECTURES["latent attention"],
    **moe.MODELS,
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"dense: {name}": ("dense", *layout) for name, layout in dense.LAYOUTS.items()},
    **{
        f"latent: {name}": ("latent", *dense.LAYOUTS[name])
        for name in ("tp2", "tp2 sequence parallel", "tp2 pp2", "dp4 small buckets")
    },
    "dense: dp4, 2 instances": ("dense", 4, {"optimizer.num_instances": 2}),
    "dense: tp2 dp2": ("dense", 4, {"parallel.tp": 2}),
    **{f"experts: {name}": layout for name, layout in moe.LAYOUTS.items()},
}
REPRESENTATIVES = (
    "dense: dp4 small buckets",
    "dense: dp2 without ZeRO-1",
    "dense: dp4, 2 instances",
    "dense: tp2 cp2 sequence parallel",
    "dense: tp2 pp2",
    "dense: pp4 uneven",
    "latent: tp2 sequence parallel",
    "experts: dp4 ep2 etp2 static",
    "experts: tp2 sp etp1 ep4",
    "experts: ep2, gradients reduced early",
)


def make_config(model: str, world_size: int, changes: dict[str, Any]) -> Config:
    make = dense.make_config if model in ("dense", "latent") else moe.make_config
    return make(world_size, {**MODELS[model], **changes, **MUON})


def losses_of(_rank: int, model: str, world_size: int, changes: dict[str, Any]) -> list[float]:
    config = make_config(model, world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    return [trainer.train_step(step).loss for step in range(STEPS)]


@cache
def losses_of_one(model: str) -> list[float]:
    return losses_of(0, model, 1, {})


@pytest.mark.parametrize("layout", representatives(LAYOUTS, REPRESENTATIVES))
def test_a_layout_has_the_losses_of_one_process(layout: str) -> None:
    model, world_size, changes = LAYOUTS[layout]
    found = run_ranks(world_size, losses_of, model, world_size, changes, timeout_s=120)
    assert all(losses == found[0] for losses in found), "ranks report different losses"
    assert found[0] == pytest.approx(losses_of_one(model), rel=1e-5)
    assert found[0][-1] < found[0][0] - 0.3, "the model must have learnt something"


# ---- the engine alone: bits ----------------------------------------------------------------------

# Matrices larger than a bucket, fused ones, tall and wide ones, and a vector.
SHAPES: dict[str, tuple[tuple[int, ...], int | None, Matrices | None]] = {
    "qkv": ((4, 24, 16), 0, Matrices(sections=(12, 6, 6))),
    "output": ((16, 48), 1, Matrices()),
    "gate_up": ((2, 40, 16), 1, Matrices(batch_dims=1)),
    "down": ((16, 40), 1, Matrices()),
    "square": ((16, 16), 0, Matrices()),
    "router": ((6, 16), None, Matrices()),
    "norm": ((16,), None, None),
    "embedding": ((64, 16), 0, None),
}


def whole(name: str, seed: int) -> Tensor:
    """Values of few bits, so that the mean of three equal gradients is exact."""
    random = torch.Generator().manual_seed(seed + 100 * list(SHAPES).index(name))
    return torch.randn(SHAPES[name][0], generator=random).bfloat16().float()


def finals(
    _rank: int, world_size: int, fields: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Train this rank's part with known gradients, and return its weights."""
    tp, instances = fields.get("tp", 1), fields.get("instances", 1)
    groups = ProcessGroups.create(Topology(world_size=world_size, tp=tp))
    params = []
    for name, (shape, tp_dim, matrices) in SHAPES.items():
        info = ParamInfo(name=name, full_shape=shape, tp_dim=tp_dim, matrices=matrices)
        params.append((info, nn.Parameter(_part(info, whole(name, 0), groups).to(dtype))))
    buffers = make_buffers(
        params,
        groups=groups,
        options=BufferOptions(bucket_numel=300, distributed=fields.get("distributed", True)),
        instances=HybridShardGroups.split(groups, instances),
    )
    rule = Muon(**fields.get("rule", {}))
    optimizer = DistributedOptimizer(
        buffers, groups=groups, options=OptimizerOptions(rule=rule, clip_grad=0.0)
    )
    for step in range(1, 4):
        optimizer.zero_grads()
        terms = [(p * _part(info, whole(info.name, step), groups)).sum() for info, p in params]
        torch.stack(terms).sum().backward()
        optimizer.step(lr=0.05)
    return {info.name: param.detach().clone() for info, param in params}


def _part(info: ParamInfo, full: Tensor, groups: ProcessGroups) -> Tensor:
    if info.tp_dim is None:
        return full
    return shard(full, info, tp_position=groups.tp.position, tp_size=groups.tp.size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (4, {"instances": 2}),
        (2, {"distributed": False}),
        (3, {"rule": {"precision": "bfloat16", "moments_dtype": "bfloat16"}}),
    ],
)
def test_data_parallel_ranks_change_no_bit(
    world_size: int, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    expected = finals(0, 1, {"rule": fields.get("rule", {})}, dtype)
    for found in run_ranks(world_size, finals, world_size, fields, dtype):
        for name, values in expected.items():
            assert torch.equal(found[name], values), name


@pytest.mark.parametrize("coefficients", ["simple", "quintic", "deepseekv4", "polar_express"])
@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_tensor_parallel_ranks_compute_whole_matrices(
    world_size: int, tp: int, coefficients: str
) -> None:
    rule = {"coefficients": coefficients}
    expected = finals(0, 1, {"rule": rule})
    by_rank = run_ranks(world_size, finals, world_size, {"tp": tp, "rule": rule})
    for name, (_, tp_dim, _) in SHAPES.items():
        parts = [found[name] for found in by_rank]
        values = parts[0] if tp_dim is None else torch.cat(parts[:tp], dim=tp_dim)
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)
        for number, part in enumerate(parts):
            assert torch.equal(part, parts[number % tp] if tp_dim is not None else parts[0])
