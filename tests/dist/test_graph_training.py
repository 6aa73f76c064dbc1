"""Training with captured layers or steps: the bits of eager training, in every layout.

The emulated backend fills released static tensors with NaN and refuses what a real graph would not
do, so a buffer reused too early, a skipped hook or a frozen number shows here without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.config import Config, resolve
from megacore.train.trainer import build_trainer
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 50
BASE: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_hidden_size": 24,
        "seq_length": 8,
        "vocab_size": 256,
        "vocab_pad_multiple": 64,
        "dropout": 0.1,
    },
    "train": {"steps": STEPS, "microbatch_size": 1, "global_batch_size": 4, "eval_interval": 0},
    "optimizer": {
        "lr": 2e-3,
        "bucket_numel": 2000,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
EXPERTS = {
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 8,
    "moe.first_dense_layers": 1,
    "moe.shared_ffn_hidden_size": 8,
    "moe.aux_loss_coef": 1e-2,
    "moe.jitter": 0.01,
}
STATIC = {**EXPERTS, "moe.dispatcher": "static", "moe.static_budget": 4.0}
CHUNKS = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2}

Changes = dict[str, Any]
# Processes, changes of the model and layout, settings of graphs to be compared with eager steps.
RUNS: dict[str, tuple[int, Changes, list[Changes]]] = {
    "dense, m 4": (
        1,
        {},
        [
            {"mode": "partial", "scopes": "attn"},
            {"mode": "partial", "scopes": "mlp"},
            {"mode": "partial", "scopes": "attn,mlp"},
            {"mode": "full"},
        ],
    ),
    "experts, dp 2, m 4": (
        2,
        {**EXPERTS, "train.global_batch_size": 8},
        [{"mode": "partial", "scopes": "attn,moe_router"}],
    ),
    "static experts, ep 2, m 4": (
        2,
        {**STATIC, "parallel.ep": 2, "train.global_batch_size": 8},
        [{"mode": "partial", "scopes": "attn,mlp,moe"}],
    ),
    "pp 2, m 16": (
        2,
        {"parallel.pp": 2, "train.global_batch_size": 16},
        [{"mode": "partial"}],
    ),
    "pp 2, m 8, full": (
        2,
        {"parallel.pp": 2, "train.global_batch_size": 8},
        [{"mode": "full"}],
    ),
    "experts, pp 2, 2 chunks, m 4": (
        2,
        {**EXPERTS, **CHUNKS, "parallel.pp": 2, "model.num_layers": 4},
        [{"mode": "partial"}],
    ),
    "pp 4, zb_h1, m 8": (
        4,
        {
            "parallel.pp": 4,
            "pipeline.schedule": "zb_h1",
            "train.global_batch_size": 8,
            "model.num_layers": 4,
        },
        [{"mode": "partial"}],
    ),
}


def make_config(world_size: int, changes: Changes, graphs: Changes) -> Config:
    sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in BASE.items()}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    if graphs.get("mode") == "full":
        sections["optimizer"]["overlap_grad_reduce"] = False
    return resolve(Config(**sections, graphs=graphs), world_size, vocab_size=256, cuda=False)


def train(rank: int, world_size: int, changes: Changes, graphs: Changes) -> list[float]:
    del rank
    config = make_config(world_size, changes, graphs)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    numbers = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
        if step == 20:
            numbers.append(trainer.evaluate())
    if graphs:
        assert trainer.graphs is not None
        assert any("captured" in note for note in trainer.graphs.notes)
    return [*numbers, trainer.evaluate()]


def compare(rank: int, world_size: int, changes: Changes, settings: list[Changes]) -> list[str]:
    """The settings of graphs that change a number."""
    expected = train(rank, world_size, changes, {})
    return [
        f"{graphs}: differs from number {found.index(number)}"
        for graphs in settings
        for found in [train(rank, world_size, changes, graphs)]
        for number in [next((a for a, b in zip(found, expected, strict=True) if a != b), None)]
        if number is not None
    ]


@pytest.mark.parametrize("name", RUNS)
def test_graphs_change_no_bit(name: str) -> None:
    world_size, changes, settings = RUNS[name]
    for differing in run_ranks(world_size, compare, world_size, changes, settings, timeout_s=240):
        assert differing == []
