"""Processor time per call of operations on tensors so small that the call takes most of it.

Times are those of one thread: the fastest of several turns. Forward and backward is the time per
operation of a chain of 20 with one backward pass to its input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _common import finish, header, options, take_turns
from megacore.ops import dense, gemm

CHAIN = 20

Contender = Callable[[Tensor], Tensor]


class Empty(torch.autograd.Function):
    """A function that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return grad


def norms(rows: int, width: int) -> tuple[Tensor, dict[str, Contender]]:
    x, other, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    return x, {
        "torch.mul": lambda x: torch.mul(x, other),
        "empty autograd.Function": Empty.apply,
        "F.rms_norm": lambda x: torch.nn.functional.rms_norm(x, (width,), weight, 1e-5),
        "rms_norm": lambda x: dense.rms_norm(x, weight, 1e-5),
    }


def products(rows: int, width: int) -> tuple[Tensor, dict[str, Contender]]:
    x, other = torch.randn(rows, width), torch.randn(rows, width)
    w, m_splits = torch.randn(2, width, width) / width**0.5, torch.tensor([1, rows - 1])
    single = w[0].t()
    return x, {
        "torch.mul": lambda x: torch.mul(x, other),
        "empty autograd.Function": Empty.apply,
        "torch.mm, one expert": lambda x: torch.mm(x, single),
        "grouped_gemm": lambda x: gemm.grouped_gemm(x, w, m_splits),
    }


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(times):
            run()

    return turn


def fastest(turns: Mapping[str, Callable[[], object]], calls: int, rounds: int) -> dict[str, float]:
    """Microseconds per call."""
    times = take_turns(turns, rounds=rounds, clock=time.thread_time)
    return {name: min(seconds) / calls * 1e6 for name, seconds in times.items()}


def measure(
    x: Tensor, contenders: Mapping[str, Contender], calls: int, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Microseconds per call without gradients, forward with them, and forward and backward."""
    leaf, grad = x.clone().requires_grad_(), torch.randn(x.shape)

    def chain(run: Contender) -> None:
        y = leaf
        for _ in range(CHAIN):
            y = run(y)
        torch.autograd.grad(y, leaf, grad)

    def turns(make: Callable[[Contender], Callable[[], object]], times: int) -> Any:
        return {name: repeated(make(run), times) for name, run in contenders.items()}

    plain = fastest(turns(lambda run: lambda: run(x), calls), calls, rounds)
    forward = fastest(turns(lambda run: lambda: run(leaf), calls), calls, rounds)
    chains = calls // CHAIN
    both = fastest(turns(lambda run: lambda: chain(run), chains), chains * CHAIN, rounds)
    return {name: (plain[name], forward[name], both[name]) for name in contenders}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="per turn")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = [f"{__doc__}\n{header('torch')}"]
    for title, make in (("norms", norms), ("grouped products, 2 experts", products)):
        for rows, width in ((4, 64), (4, 256)):
            found = measure(*make(rows, width), args.calls, args.rounds)
            lines = [f"{title}: {rows} rows of {width} float32 numbers; us per call"]
            lines.append(f"{'':32}{'no gradient':>12}{'forward':>12}{'and backward':>14}")
            for name, (plain, forward, both) in found.items():
                lines.append(f"{name:32}{plain:12.1f}{forward:12.1f}{both:14.1f}")
            parts.append("\n".join(lines))
    finish(parts, args.out)


if __name__ == "__main__":
    main()
