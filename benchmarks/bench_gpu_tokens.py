"""Token kernels of a GPU: bandwidth against a copy, times of routing, sorting and planning.

    python benchmarks/bench_gpu_tokens.py [--rounds 15] [--out FOLDER]

Kernels that move rows are bound by memory. Each works on more data than the caches hold, and its
time is set against the bytes it must move: every input read once, every output written once. The
share is of the bandwidth that a large copy reaches in the same run; the goal is 85%. torch's
operations for the same result run beside them (its backward pass of SwiGLU with the forward pass).
Exchanges through memory of peers run with a group of one member, whose peer is itself.

Small kernels are timed in a graph, once with warm caches (many in a row) and once after 512 MiB
were written between two of them. ``--out`` writes ``bench_gpu_tokens.json`` and ``.txt``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _common import facts, header, options, row, take_turns, write_json
from megacore.moe import plan_offload, plan_offload_on_device
from megacore.moe.dispatchers.device_peers import DevicePeers
from megacore.moe.dispatchers.peer_memory import CopyMap
from megacore.ops import (
    has_cuda_kernels,
    permute,
    sort_by_expert,
    swiglu,
    top_k,
    unpermute,
)
from megacore.ops.activations import swiglu_reference
from megacore.ops.optim import sum_of_squares
from megacore.ops.permutation import (
    permute_reference,
    sort_by_expert_reference,
    unpermute_reference,
)
from megacore.ops.topk import top_k_reference
from megacore.parallel.process_groups import Group

Run = Callable[[], Any]


class OneMember(DevicePeers):
    """A group of one: its own memory stands for that of all, so links between GPUs play no part."""

    def _allocate(self, num_bytes: int) -> tuple[Tensor, Tensor, object]:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.tensor([memory.data_ptr()], device=self.device), memory, None


# Tokens, choices, features, experts, inner width: the shapes of two published models.
SHAPES = {"256 experts": (8192, 8, 7168, 256, 2048), "8 experts": (16384, 2, 4096, 8, 14336)}
IN_A_ROW = 20


def busy() -> None:
    """Half a millisecond of work for the device, in which the host gets ahead of it."""
    torch.cuda._sleep(1_000_000)


def median_us(run: Run, rounds: int, before: Run = busy) -> float:
    """Median time of ``run`` on the device, in microseconds."""
    times = []
    for number in range(rounds + 2):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graph_of(run: Run, times: int) -> torch.cuda.CUDAGraph:
    """``run`` captured ``times`` times in a row."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def copy_bandwidth(rounds: int) -> float:
    """TB/s of a copy of 2 GiB, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), rounds) / 1e6


def moving_kernels(shape: tuple[int, ...]) -> dict[str, tuple[Run, Run, int]]:
    """Name -> ours, torch's, bytes to move."""
    num_tokens, k, width, num_experts, inner = shape
    scores = torch.rand(num_tokens, num_experts, device="cuda")
    row_map, _ = sort_by_expert(top_k(scores, k), num_experts)
    num_rows = num_tokens * k
    probs = torch.rand(num_tokens, k, device="cuda")
    tokens = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    row_dots = torch.ops.megacore.row_dots.default
    moved = (num_tokens + num_rows) * width * 2
    x = torch.randn(num_rows, 2 * inner, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(num_rows, inner, device="cuda", dtype=torch.bfloat16)
    row_probs = torch.rand(num_rows, device="cuda")
    backward = torch.ops.megacore.swiglu_backward.default

    def dots_by_torch() -> Tensor:
        picked = rows[row_map.flatten()].view(num_tokens, k, width)
        return torch.einsum("th,tkh->tk", tokens.float(), picked.float())

    def backward_by_torch() -> tuple[Tensor, ...]:
        leaf, weight = x.detach().requires_grad_(), row_probs.detach().requires_grad_()
        return torch.autograd.grad(swiglu_reference(leaf, weight), (leaf, weight), grad)

    return {
        "permute": (
            lambda: permute(tokens, row_map, num_rows),
            lambda: permute_reference(tokens, row_map, num_rows),
            moved,
        ),
        "unpermute": (
            lambda: unpermute(rows, row_map, probs),
            lambda: unpermute_reference(rows, row_map, probs),
            moved,
        ),
        "row dots": (lambda: row_dots(tokens, rows, row_map), dots_by_torch, moved),
        "swiglu": (
            lambda: swiglu(x, row_probs),
            lambda: swiglu_reference(x, row_probs),
            num_rows * inner * 3 * 2,
        ),
        "swiglu backward": (
            lambda: backward(grad, x, row_probs),
            backward_by_torch,
            num_rows * inner * 5 * 2,
        ),
    }


def peer_kernels(shape: tuple[int, ...]) -> dict[str, tuple[Run, Run, int]]:
    """Name -> an exchange through memory of peers, torch's operations, bytes to move."""
    num_tokens, k, width, num_experts, _ = shape
    num_rows = num_tokens * k
    row_map, counts = sort_by_expert(
        top_k(torch.rand(num_tokens, num_experts, device="cuda"), k), num_experts
    )
    copies = CopyMap(rows=row_map, num_choices=k, capacity=num_rows, num_arrived=counts.sum())
    peers = OneMember(Group.solo(), torch.device("cuda"), timeout_s=20.0)
    tokens = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    moved_rows, moved_tokens = num_rows * width * 2, num_tokens * width * 2

    def push() -> None:
        peers.finish_push(peers.start_push(tokens, None, copies), rows, None, copies)

    def pull(in_place: bool) -> None:
        reserved = peers.reserve_pull(copies, rows)
        published = reserved.rows if in_place else rows
        peers.start_pull(reserved, published, None, tokens, None)
        peers.finish_pull(reserved)

    return {
        # Written to the buffer and copied out of it; or copied to it, if a product has not written
        # them there, and read there.
        "peer push": (
            push,
            lambda: permute_reference(tokens, row_map, num_rows),
            moved_tokens + 3 * moved_rows,
        ),
        "peer pull": (
            lambda: pull(in_place=False),
            lambda: unpermute_reference(rows, row_map),
            moved_tokens + 3 * moved_rows,
        ),
        "peer pull in place": (
            lambda: pull(in_place=True),
            lambda: unpermute_reference(rows, row_map),
            moved_tokens + moved_rows,
        ),
    }


def small_kernels(shape: tuple[int, ...]) -> dict[str, tuple[Run, Run]]:
    """Name -> ours, torch's."""
    num_tokens, k, _, num_experts, _ = shape
    scores = torch.rand(num_tokens, num_experts, device="cuda")
    expert_of = top_k(scores, k)
    return {
        "top-k": (lambda: top_k(scores, k), lambda: top_k_reference(scores, k)),
        "sort": (
            lambda: sort_by_expert(expert_of, num_experts),
            lambda: sort_by_expert_reference(expert_of, num_experts),
        ),
    }


def measure_moving(rounds: int, copy: float) -> list[dict[str, Any]]:
    """Bandwidths of the kernels that move rows."""
    found = []
    for shape_name, shape in SHAPES.items():
        kernels = {**moving_kernels(shape), **peer_kernels(shape)}
        for name, (ours, theirs, num_bytes) in kernels.items():
            ours_us, torch_us = median_us(ours, rounds), median_us(theirs, max(rounds // 3, 3))
            bandwidth = num_bytes / ours_us / 1e6
            found.append(
                {
                    "kernel": name,
                    "shape": shape_name,
                    "us": ours_us,
                    "tb_per_s": bandwidth,
                    "of_copy": bandwidth / copy,
                    "torch_us": torch_us,
                }
            )
            row("moving", **found[-1])
        torch.cuda.empty_cache()
    values = torch.randn(1 << 29, device="cuda")
    ours_us = median_us(lambda: sum_of_squares(values), rounds)
    torch_us = median_us(lambda: torch.linalg.vector_norm(values, dtype=torch.float64), rounds)
    bandwidth = values.nbytes / ours_us / 1e6
    found.append(
        {
            "kernel": "sum of squares",
            "shape": "2 GiB",
            "us": ours_us,
            "tb_per_s": bandwidth,
            "of_copy": bandwidth / copy,
            "torch_us": torch_us,
        }
    )
    row("moving", **found[-1])
    return found


def measure_small(rounds: int) -> list[dict[str, Any]]:
    """Times of the kernels that work on a few numbers per token."""
    wash = torch.empty(1 << 27, device="cuda")
    found = []
    for shape_name, shape in SHAPES.items():
        for name, (ours, theirs) in small_kernels(shape).items():
            warm, once = graph_of(ours, IN_A_ROW), graph_of(ours, 1)
            beside = graph_of(theirs, IN_A_ROW)
            found.append(
                {
                    "kernel": name,
                    "shape": shape_name,
                    "warm_us": median_us(warm.replay, rounds) / IN_A_ROW,
                    "cold_us": median_us(once.replay, rounds, before=lambda: wash.fill_(1.0)),
                    "torch_us": median_us(beside.replay, rounds) / IN_A_ROW,
                }
            )
            row("small", **found[-1])
    return found


def measure_plans(rounds: int) -> list[dict[str, Any]]:
    """Times of the offload planner for skewed routings, and of the CPU's for the same counts."""
    wash = torch.empty(1 << 27, device="cuda")
    found = []
    for num_ranks in (8, 32, 64):
        heat = torch.rand(256) ** 3
        counts = (torch.rand(num_ranks, 256) * heat * 1000).long()
        on_device = counts.cuda()

        def run(on_device: Tensor = on_device) -> Any:
            return plan_offload_on_device(on_device, rank=0, num_spare_slots=2)

        warm, once = graph_of(run, IN_A_ROW), graph_of(run, 1)
        on_cpu = take_turns(
            {"cpu": partial(plan_offload, counts, num_spare_slots=2)}, rounds=rounds
        )
        found.append(
            {
                "ranks": num_ranks,
                "clones": int(run().summary[1]),
                "warm_us": median_us(warm.replay, rounds) / IN_A_ROW,
                "cold_us": median_us(once.replay, rounds, before=lambda: wash.fill_(1.0)),
                "cpu_us": statistics.median(on_cpu["cpu"]) * 1e6,
            }
        )
        row("plans", **found[-1])
    return found


def table(
    moving: list[dict[str, Any]],
    small: list[dict[str, Any]],
    plans: list[dict[str, Any]],
    copy: float,
) -> list[str]:
    """The results as text."""
    lines = [f"copy of 2 GiB: {copy:.2f} TB/s", ""]
    lines.append(f"{'kernel':<16} {'shape':<12} {'us':>9} {'TB/s':>6} {'of copy':>8} {'torch':>7}")
    for each in moving:
        lines.append(
            f"{each['kernel']:<16} {each['shape']:<12} {each['us']:>9.1f} {each['tb_per_s']:>6.2f} "
            f"{each['of_copy']:>8.0%} {each['torch_us'] / each['us']:>6.2f}x"
        )
    lines += ["", f"{'kernel':<16} {'shape':<12} {'warm us':>9} {'cold us':>9} {'torch':>7}"]
    for each in small:
        lines.append(
            f"{each['kernel']:<16} {each['shape']:<12} {each['warm_us']:>9.1f} "
            f"{each['cold_us']:>9.1f} {each['torch_us'] / each['warm_us']:>6.2f}x"
        )
    lines += ["", "offload plan, 256 experts, 2 slots"]
    lines.append(f"{'ranks':>5} {'clones':>6} {'warm us':>9} {'cold us':>9} {'cpu us':>9}")
    for each in plans:
        lines.append(
            f"{each['ranks']:>5} {each['clones']:>6} {each['warm_us']:>9.1f} "
            f"{each['cold_us']:>9.1f} {each['cpu_us']:>9.1f}"
        )
    return lines


def main() -> int:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for the results as JSON and text")
    args = parser.parse_args()
    if not has_cuda_kernels() or not torch.cuda.is_available():
        print("needs a GPU and a build with nvcc (see `megacore doctor`)", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    copy = copy_bandwidth(args.rounds)
    moving, small = measure_moving(args.rounds, copy), measure_small(args.rounds)
    plans = measure_plans(args.rounds)
    device = torch.cuda.get_device_name()
    text = "\n".join([header("torch"), f"# {device}", *table(moving, small, plans, copy)])
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_gpu_tokens.txt").write_text(text + "\n")
        results = {"copy_tb_per_s": copy, "moving": moving, "small": small, "plans": plans}
        machine = {**facts("torch"), "gpu": device}
        write_json(args.out / "bench_gpu_tokens.json", results, machine)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
