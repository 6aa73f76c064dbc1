"""Our flat AdamW step against torch.optim.AdamW (fused, foreach) on the CPU, in one run.

    python benchmarks/bench_adamw.py [--numel 10e6 100e6] [--threads 1 2] [--rounds 15]

Each contender owns one flat fp32 parameter with its gradient and moments: the best case for torch,
which then has nothing to iterate over. The contenders take turns, so a busy moment of the machine
hits all of them; the best round is shown, since other work on the machine only adds time. ``ratio``
is time of torch / our time. A step reads four arrays and writes three: 28 bytes per element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from _common import header, options, take_turns
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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--numel", type=float, nargs="+", default=[1e6, 10e6, 100e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{header('torch')}\n# best of {arguments.rounds} rounds")
    print("threads |    numel |  ours ms   GB/s | fused ms  ratio | foreach ms  ratio")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for numel in map(int, arguments.numel):
            contenders = {
                "ours": ours(numel),
                "fused": theirs(numel, fused=True),
                "foreach": theirs(numel, fused=False),
            }
            times = take_turns(contenders, rounds=arguments.rounds)
            ms = {name: 1e3 * min(values) for name, values in times.items()}
            print(
                f"{threads:7d} | {numel / 1e6:6.0f} M | {ms['ours']:8.2f} "
                f"{28 * numel / ms['ours'] / 1e6:6.1f} | {ms['fused']:8.2f} "
                f"{ms['fused'] / ms['ours']:5.2f}x | {ms['foreach']:10.2f} "
                f"{ms['foreach'] / ms['ours']:5.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
