"""A dry run has the bytes of the same layout on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.dry_run import StepCosts, StepTracker, dry_run, measure_steps
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "hidden_size": 64, "ffn_hidden_size": 128, "seq_length": 128},
    "train": {"steps": 4, "microbatch_size": 2, "global_batch_size": 16},
    # Groups of other hosts and of GPUs have no memory in common.
    "run": {"host_memory": False},
}
# A dry run has balanced experts.
EXPERTS = {
    "moe.num_experts": 8,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 64,
    "debug.force_balanced": True,
}
EP2 = {**EXPERTS, "parallel.ep": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "bf16": (1, {"train.dtype": "bfloat16"}),
    "recomputed": (1, {"train.recompute": ["full"]}),
    "experts": (1, EXPERTS),
    "tp2, sequence parallel": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "dp2, overlapped": (2, {"optimizer.overlap": "all"}),
    "cp2": (2, {"parallel.cp": 2}),
    "cp2 ring": (2, {"parallel.cp": 2, "parallel.cp_comm": "ring"}),
    "pp2": (2, {"parallel.pp": 2}),
    "pp2 zb_v": (2, {"parallel.pp": 2, "pipeline.schedule": "zb_v"}),
    "ep2": (2, EP2),
    "ep2 allgather": (2, {**EP2, "moe.dispatcher": "allgather"}),
    "ep2 static": (2, {**EP2, "moe.dispatcher": "static", "moe.static_transport": "collective"}),
    "ep2 pp2, in turns": (4, {**EP2, "parallel.pp": 2, "pipeline.overlap_moe": True}),
    "tp2 pp2, recomputed": (4, {"parallel.tp": 2, "parallel.pp": 2, "train.recompute": ["full"]}),
}


def run_really(_rank: int, world_size: int, changes: dict[str, Any]) -> StepCosts:
    return measure_steps(
        changed_config(world_size, BASE, changes),
        world_size=world_size,
        device=torch.device("cpu"),
        tracker=StepTracker("cpu"),
    )


@pytest.mark.parametrize(
    "layout", representatives(LAYOUTS, ["cp2", "pp2 zb_v", "ep2", "tp2 pp2, recomputed"])
)
def test_bytes_are_those_of_real_ranks(layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    dry = []
    for rank in range(world_size):
        config = changed_config(world_size, BASE, changes)
        costs = dry_run(config, world_size=world_size, rank=rank).costs
        assert costs is not None
        dry.append(costs)
    # Threads of gloo let go of messages some time after the wait for them.
    for is_last in (False, False, True):
        real = run_really_on_ranks(world_size, changes)
        different = [
            f"rank {rank}, {what}: {own[what]:,} instead of {other[what]:,} bytes"
            for rank, (own, other) in enumerate(zip(map(sizes, dry), map(sizes, real), strict=True))
            for what in own
            if own[what] != pytest.approx(other[what], rel=0.03)
        ]
        if not different or is_last:
            break
    assert not different
    for own, other in zip(dry, real, strict=True):
        assert set(own.reads) <= set(other.reads), "reads are those of a real run"


def sizes(costs: StepCosts) -> dict[str, int]:
    """Bytes at the peak of a step and of its phases.

    Without the reduction of gradients, which gloo does by an exchange of all slices.
    """
    phases = ("build", "forward", "backward", "optimizer")
    return {"whole step": costs.most_bytes, **{name: costs.peak_bytes[name] for name in phases}}


def run_really_on_ranks(world_size: int, changes: dict[str, Any]) -> list[StepCosts]:
    if world_size == 1:
        return [run_really(0, 1, changes)]
    return run_ranks(world_size, run_really, world_size, changes, timeout_s=120)
