"""Our flat AdamW step against torch.optim.AdamW (fused, foreach) on the CPU, in one run.

    python benchmarks/bench_adamw.py [--numel 10e6 100e6] [--threads 1 2] [--rounds 15]

Each contender owns one flat fp32 parameter with its gradient and moments: the best case for torch,
which then has nothing to iterate over. The contenders take turns, so a busy moment of the machine
hits all of them; the best round is shown, since other work on the machine only adds time. ``ratio``
is time of torch / our time. A step reads four arrays and writes three: 28 bytes per element.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from megacore.ops.optim import AdamWSettings, adamw_step_

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def ours(numel: int) -> Callable[[], None]:
    param, grad = torch.randn(numel), torch.randn(numel)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        settings = AdamWSettings(
            step=step, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY
        )
        adamw_step_(param, grad, exp_avg, exp_avg_sq, settings)

    return run


def theirs(numel: int, *, fused: bool) -> Callable[[], None]:
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
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

    return run


def measure(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Best time of each contender in ms; the first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if round_number > 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: min(values) for name, values in times.items()}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numel", type=float, nargs="+", default=[1e6, 10e6, 100e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    now = datetime.datetime.now(datetime.UTC)
    print(f"# {processor()}; {now:%Y-%m-%d}; Python {platform.python_version()}", end="")
    print(f", torch {torch.__version__}; best of {arguments.rounds} rounds", end="")
    print(f"; load average before {os.getloadavg()[0]:.1f}")
    print(f"# python {' '.join(sys.argv)}")
    print("threads |    numel |  ours ms   GB/s | fused ms  ratio | foreach ms  ratio")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for numel in map(int, arguments.numel):
            contenders = {
                "ours": ours(numel),
                "fused": theirs(numel, fused=True),
                "foreach": theirs(numel, fused=False),
            }
            ms = measure(contenders, arguments.rounds)
            print(
                f"{threads:7d} | {numel / 1e6:6.0f} M | {ms['ours']:8.2f} "
                f"{28 * numel / ms['ours'] / 1e6:6.1f} | {ms['fused']:8.2f} "
                f"{ms['fused'] / ms['ours']:5.2f}x | {ms['foreach']:10.2f} "
                f"{ms['foreach'] / ms['ours']:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
