"""Mixture of experts on the CPU, against what torch offers.

    python benchmarks/bench_moe.py [--threads 2] [--experts 8] [--hidden 512] [--width 1024]

Every figure is the median of several rounds, in which the contestants take turns. With one thread
it is processor time, which a busy machine disturbs less; with several it is wall time. A ratio
above 1 means that megacore is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megacore.ops import grouped_gemm, permute_tokens, swiglu, unpermute_tokens
from megacore.ops.activations import swiglu_reference
from megacore.ops.permutation import (
    collect_rows_reference,
    sort_by_expert_reference,
    spread_rows_reference,
)


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each contestant in ms."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if round_number > 0:  # the first round warms up
                times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def splits(kind: str, num_experts: int, rows_per_expert: int) -> list[int]:
    """Rows per expert: all the same, or falling as 1/(rank + 1) with the last quarter empty."""
    if kind == "balanced":
        return [rows_per_expert] * num_experts
    busy = max(1, num_experts * 3 // 4)
    weights = [1 / (rank + 1) for rank in range(busy)]
    total = rows_per_expert * num_experts
    counts = [int(total * weight / sum(weights)) for weight in weights]
    counts[0] += total - sum(counts)
    return counts + [0] * (num_experts - busy)


def mm_loop(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    """What a user writes without a grouped product."""
    y = x.new_empty(x.shape[0], w.shape[1])
    row = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(x[row : row + count], w[expert].t(), out=y[row : row + count])
        row += count
    return y


def mm_loop_backward(
    x: Tensor, w: Tensor, grad: Tensor, counts: list[int], main_grad: Tensor
) -> Tensor:
    """Gradient of the input, and that of the weights added to float32 memory."""
    grad_x = torch.empty_like(x)
    row = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(row, row + count)
            torch.mm(grad[rows], w[expert], out=grad_x[rows])
            main_grad[expert].addmm_(
                grad[rows].t().to(main_grad.dtype), x[rows].to(main_grad.dtype)
            )
        row += count
    return grad_x


def torch_grouped(x: Tensor, w: Tensor, counts: list[int]) -> Callable[[], Tensor] | None:
    """``torch._grouped_mm`` if this build runs it here."""
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return None
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    transposed = w.transpose(1, 2)

    def run() -> Tensor:
        result: Tensor = grouped(x, transposed, offs=offsets)
        return result

    try:
        run()
    except (RuntimeError, NotImplementedError) as error:
        print(f"  torch._grouped_mm does not run here: {str(error).splitlines()[0]}")
        return None
    return run


def bench_grouped(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    experts, hidden, width = arguments.experts, arguments.hidden, arguments.width
    w = torch.randn(experts, width, hidden).to(dtype)
    main_grad = torch.zeros(experts, width, hidden)
    name = str(dtype).removeprefix("torch.")
    print(f"grouped product, {name}: {experts} experts, {hidden} -> {width}; forward / backward")
    print(
        "  rows/expert  shape     torch.mm loop      _grouped_mm   megacore          mm/megacore  "
        "_grouped_mm/megacore"
    )
    for rows in arguments.rows:
        for kind in ("balanced", "skewed"):
            counts = splits(kind, experts, rows)
            m_splits = torch.tensor(counts)
            x = torch.randn(sum(counts), hidden).to(dtype)
            grad = torch.randn(sum(counts), width).to(dtype)

            def ours_backward(x=x, grad=grad, m_splits=m_splits) -> None:  # type: ignore[no-untyped-def]
                torch.ops.megacore.grouped_gemm_input_grad(grad, w, m_splits)
                torch.ops.megacore.grouped_gemm_weight_grad_(grad, x, m_splits, main_grad, True)

            runs: dict[str, Callable[[], object]] = {
                "mm": lambda x=x, counts=counts: mm_loop(x, w, counts),
                "mm back": lambda x=x, grad=grad, counts=counts: mm_loop_backward(
                    x, w, grad, counts, main_grad
                ),
                "ours": lambda x=x, m_splits=m_splits: grouped_gemm(x, w, m_splits),
                "ours back": ours_backward,
            }
            theirs = torch_grouped(x, w, counts)
            if theirs is not None:
                runs["grouped"] = theirs
            ms = medians(runs, arguments.rounds)
            flops = 2e-6 * sum(counts) * hidden * width
            grouped_ms = f"{ms['grouped']:8.2f} ms" if "grouped" in ms else "          -"
            grouped_ratio = f"{ms['grouped'] / ms['ours']:.2f}" if "grouped" in ms else "-"
            print(
                f"  {rows:11d}  {kind:8s}  {ms['mm']:6.2f} / {ms['mm back']:6.2f} ms"
                f"  {grouped_ms}  {ms['ours']:6.2f} / {ms['ours back']:6.2f} ms"
                f"  {ms['mm'] / ms['ours']:4.2f} / {ms['mm back'] / ms['ours back']:4.2f}"
                f"  {grouped_ratio:>8s}   ({flops / ms['ours']:.0f} GFLOP/s forward)"
            )


def bench_rows(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    tokens, hidden, width, experts, k = (
        4096,
        arguments.hidden,
        arguments.width,
        arguments.experts,
        2,
    )
    x = torch.randn(tokens, hidden).to(dtype)
    chosen = torch.rand(tokens, experts).topk(k).indices
    probs = torch.rand(tokens, k)
    moved = permute_tokens(x, chosen, experts)
    inner = torch.randn(tokens * k, 2 * width).to(dtype)
    row_probs = torch.rand(tokens * k)

    def reference_permute() -> None:
        row_map, _ = sort_by_expert_reference(chosen, experts)
        spread_rows_reference(x, row_map, tokens * k)

    ms = medians(
        {
            "permute": lambda: permute_tokens(x, chosen, experts),
            "permute torch": reference_permute,
            "unpermute": lambda: unpermute_tokens(moved.rows, moved.row_map, probs),
            "unpermute torch": lambda: collect_rows_reference(moved.rows, moved.row_map, probs),
            "swiglu": lambda: swiglu(inner, row_probs),
            "swiglu torch": lambda: swiglu_reference(inner, row_probs),
        },
        arguments.rounds,
    )
    name = str(dtype).removeprefix("torch.")
    print(f"{tokens} tokens, {hidden} wide, {k} of {experts} experts, {name}")
    for op in ("permute", "unpermute", "swiglu"):
        print(
            f"  {op:10s} torch {ms[op + ' torch']:7.2f} ms   megacore {ms[op]:7.2f} ms"
            f"   torch/megacore {ms[op + ' torch'] / ms[op]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        bench_grouped(arguments, dtype)
        bench_rows(arguments, dtype)


if __name__ == "__main__":
    main()
