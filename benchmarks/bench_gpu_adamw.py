"""Our flat AdamW kernel against torch.optim.AdamW (fused, foreach) on a GPU, in one run.

    python benchmarks/bench_gpu_adamw.py [--numel 10e6 100e6 1e9] [--rounds 30] [--out FOLDER]

Each contender owns one flat fp32 parameter with its gradient and moments. The contenders take
turns; the median round is shown, timed with CUDA events. A step reads four arrays and writes three,
28 bytes per element, from which the bandwidth follows; its share is of what a large copy reaches in
the same run, and the goal is 85%. With ``bf16`` and ``fp16`` the kernel also writes the narrow copy
that training uses, 2 bytes more per element; torch needs a second pass for it. ``--out`` writes
``bench_gpu_adamw.json``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _common import facts, header, options, row, write_json
from megacore.ops import has_cuda_kernels
from megacore.ops.optim import AdamWSettings, adamw_step_

COPIES = {"-": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PEERS = ("fused", "foreach")
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def ours(numel: int, *, copy_out: torch.dtype | None) -> Callable[[], None]:
    param, grad = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda")
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    copy = None if copy_out is None else torch.empty_like(param, dtype=copy_out)
    settings = AdamWSettings(
        step=10, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
    )

    def run() -> None:
        adamw_step_(param, grad, exp_avg, exp_avg_sq, settings, copy_out=copy)

    return run


def theirs(numel: int, *, fused: bool, copy_out: torch.dtype | None) -> Callable[[], None]:
    param = nn.Parameter(torch.randn(numel, device="cuda"))
    param.grad = torch.randn(numel, device="cuda")
    copy: Tensor | None = None if copy_out is None else torch.empty_like(param, dtype=copy_out)
    optimizer = torch.optim.AdamW(
        [param],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=fused,
        foreach=not fused,
    )

    def run() -> None:
        optimizer.step()
        if copy is not None:
            copy.copy_(param.detach())

    return run


def measure(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median time of each contender in microseconds, after three rounds of warmup."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 3):
        for name, run in contenders.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if round_number >= 3:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(rounds: int) -> float:
    """TB/s of a copy of 2 GiB, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure({"copy": lambda: target.copy_(source)}, rounds)["copy"] / 1e6


def compare(numel: int, copy_out: torch.dtype | None, rounds: int) -> dict[str, Any]:
    """Microseconds of all contenders, and the bandwidth of ours."""
    contenders = {
        "ours": ours(numel, copy_out=copy_out),
        "fused": theirs(numel, fused=True, copy_out=copy_out),
        "foreach": theirs(numel, fused=False, copy_out=copy_out),
    }
    times = measure(contenders, rounds)
    num_bytes = numel * (28 if copy_out is None else 30)
    return {"us": times, "tb_per_s": num_bytes / times["ours"] / 1e6}


def main() -> int:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--numel", type=float, nargs="+", default=[10e6, 100e6, 1e9])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder for bench_gpu_adamw.json")
    args = parser.parse_args()
    if not has_cuda_kernels() or not torch.cuda.is_available():
        print("needs a GPU and a build with nvcc (see `megacore doctor`)", file=sys.stderr)
        return 2
    print(f"{header('torch')}\n# {torch.cuda.get_device_name()}")
    copy = copy_bandwidth(args.rounds)
    print(f"copy of 2 GiB: {copy:.2f} TB/s")
    print(
        f"{'elements':>14} {'copy':>5} {'ours us':>9} {'TB/s':>6} {'of copy':>8} "
        f"{'fused':>7} {'foreach':>8}"
    )
    results: dict[str, Any] = {"copy_tb_per_s": copy, "steps": []}
    for numel in (int(number) for number in args.numel):
        for name, dtype in COPIES.items():
            found = compare(numel, dtype, args.rounds)
            bandwidth = found["tb_per_s"]
            ratios = [f"{found['us'][peer] / found['us']['ours']:.2f}x" for peer in PEERS]
            print(
                f"{numel:>14,} {name:>5} {found['us']['ours']:>9.1f} {bandwidth:>6.2f} "
                f"{bandwidth / copy:>8.0%} {ratios[0]:>7} {ratios[1]:>8}",
                flush=True,
            )
            results["steps"].append({"elements": numel, "copy": name, **found})
            row("adamw", elements=numel, copy=name, **found)
            if args.out is not None:  # what is known so far
                machine = {**facts("torch"), "gpu": torch.cuda.get_device_name()}
                write_json(args.out / "bench_gpu_adamw.json", results, machine)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
