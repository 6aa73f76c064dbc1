"""Compare loss curves in bf16: graphs with eager on a GPU, the CPU with it, kernels with torch.

    python scripts/gpu_curves.py [--compare graphs] [--steps 60] [--device cuda] [--out FOLDER]

All trainings have the same seed, weights and data. Graphs must give eager's losses to the bit. The
CPU, and torch in place of our kernels (``--compare kernels``), sum in another order, so their
curves must stay within ``--tolerance`` on average, relative to the loss: with experts 1e-2 apart
after 20 steps on a CPU, also in float32, because tokens near a tie go to other experts. With
``--device cpu`` graphs are emulated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from megatrain.config import Config, resolve
from megatrain.train.trainer import build_trainer

MODEL = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "seq_length": 128}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        **{"num_experts": 8, "top_k": 2, "ffn_hidden_size": 256, "aux_loss_coef": 1e-2},
        **{"dispatcher": "static", "static_budget": 4.0},
    },
}
# Sections of each training; the others are compared with the first.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "graphs": {
        "eager": {},
        "partial": {"graphs": {"mode": "partial"}},
        "full": {"graphs": {"mode": "full_step"}},
        "cpu": {},
    },
    "kernels": {"ours": {"run": {"kernels": "trust"}}, "torch": {"run": {"kernels": "torch"}}},
}
NEAR = ("cpu", "torch")  # not to the bit


def curve(device: str, sections: dict[str, Any], steps: int) -> list[float]:
    """Losses of a training in bf16."""
    cuda = device == "cuda"
    train = {
        **{"dtype": "bfloat16", "microbatch_size": 2, "global_batch_size": 4},
        **{"steps": 1000, "eval_interval": 0},
    }
    settings = Config(model=MODEL, train=train, **sections)
    config = resolve(settings, 1, vocab_size=256, cuda=cuda)
    trainer = build_trainer(config, world_size=1, device=torch.device(device))
    return [trainer.train_step(step).loss for step in range(steps)]


def distance(losses: list[float], expected: list[float]) -> float:
    """Return the mean absolute difference over the mean loss; NaN where a loss is NaN."""
    pairs = zip(losses, expected, strict=True)
    return sum(abs(a - b) for a, b in pairs) / sum(expected)


def main() -> int:
    """Print a line per training; 0 if all curves agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compare", choices=RUNS, default="graphs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tolerance", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, help="folder for a file of its name, .json")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    is_good = True
    for model, moe in MODELS.items():
        curves = found[model] = {}
        for name, sections in RUNS[args.compare].items():
            device = "cpu" if name == "cpu" else args.device
            losses = curves[name] = curve(device, {"moe": moe, **sections}, args.steps)
            first, expected = next(iter(curves.items()))
            apart = distance(losses, expected)
            agrees = apart <= args.tolerance if name in NEAR else losses == expected
            is_good &= agrees
            told = {"model": model, "run": name, "distance": apart, "agrees": agrees}
            print("@json " + json.dumps({"event": "row", **told, "losses": losses}), flush=True)
            print(f"{model:8} {name:8} last loss {losses[-1]:.4f}, from {first} {apart:.1e}")
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{args.out.name}.json").write_text(json.dumps(found) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
