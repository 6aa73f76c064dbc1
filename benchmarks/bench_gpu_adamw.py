"""Our flat AdamW kernel against torch.optim.AdamW (fused, foreach) on a GPU, in one run.

    python benchmarks/bench_gpu_adamw.py [--numel 10e6 100e6 1e9] [--rounds 30]

Each contender owns one flat fp32 parameter with its gradient and moments. The contenders take
turns; the median round is shown, timed with CUDA events. A step reads four arrays and writes three,
28 bytes per element, from which the bandwidth follows. With ``bf16`` the kernel also writes the
bf16 copy that training uses, 2 bytes more per element; torch needs a second pass for it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from _common import header, options
from megacore.ops import has_cuda_kernels
from megacore.ops.optim import AdamWSettings, adamw_step_

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def ours(numel: int, *, bf16: bool) -> Callable[[], None]:
    param, grad = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda")
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    copy = torch.empty_like(param, dtype=torch.bfloat16) if bf16 else None
    settings = AdamWSettings(
        step=10, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
    )

    def run() -> None:
        adamw_step_(param, grad, exp_avg, exp_avg_sq, settings, copy_out=copy)

    return run


def theirs(numel: int, *, fused: bool, bf16: bool) -> Callable[[], None]:
    param = nn.Parameter(torch.randn(numel, device="cuda"))
    param.grad = torch.randn(numel, device="cuda")
    copy: Tensor | None = torch.empty_like(param, dtype=torch.bfloat16) if bf16 else None
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


def main() -> int:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--numel", type=float, nargs="+", default=[10e6, 100e6, 1e9])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    if not has_cuda_kernels() or not torch.cuda.is_available():
        print("needs a GPU and a build with nvcc (see `megacore doctor`)", file=sys.stderr)
        return 2
    print(f"{header('torch')}\n# {torch.cuda.get_device_name()}")
    print(f"{'elements':>14} {'copy':>5} {'ours us':>9} {'TB/s':>6} {'fused':>7} {'foreach':>8}")
    for numel in (int(number) for number in args.numel):
        for bf16 in (False, True):
            contenders = {
                "ours": ours(numel, bf16=bf16),
                "fused": theirs(numel, fused=True, bf16=bf16),
                "foreach": theirs(numel, fused=False, bf16=bf16),
            }
            times = measure(contenders, args.rounds)
            bandwidth = numel * (30 if bf16 else 28) / times["ours"] / 1e6
            ratios = [f"{times[name] / times['ours']:.2f}x" for name in ("fused", "foreach")]
            print(
                f"{numel:>14,} {'bf16' if bf16 else '-':>5} {times['ours']:>9.1f} "
                f"{bandwidth:>6.2f} {ratios[0]:>7} {ratios[1]:>8}",
                flush=True,
            )
            del contenders
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
