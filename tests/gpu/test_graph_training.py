"""Training replays real CUDA graphs with the bits of eager steps, and gives their memory back."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.graphs import CaptureError
from megacore.ops.gemm_cuda import takes_kernel
from megatrain.config import Config, resolve
from megatrain.models.layers import RMSNorm
from megatrain.train.trainer import Trainer, build_trainer

pytestmark = pytest.mark.gpu

STEPS = 20
EXPERTS = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_hidden_size": 32,
    "layer_pattern": "d(e)",
    "aux_loss_coef": 1e-2,
    "z_loss_coef": 1e-3,
    "jitter": 0.01,
}
STATIC = {**EXPERTS, "dispatcher": "static", "static_budget": 8.0}
OVERLAPS = {"overlap": "all"}
WITH_STEP = {"mode": "full_step"}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {},
    "dense, overlaps": {"optimizer": {"lr": 2e-3, "warmup": 5, **OVERLAPS}},
    "dense in float16": {"train": {"dtype": "float16"}},
    "dense, recomputed": {"train": {"recompute": ["selective"]}},
    "experts": {"moe": EXPERTS},
    "static experts in bfloat16": {"moe": STATIC, "train": {"dtype": "bfloat16"}},
}


def make_trainer(model: str, **graphs: Any) -> Trainer:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 64,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 96,
            "seq_length": 32,
            "dropout": 0.1,
        },
        "train": {"steps": STEPS, "microbatch_size": 4, "global_batch_size": 16},
        "optimizer": {"lr": 2e-3, "warmup": 5, "bucket_numel": 20_000},
        "graphs": graphs,
    }
    for name, values in MODELS[model].items():
        sections[name] = {**sections.get(name, {}), **values}
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=True)
    return build_trainer(config, world_size=1, device=torch.device("cuda"))


def run(trainer: Trainer) -> list[float]:
    numbers = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
        if step in (1, 9):
            numbers.append(trainer.mean_validation_loss(trainer.evaluate()))
    return [*numbers, trainer.mean_validation_loss(trainer.evaluate())]


@cache
def eager(model: str) -> tuple[float, ...]:
    return tuple(run(make_trainer(model)))


def needs_kernels(model: str) -> None:
    if not model.startswith("static"):
        return
    rows = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
    if not takes_kernel(rows, 8, 64, 64):
        pytest.skip("this build has no grouped product that reads its counts on the device")


SETTINGS = [
    ("dense", {"mode": "partial", "scopes": ["attn"]}),
    ("dense", {"mode": "partial"}),
    ("dense", {"mode": "full"}),
    ("dense", WITH_STEP),
    ("dense, overlaps", {"mode": "partial"}),
    ("dense, overlaps", {"mode": "full"}),
    ("dense, overlaps", WITH_STEP),
    ("dense in float16", WITH_STEP),
    ("dense, recomputed", {"mode": "partial"}),
    ("dense, recomputed", {"mode": "full"}),
    ("experts", {"mode": "partial", "scopes": ["attn"]}),
    ("experts", {"mode": "partial", "scopes": ["attn", "moe_router"]}),
    ("experts", {"mode": "partial", "scopes": ["moe_router", "moe_preprocess"]}),
    ("experts", {"mode": "partial"}),
    ("static experts in bfloat16", {"mode": "partial"}),
    ("static experts in bfloat16", {"mode": "partial", "scopes": ["attn", "mlp", "moe"]}),
    ("static experts in bfloat16", {"mode": "full"}),
    ("static experts in bfloat16", WITH_STEP),
]


@pytest.mark.parametrize(("model", "graphs"), SETTINGS)
def test_graphs_change_no_bit(model: str, graphs: dict[str, Any]) -> None:
    needs_kernels(model)
    trainer = make_trainer(model, **graphs)
    found = run(trainer)
    assert trainer.graphs is not None
    assert any("captured" in note for note in trainer.graphs.notes)
    assert found == list(eager(model))
    trainer.graphs.reset()


def used_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("graphs", [{"mode": "partial"}, {"mode": "full"}, WITH_STEP])
def test_reset_returns_the_memory_and_training_goes_on(graphs: dict[str, Any]) -> None:
    trainer = make_trainer("dense", **graphs)
    assert trainer.graphs is not None
    for step in range(5):
        trainer.train_step(step)
    trainer.graphs.reset()  # once for what libraries keep
    before = used_bytes()
    for step in range(5, 8):
        trainer.train_step(step)
    trainer.graphs.reset()
    assert used_bytes() == before
    assert trainer.train_step(8).loss > 0.0


@pytest.mark.parametrize("graphs", [{"mode": "partial"}, {"mode": "full"}, WITH_STEP])
def test_a_capture_that_fails_returns_the_memory(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMSNorm, "forward", wait)
    trainer = make_trainer("dense", **graphs)
    for step in range(3):
        trainer.train_step(step)
    weights = [param.detach().clone() for param in trainer.chunks[0].parameters()]
    used = []
    for _ in range(3):  # the first one leaves what libraries keep
        with pytest.raises(CaptureError):
            trainer.train_step(3)
        used.append(used_bytes())
    assert used[1] == used[2]
    assert all(map(torch.equal, weights, trainer.chunks[0].parameters()))


def test_measured_bytes_stand_beside_the_predicted_ones() -> None:
    trainer = make_trainer("dense", mode="partial")
    for step in range(4):
        trainer.train_step(step)
    assert trainer.graphs is not None
    predicted, measured = trainer.graphs.predicted, trainer.graphs.measured
    assert predicted is not None
    assert measured is not None
    assert measured.static_inputs == predicted.static_inputs
    assert measured.pool > 0
    assert "pool" in trainer.graphs.notes[-1]


def wait(self: RMSNorm, x_SBH: Tensor, *added: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    # A word from the device in the middle of a captured region.
    x_SBH = x_SBH + added[0] if added else x_SBH
    y = x_SBH * self.weight * float(x_SBH.abs().max().item() < 1e30)
    return (x_SBH, y) if added else y


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_a_planted_wait_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward", wait)
    trainer = make_trainer("dense", mode=mode)
    for step in range(3):
        trainer.train_step(step)
    with pytest.raises(CaptureError, match=r"(?s)capture of .*at test_graph_training.py"):
        trainer.train_step(3)


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_training_goes_on_without_graphs_if_asked(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RMSNorm, "forward", wait)
    expected = run(make_trainer("dense"))
    trainer = make_trainer("dense", mode=mode, on_failure="eager")
    assert run(trainer) == expected
    assert trainer.graphs is not None
    assert any("goes on without graphs" in note for note in trainer.graphs.notes)
