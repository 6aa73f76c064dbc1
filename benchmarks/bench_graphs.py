"""Training steps with CUDA graphs of parts of layers and of whole steps, against eager steps.

    python benchmarks/bench_graphs.py [--steps 8] [--out FOLDER]

On one GPU: two dense models and two with experts, small and medium, in bfloat16: tokens per second
(median step), kernels and graphs launched per step, memory that the capture was predicted to take
and took.

Without a GPU, and in no way about speed: for 4, 8 and 16 microbatches the number of graphs and of
static input tensors, their bytes predicted and measured, and whether all losses have the bits of
eager steps. Graphs are emulated there, which is slower than no graphs.

``--out`` writes ``bench_graphs.json``.
"""

from __future__ import annotations

import gc
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from _common import facts, header, options, row, write_json
from megacore.graphs import BufferRole, CaptureError
from megatrain.config import Config, resolve
from megatrain.models import init
from megatrain.train.trainer import Trainer, build_trainer

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
# Where there is no GPU.
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "seq_length": 32, "dropout": 0.1}
TINY_EXPERTS = {"num_experts": 4, "ffn_hidden_size": 32}
STEPS_WITHOUT_DEVICE = 6


def modes_of(moe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    partial = {"partial": {"mode": "partial"}}
    if moe:
        partial["partial, whole layers"] = {"mode": "partial", "scopes": ["attn", "moe"]}
    full = {"mode": "full"}
    return {
        "eager": {},
        **partial,
        "full": full,
        "full, with optimizer": {**full, "mode": "full_step"},
    }


def draw(info: Any, *, std: float, drawn_rows: int | None = None, **_: Any) -> Tensor:
    """Weights from the GPU's generator: the CPU's takes longer than all measurements."""
    del drawn_rows
    return torch.randn(info.full_shape, device="cuda").mul_(std)


def make_trainer(
    model: dict[str, Any],
    moe: dict[str, Any],
    graphs: dict[str, Any],
    *,
    num_microbatches: int = MICROBATCHES,
    device: str = "cuda",
) -> Trainer:
    cuda = device == "cuda"
    config = resolve(
        Config(
            model=model,
            moe=moe,
            train={
                "dtype": "bfloat16" if cuda else "float32",
                "microbatch_size": SIZE,
                "global_batch_size": SIZE * num_microbatches,
                "steps": 1000,
                "eval_interval": 0,
            },
            graphs=graphs,
        ),
        1,
        vocab_size=256,
        cuda=cuda,
    )
    with mock.patch.object(init, "draw_full", draw) if cuda else nullcontext():
        return build_trainer(config, world_size=1, device=torch.device(device))


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


def check_without_device(
    moe: dict[str, Any], graphs: dict[str, Any], num_microbatches: int, expected: list[float]
) -> dict[str, Any]:
    """What graphs take and whether they change a bit, on the CPU with emulated graphs."""
    trainer = make_trainer(TINY, moe, graphs, num_microbatches=num_microbatches, device="cpu")
    losses = [trainer.train_step(step).loss for step in range(STEPS_WITHOUT_DEVICE)]
    found: dict[str, Any] = {"losses": losses, "same_bits": losses == expected}
    made = trainer.graphs
    if made is not None and made.measured is not None and made.predicted is not None:
        parts = ("num_graphs", "static_inputs", "boundary")
        found["predicted"] = {part: getattr(made.predicted, part) for part in parts}
        found["measured"] = {part: getattr(made.measured, part) for part in parts}
        if made.partial is not None:
            plan = made.partial.plan
            found["static_input_tensors"] = len(plan.buffer_signatures(BufferRole.INPUT))
    return found


def run_without_device() -> dict[str, Any]:
    print("# no GPU: emulated graphs on the CPU; nothing here is a figure of speed")
    results: dict[str, Any] = {}
    for name, moe in (("dense", {}), ("experts", {**EXPERTS, **STATIC, **TINY_EXPERTS})):
        print(f"\n{name}: {TINY}{f', {moe}' if moe else ''}")
        for number in (4, 8, 16):
            expected: list[float] = []
            for mode, graphs in modes_of(moe).items():
                found = check_without_device(moe, graphs, number, expected)
                results.setdefault(name, {}).setdefault(f"m {number}", {})[mode] = found
                if mode == "eager":
                    expected = found["losses"]
                    continue
                was, took = found["predicted"], found["measured"]
                count = found.get("static_input_tensors")
                print(
                    f"  m {number:2}  {mode:22} {took['num_graphs']:3} graphs"
                    f"{f', {count} static inputs' if count else ''}; KiB measured (predicted): "
                    f"inputs {took['static_inputs'] / 1024:.1f} ({was['static_inputs'] / 1024:.1f})"
                    f", boundary {took['boundary'] / 1024:.1f} ({was['boundary'] / 1024:.1f}); "
                    f"losses {'equal to the bit' if found['same_bits'] else 'DIFFER'}"
                )
    return results


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(header("torch"))
    if not torch.cuda.is_available():
        results = run_without_device()
        write_json(args.out and args.out / "bench_graphs.json", results, facts("torch"))
        runs = [run for name in results.values() for m in name.values() for run in m.values()]
        sys.exit(0 if all(run["same_bits"] for run in runs if "measured" in run) else 1)
    print(f"# {torch.cuda.get_device_name()}, {MICROBATCHES} microbatches of {SIZE} sequences")
    results = {}
    for name, (model, moe) in MODELS.items():
        print(f"\n{name}: {model}{f', {moe}' if moe else ''}")
        for mode, graphs in modes_of(moe).items():
            found = results.setdefault(name, {})[mode] = measure(model, moe, graphs, args.steps)
            row("graphs", model=name, mode=mode, **found)
            if args.out:  # what is known so far
                write_json(args.out / "bench_graphs.json", results, facts("torch"))
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
    write_json(args.out and args.out / "bench_graphs.json", results, facts("torch"))


if __name__ == "__main__":
    main()
