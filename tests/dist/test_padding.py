"""Padding takes no part in routing: losses of any sample length and any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatrain.data import write_indexed
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

STEPS = 3
PACKED: dict[str, Any] = {"data.packing": "best_fit", "data.document_mask": True}
# Settings of routers by which padding could be seen.
ROUTERS: dict[str, dict[str, Any]] = {
    "bias": {"moe.expert_bias": True, "moe.aux_loss_coef": 0.0, "moe.z_loss_coef": 0.0},
    "loss of sequences": {"moe.aux_loss_coef": 0.5, "moe.z_loss_coef": 0.0},
    "loss of batches": {"moe.aux_loss_coef": 0.5, "moe.aux_loss_type": "batch"},
    "z-loss": {"moe.aux_loss_coef": 0.0, "moe.z_loss_coef": 0.1},
    "capacity": {"moe.capacity_factor": 1.0, "moe.aux_loss_coef": 0.0},
}
ALL: dict[str, Any] = {**ROUTERS["bias"], "moe.aux_loss_coef": 0.5, "moe.z_loss_coef": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "tp2": (2, {"parallel.tp": 2, "parallel.sequence_parallel": False}),
    "cp2": (2, {"parallel.cp": 2}),
    "ep2 static": (2, {"parallel.ep": 2, "moe.dispatcher": "static"}),
    "ep2 allgather, recomputed": (
        2,
        {"parallel.ep": 2, "moe.dispatcher": "allgather", "train.recompute": ["full"]},
    ),
    "pp2": (2, {"parallel.pp": 2}),
    "graphs of routers": (
        2,
        {
            "graphs.mode": "partial",
            "graphs.scopes": ["moe_router"],
            "graphs.backend": "emulated",
            "graphs.warmup_steps": 1,
        },
    ),
    "ep2 pp2, clones": (4, {"parallel.ep": 2, "parallel.pp": 2, "moe.echo.num_spare_slots": 1}),
    "tp2 cp2 sp": (
        4,
        {"parallel.tp": 2, "parallel.cp": 2, "parallel.sequence_parallel": True},
    ),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Documents of 23 tokens, and of 3 to 30."""
    folder, random = tmp_path_factory.mktemp("corpora"), np.random.RandomState(3)
    lengths = {"equal": [23] * 64, "mixed": random.randint(3, 31, size=120).tolist()}
    for name, numbers in lengths.items():
        documents = [random.randint(0, 256, size=length) for length in numbers]
        write_indexed(folder / name, documents, vocab_size=256)
    return {name: str(folder / name) for name in lengths}


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> list[tuple[float, ...]]:
    config = make_config(world_size, {"train.microbatch_size": 4, **PACKED, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    results = []
    for step in range(STEPS):
        record = trainer.train_step(step)
        experts = record.experts
        assert experts is not None
        losses = experts.aux_loss, experts.z_loss
        results.append((record.loss, record.grad_norm, *losses))
    return results


@pytest.mark.parametrize("router", ROUTERS)
def test_longer_samples_with_padding_change_nothing(router: str, corpora: dict[str, str]) -> None:
    changes = {"data.source": corpora["equal"], **ROUTERS[router]}
    short = train(0, 1, {**changes, "model.seq_length": 22})
    padded = train(0, 1, {**changes, "model.seq_length": 32})
    for one, other in zip(short, padded, strict=True):
        assert one == pytest.approx(other, rel=2e-6, abs=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", representatives(LAYOUTS, ["tp2 sp", "cp2", "ep2 static", "graphs of routers"])
)
@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_every_layout_has_the_losses_of_one_process(
    layout: str, kind: str, corpora: dict[str, str]
) -> None:
    world_size, parallel = LAYOUTS[layout]
    changes = {"data.source": corpora["mixed"], **ALL, "moe.aux_loss_type": kind}
    if kind == "batch":  # its pools are the microbatches of all data-parallel ranks
        changes["train.microbatch_size"] = 8
    single = train(0, 1, changes)
    dp = world_size // (parallel.get("parallel.tp", 1) * parallel.get("parallel.cp", 1))
    dp //= parallel.get("parallel.pp", 1)
    parallel = {"train.microbatch_size": changes.get("train.microbatch_size", 4) // dp, **parallel}
    for result in run_ranks(world_size, train, world_size, {**changes, **parallel}, timeout_s=120):
        for one, other in zip(single, result, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
