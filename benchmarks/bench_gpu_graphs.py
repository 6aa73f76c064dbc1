"""Training steps with CUDA graphs of parts of layers and of whole steps, against eager steps.

    python benchmarks/bench_gpu_graphs.py [--steps 8] [--out FOLDER]

Two dense models and two with experts, small and medium, in bfloat16 on one GPU: tokens per second
(median step), kernels and graphs launched per step, memory that the capture was predicted to take
and took. ``--out`` writes ``bench_gpu_graphs.json``.
"""

from __future__ import annotations

import gc
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from _common import facts, header, options, write_json
from megacore.config import Config, resolve
from megacore.graphs import CaptureError
from megacore.models import init
from megacore.train.trainer import Trainer, build_trainer

EXPERTS = {"num_experts": 32, "top_k": 2, "ffn_hidden_size": 512}
STATIC = {"dispatcher": "static", "static_budget": 4.0, "aux_loss_coef": 1e-2}
SMALL = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "seq_length": 512}
MEDIUM = {"hidden_size": 2048, "num_layers": 12, "num_heads": 16, "seq_length": 1024}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small dense": (SMALL, {}),
    "small experts": (SMALL, {**EXPERTS, **STATIC}),
    "medium dense": (MEDIUM, {}),
    "medium experts": (
        {**MEDIUM, "num_layers": 8},
        {**EXPERTS, **STATIC, "num_experts": 16, "ffn_hidden_size": 1024},
    ),
}
MICROBATCHES, SIZE = 4, 2


def modes_of(moe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    partial = {"partial": {"mode": "partial"}}
    if moe:
        partial["partial, whole layers"] = {"mode": "partial", "scopes": "attn,moe"}
    return {"eager": {}, **partial, "full": {"mode": "full"}}


def draw(info: Any, *, std: float, drawn_rows: int | None = None, **_: Any) -> Tensor:
    """Weights from the GPU's generator: the CPU's takes longer than all measurements."""
    del drawn_rows
    return torch.randn(info.full_shape, device="cuda").mul_(std)


def make_trainer(model: dict[str, Any], moe: dict[str, Any], graphs: dict[str, Any]) -> Trainer:
    config = resolve(
        Config(
            model=model,
            moe=moe,
            train={
                "dtype": "bfloat16",
                "microbatch_size": SIZE,
                "global_batch_size": SIZE * MICROBATCHES,
                "steps": 1000,
                "eval_interval": 0,
            },
            graphs=graphs,
        ),
        1,
        vocab_size=256,
        cuda=True,
    )
    with mock.patch.object(init, "draw_full", draw):
        return build_trainer(config, world_size=1, device=torch.device("cuda"))


def count_launches(trainer: Trainer, step: int) -> dict[str, int]:
    """Kernels and graphs that the host launches in one step; empty where CUPTI is missing."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        trainer.train_step(step)
        torch.cuda.synchronize()
    counts = {"kernels": 0, "graphs": 0}
    for event in profile.key_averages():
        if event.key.startswith("cudaLaunchKernel") or event.key.startswith("cuLaunchKernel"):
            counts["kernels"] += event.count
        elif event.key.startswith("cudaGraphLaunch"):
            counts["graphs"] += event.count
    return counts if any(counts.values()) else {}


def measure(
    model: dict[str, Any], moe: dict[str, Any], graphs: dict[str, Any], steps: int
) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(model, moe, graphs)
    try:
        for step in range(5):
            trainer.train_step(step)
    except CaptureError as error:
        return {"failed": str(error)[:300]}
    times = [trainer.train_step(5 + number).step_time_s for number in range(steps)]
    tokens = MICROBATCHES * SIZE * model["seq_length"]
    result: dict[str, Any] = {
        "tokens_per_s": tokens / statistics.median(times),
        "step_ms": 1e3 * statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "launches": count_launches(trainer, 5 + steps),
    }
    if trainer.graphs is not None:
        result["memory"] = trainer.graphs.notes
        trainer.graphs.reset()
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU")
    print(header("torch"))
    print(f"# {torch.cuda.get_device_name()}, {MICROBATCHES} microbatches of {SIZE} sequences")
    results: dict[str, Any] = {}
    for name, (model, moe) in MODELS.items():
        print(f"\n{name}: {model}{f', {moe}' if moe else ''}")
        for mode, graphs in modes_of(moe).items():
            found = results.setdefault(name, {})[mode] = measure(model, moe, graphs, args.steps)
            if "failed" in found:
                print(f"  {mode:22} {found['failed']}")
                continue
            speedup = found["tokens_per_s"] / results[name]["eager"]["tokens_per_s"]
            launches = ", ".join(f"{count:,} {what}" for what, count in found["launches"].items())
            print(
                f"  {mode:22} {found['tokens_per_s']:10,.0f} tokens/s  {found['step_ms']:8.2f} ms  "
                f"x{speedup:.2f}  peak {found['peak_bytes'] / 2**30:.2f} GiB  {launches}"
            )
            for note in found.get("memory", ()):
                print(f"    {note}")
    write_json(args.out and args.out / "bench_gpu_graphs.json", results, facts("torch"))


if __name__ == "__main__":
    main()
