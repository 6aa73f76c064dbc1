"""Routers of frozen parameters: their balancing biases."""

from __future__ import annotations

from tests.support.graphed_training import EXPERTS, make_trainer


def test_a_frozen_router_keeps_its_biases() -> None:
    groups = [{"pattern": "layers.0.moe.router", "optimizer": "none"}]
    trainer = make_trainer(moe={**EXPERTS, "expert_bias": True}, optimizer={"groups": groups})
    trainer.train_step(0)
    changed = [
        bool(buffer.any())
        for chunk in trainer.chunks
        for name, buffer in chunk.named_buffers()
        if name.endswith("expert_bias")
    ]
    assert changed == [False, True]
