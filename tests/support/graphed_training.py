"""Small trainings with graphs, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.config import Config, resolve
from megatrain.train.trainer import Trainer, build_trainer

STEPS = 6
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "aux_loss_coef": 1e-2}
STATIC = {**EXPERTS, "dispatcher": "static", "static_budget": 4.0}
PARTIAL: dict[str, Any] = {"mode": "partial"}
FULL: dict[str, Any] = {"mode": "full"}
WITH_STEP: dict[str, Any] = {"mode": "full_step"}
OVERLAPS = {"overlap": "all"}


def make_trainer(graphs: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    """A trainer of a small model on one rank; ``changes`` are values of other sections."""
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "ffn_hidden_size": 24,
            "seq_length": 8,
            "dropout": 0.1,
        },
        "train": {
            "steps": 50,
            "microbatch_size": 1,
            "global_batch_size": 4,
            "eval_interval": 1,
            "eval_steps": 2,
        },
        "graphs": {"warmup_steps": 1, **(graphs or {})},
        "optimizer": {"bucket_numel": 500},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=False)
    return build_trainer(config, world_size=1, device=torch.device("cpu"))


def run(trainer: Trainer, steps: int = STEPS) -> list[float]:
    """Losses and gradient norms of the steps, then the loss of an evaluation."""
    numbers = []
    for step in range(steps):
        metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
    return [*numbers, trainer.mean_validation_loss(trainer.evaluate())]
