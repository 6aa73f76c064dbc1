"""Compare loss curves in bf16: graphs against eager on a GPU, and eager against the CPU.

    python scripts/gpu_curves.py [--steps 60] [--device cuda] [--out FOLDER]

All trainings have the same seed, weights and data. Graphs must give eager's losses to the bit. The
CPU sums in another order, so its curve must stay within ``--tolerance`` of eager's on average,
relative to the loss. With ``--device cpu`` graphs are emulated.
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
GRAPHS: dict[str, dict[str, Any]] = {
    **{"eager": {}, "partial": {"mode": "partial"}},
    "full": {"mode": "full_step"},
}


def curve(device: str, moe: dict[str, Any], graphs: dict[str, Any], steps: int) -> list[float]:
    """Losses of a training in bf16."""
    cuda = device == "cuda"
    train = {
        **{"dtype": "bfloat16", "microbatch_size": 2, "global_batch_size": 4},
        **{"steps": 1000, "eval_interval": 0},
    }
    settings = Config(model=MODEL, moe=moe, train=train, graphs=graphs)
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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tolerance", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, help="folder for curves.json")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    is_good = True
    for model, moe in MODELS.items():
        curves = found[model] = {}
        for name, graphs in {**GRAPHS, "cpu": {}}.items():
            device = "cpu" if name == "cpu" else args.device
            losses = curves[name] = curve(device, moe, graphs, args.steps)
            apart = distance(losses, curves["eager"])
            agrees = apart <= args.tolerance if name == "cpu" else losses == curves["eager"]
            is_good &= agrees
            told = {"model": model, "run": name, "distance": apart, "agrees": agrees}
            print("@json " + json.dumps({"event": "row", **told, "losses": losses}), flush=True)
            print(f"{model:8} {name:8} last loss {losses[-1]:.4f}, from eager {apart:.1e}")
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "curves.json").write_text(json.dumps(found) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
