"""Our grouped products against torch._grouped_mm, a loop of cuBLAS calls and Triton, on a GPU.

    python benchmarks/bench_gpu_grouped_gemm.py [--rows 65536 8192] [--experts 8 32 128 256]

All run in one process on random data, each captured in a CUDA graph and replayed with a cold L2
cache; they take turns, and the median round counts. Ours reads the counts on the device and clears
rows of nobody, and its time holds the set-up kernel. torch and Triton get running sums of the
counts, the loop gets the counts themselves on the host, both for free. The weight gradient is added
to float32 memory: torch's result is added in a second step, the loop's and Triton's directly.

Where there are products of 8-bit operands, their rows follow: with operands that are rounded
already, and with rounding of both, as training has it, each next to ours in bf16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _common import facts, header, options, row
from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.ops.gemm_cuda import Product, launch_grouped, takes_fp8_kernels
from megacore.ops.quantize import quantize_blocks, quantize_columns, quantize_rows

try:
    import _triton_grouped
except ImportError:  # no Triton on this machine
    _triton_grouped = None  # type: ignore[assignment]

PRODUCTS: tuple[Product, ...] = ("forward", "input_grad", "weight_grad")
KINDS = ("balanced", "zipf", "half empty")
PLANS = tuple(
    tile + order for tile in ("wide", "middle", "narrow", "square") for order in ("", "-columns")
)
WEIGHT_PLANS = ("wide", "wide-columns", "square", "square-columns")
# The shape of published figures (torch._grouped_mm 597 to 624 TFLOP/s on an H200): experts, output
# and input features; and rows of an expert for the choice of tiles.
ANCHOR = (256, 4096, 6144)
ANCHOR_ROWS = (1024, 32, 64, 128, 192, 256, 384, 512, 2048)
PEERS = ("torch", "loop", "triton")
Runs = dict[str, Callable[[], object]]


def split_rows(kind: str, num_experts: int, num_rows: int) -> list[int]:
    """Rows per expert, summing to ``num_rows``, in random order."""
    weights = [1.0] * num_experts
    if kind == "zipf":
        weights = [1 / (rank + 1) for rank in range(num_experts)]
    elif kind == "half empty":
        weights = [float(rank % 2) for rank in range(num_experts)]
    counts = [int(num_rows * weight / sum(weights)) for weight in weights]
    counts[-1] += num_rows - sum(counts)
    if kind != "balanced":
        random.Random(num_experts).shuffle(counts)
    return counts


class Data:
    """One problem: factors, results of both widths, counts in every form."""

    def __init__(self, kind: str, num_experts: int, num_rows: int, n: int, k: int) -> None:
        self.counts = split_rows(kind, num_experts, num_rows)
        self.splits = torch.tensor(self.counts, device="cuda")
        self.offsets = self.splits.cumsum(0).to(torch.int32)
        self.x, self.dy, self.w = (
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((num_rows, k), (num_rows, n), (num_experts, n, k))
        )
        self.main_grad = torch.zeros(num_experts, n, k, device="cuda")
        self._results: dict[Product, Tensor] = {}

    def factors(self, product: Product) -> tuple[Tensor, Tensor]:
        """What is multiplied."""
        if product == "forward":
            return self.x, self.w
        return self.dy, self.w if product == "input_grad" else self.x

    def result(self, product: Product) -> Tensor:
        """Where results go, one memory for all contestants; weight gradients are added to it."""
        if product == "weight_grad":
            return self.main_grad
        like = self.dy if product == "forward" else self.x
        return self._results.setdefault(product, torch.empty_like(like))

    def clear(self) -> None:
        """Clear all results."""
        self.main_grad.zero_()
        for result in self._results.values():
            result.zero_()


def ours(data: Data, product: Product, plan: str = "auto") -> Callable[[], Tensor]:
    a, b = data.factors(product)
    out = data.result(product)
    adds = product == "weight_grad"

    def run() -> Tensor:
        launch_grouped(
            product, a, b, data.splits, out, accumulate=adds, clear_tail=not adds, plan=plan
        )
        return out

    return run


def in_fp8(data: Data, product: Product) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    """Return the product of operands that are rounded already, and the rounding of both."""
    out = data.result(product)
    adds = product == "weight_grad"

    def rounded() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if adds:
            columns = (quantize_columns(each, data.splits, transposed=True) for each in factors)
            return next(columns), next(columns)
        weights = quantize_blocks(data.w, transposed=product == "input_grad")
        return quantize_rows(factors[0]), weights

    factors = data.factors(product)
    (a, a_scale), (b, b_scale) = rounded()

    def run() -> Tensor:
        launch_grouped(
            "weight_grad" if adds else "forward",
            a,
            b,
            data.splits,
            out,
            scales=(a_scale, b_scale),
            num_rows=len(data.x),
            accumulate=adds,
            clear_tail=not adds,
        )
        return out

    return run, rounded


def with_torch(data: Data, product: Product) -> Callable[[], Tensor]:
    a, b = data.factors(product)

    def run() -> Tensor:
        if product == "forward":
            return torch._grouped_mm(a, b.transpose(1, 2), offs=data.offsets)
        if product == "input_grad":
            return torch._grouped_mm(a, b, offs=data.offsets)
        data.main_grad.add_(torch._grouped_mm(a.t(), b, offs=data.offsets))
        return data.main_grad

    return run


def with_loop(data: Data, product: Product) -> Callable[[], Tensor]:
    a, b = data.factors(product)
    out = data.result(product)
    rows = [0]
    for count in data.counts:
        rows.append(rows[-1] + count)
    groups = [(e, slice(rows[e], rows[e + 1])) for e, count in enumerate(data.counts) if count]

    def run() -> Tensor:
        for e, part in groups:
            if product == "forward":
                torch.mm(a[part], b[e].t(), out=out[part])
            elif product == "input_grad":
                torch.mm(a[part], b[e], out=out[part])
            else:
                add_product(out[e], a[part].t(), b[part])
        return out

    return run


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """float32 memory plus a product of bf16: in one call where torch has one, else in two."""
    try:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError):
        out.add_(torch.mm(a, b))


def with_triton(data: Data, product: Product) -> Callable[[], Tensor]:
    a, b = data.factors(product)
    out = data.result(product)

    def run() -> Tensor:
        _triton_grouped.grouped(product, a, b, data.offsets, out)
        return out

    return run


# ---- timing -------------------------------------------------------------------------------------


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(runs: Runs, rounds: int) -> dict[str, float]:
    """Median time of each contestant in microseconds."""
    graphs = {name: captured(run) for name, run in runs.items()}
    # Writing more than twice the cache's size leaves nothing of the operands in it. It also takes
    # long enough for the launch that is timed to be queued before it ends.
    flush = torch.empty(32 * 1024 * 1024, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runs}
    for round_number in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            if round_number >= 2:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)
        for name, pairs in events.items()
    }


def contestants(data: Data, product: Product) -> tuple[Runs, dict[str, str]]:
    """Those that run here and agree with ours; and why the others do not."""
    expected = fresh(ours(data, product), data)
    runs: Runs = {"ours": ours(data, product)}
    missing: dict[str, str] = {}
    makers = {"torch": with_torch, "loop": with_loop}
    if _triton_grouped is not None:
        makers["triton"] = with_triton
    else:
        missing["triton"] = "not installed"
    for name, make in makers.items():
        run = make(data, product)
        try:
            error = float((fresh(run, data) - expected).norm() / expected.norm())
        except Exception as problem:  # a peer that does not run is reported, not fatal
            missing[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
            continue
        if error < 2e-2:
            runs[name] = run
        else:
            missing[name] = f"differs by {error:.1e}"
    return runs, missing


def fresh(run: Callable[[], Tensor], data: Data) -> Tensor:
    """What a run writes into cleared memory, in float32; a sample of it where it is large."""
    data.clear()
    result = run().flatten()
    return result[:: max(1, result.numel() // (1 << 24))].to(torch.float32, copy=True)


def dense_rate(rounds: int) -> float:
    """TFLOP/s of one large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / measure({"mm": lambda: torch.mm(a, b, out=out)}, rounds)["mm"] / 1e6


def host_time() -> float:
    """Microseconds of the host per call, launch after launch."""
    data = Data("balanced", 8, 1024, 256, 256)
    run = ours(data, "forward")
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / 200 * 1e6


# ---- report -------------------------------------------------------------------------------------


class Report:
    """Prints lines and keeps them, and the numbers behind them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.results: dict[str, Any] = {"products": [], "plans": [], "fp8": []}

    def say(self, line: str) -> None:
        """Print a line and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def say_once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self.lines:
            self.say(line)

    def write(self, folder: Path) -> None:
        """Write what was said, and the numbers."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_grouped_gemm.txt").write_text("\n".join(self.lines) + "\n")
        (folder / "gpu_grouped_gemm.json").write_text(json.dumps(self.results, indent=2) + "\n")


def compare(report: Report, data: Data, about: dict[str, Any], dense: float, rounds: int) -> None:
    rows, k = data.x.shape
    flops = 2 * rows * k * data.dy.shape[1]
    for product in PRODUCTS:
        runs, missing = contestants(data, product)
        times = measure(runs, rounds)
        rate = flops / times["ours"] / 1e6
        ratios = {name: times[name] / times["ours"] for name in PEERS if name in times}
        shown = "".join(f"{ratios[n]:>8.2f}x" if n in ratios else f"{'-':>9}" for n in PEERS)
        report.say(
            f"{about['rows']:>7} {about['experts']:>4} {about['kind']:<11} {product:<12}"
            f"{times['ours']:>9.1f} {rate:>8.0f} {rate / dense:>6.0%} {shown}"
        )
        for name, reason in missing.items():
            report.say_once(f"  without {name}: {reason}")
        found = {**about, "product": product, "us": times, "tflops": rate, "missing": missing}
        report.results["products"].append(found)
        row("products", **found)


def compare_fp8(report: Report, data: Data, about: dict[str, Any], rounds: int) -> None:
    rows, k = data.x.shape
    flops = 2 * rows * k * data.dy.shape[1]
    for product in PRODUCTS:
        run, rounded = in_fp8(data, product)
        expected = fresh(ours(data, product), data)
        error = float((fresh(run, data) - expected).norm() / expected.norm())
        times = measure({"bf16": ours(data, product), "fp8": run, "rounding": rounded}, rounds)
        total = times["fp8"] + times["rounding"]
        report.say(
            f"{about['rows']:>7} {about['experts']:>4} {about['kind']:<11} {product:<12}"
            f"fp8 {times['fp8']:.1f} us, {flops / times['fp8'] / 1e6:.0f} TFLOP/s; rounding "
            f"{times['rounding']:.1f} us; bf16 / both {times['bf16'] / total:.2f}x"
            + ("" if error < 6e-2 else f"  WRONG RESULT: differs by {error:.1e}")
        )
        found = {**about, "product": product, "us": times, "error": error}
        report.results["fp8"].append(found)
        row("fp8", **found)


def has_fp8(data: Data) -> bool:
    return takes_fp8_kernels(data.x, *data.w.shape)


def compare_plans(report: Report, data: Data, about: dict[str, Any], rounds: int) -> None:
    for product in PRODUCTS:
        plans = PLANS if product != "weight_grad" else WEIGHT_PLANS
        expected = fresh(ours(data, product), data)
        wrong = [
            plan for plan in plans if differs(fresh(ours(data, product, plan), data), expected)
        ]
        plans = tuple(plan for plan in plans if plan not in wrong)
        times = measure({plan: ours(data, product, plan) for plan in ("auto", *plans)}, rounds)
        best = min(plans, key=lambda plan: times[plan])
        shown = "  ".join(f"{plan} {times[plan]:.0f}" for plan in plans)
        report.say(
            f"{about['rows']:>7} {about['experts']:>4} {about['kind']:<11} {product:<12}"
            f"auto {times['auto']:.0f}, best {best} ({times['auto'] / times[best]:.2f})   {shown}"
        )
        if wrong:
            report.say(f"  WRONG RESULTS: {', '.join(wrong)}")
        found = {**about, "product": product, "us": times, "wrong": wrong}
        report.results["plans"].append(found)
        row("plans", **found)


def differs(result: Tensor, expected: Tensor) -> bool:
    """Whether a plan's result is another one than rounding explains."""
    return not float((result - expected).norm()) <= 2e-2 * float(expected.norm())


def run_anchor(args: argparse.Namespace, report: Report, dense: float, begin: float) -> None:
    """The shape of published figures, then plans and peers over rows per expert."""
    num_experts, n, k = ANCHOR
    report.say(f"anchor shape: {num_experts} experts, {n} x {k} features")
    for per_expert in ANCHOR_ROWS:
        if time.perf_counter() - begin > args.seconds:
            report.say(f"stopped after {args.seconds:.0f} s, before {per_expert} rows per expert")
            return
        rows = per_expert * num_experts
        about = {"rows": rows, "experts": num_experts, "kind": "balanced", "features": [n, k]}
        try:  # about 65 GB at 2048 rows
            data = Data("balanced", num_experts, rows, n, k)
            compare(report, data, about, dense, args.rounds)
            if has_fp8(data):
                compare_fp8(report, data, about, args.rounds)
            compare_plans(report, data, about, args.rounds)
        except torch.OutOfMemoryError:
            report.say(f"out of memory with {per_expert} rows per expert")
            return
        if args.out is not None:
            report.write(args.out)
        del data
        torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[65536, 8192])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--out-features", type=int, default=2048)
    parser.add_argument("--in-features", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=100.0, help="stop after about this long")
    parser.add_argument("--anchor", action="store_true", help="E=256, N=4096, K=6144 first")
    parser.add_argument("--out", type=Path, help="folder for gpu_grouped_gemm.{txt,json}")
    return parser.parse_args()


def run_all(args: argparse.Namespace, report: Report) -> None:
    begin = time.perf_counter()
    n, k = args.out_features, args.in_features
    dense = dense_rate(args.rounds)
    host = host_time()
    report.results |= {"dense_tflops": dense, "host_us": host, "features": [n, k]}
    report.say(f"dense bf16 product {dense:.0f} TFLOP/s; host time per call {host:.1f} us")
    report.say(f"{n} x {k} features; torch, loop, triton: their time divided by ours")
    report.say(
        f"{'rows':>7} {'E':>4} {'counts':<11} {'product':<12}{'ours us':>9} {'TFLOP/s':>8} "
        f"{'dense':>6} {'torch':>9}{'loop':>9}{'triton':>9}"
    )
    if args.anchor:
        run_anchor(args, report, dense, begin)
    cases = [(r, e, kind) for r in args.rows for e in args.experts for kind in KINDS]
    for step, compares in enumerate((True, False)):
        if step:
            report.say("tiles: microseconds of each plan, and auto divided by the best")
        for rows, num_experts, kind in cases:
            if time.perf_counter() - begin > args.seconds:
                report.say(
                    f"stopped after {args.seconds:.0f} s, before {rows} {num_experts} {kind}"
                )
                return
            about = {"rows": rows, "experts": num_experts, "kind": kind}
            data = Data(kind, num_experts, rows, n, k)
            if compares:
                compare(report, data, about, dense, args.rounds)
                if kind == "balanced" and has_fp8(data):
                    compare_fp8(report, data, about, args.rounds)
            elif kind != "half empty":
                compare_plans(report, data, about, args.rounds)
            if args.out is not None:  # what is known so far
                report.write(args.out)
            del data
            torch.cuda.empty_cache()


def main() -> int:
    """Print the tables."""
    args = arguments()
    if not torch.cuda.is_available() or not has_cuda_kernels():
        print("needs a GPU and a build with nvcc (see `megacore doctor`)")
        return 2
    if not cuda_kernels().grouped_gemm_archs():
        print("this build has no grouped products: CUTLASS's headers were missing (CUTLASS_ROOT)")
        return 2
    torch.manual_seed(0)
    report = Report()
    report.results["machine"] = {**facts("torch"), "gpu": torch.cuda.get_device_name()}
    report.say(f"{header('torch')}\n# {torch.cuda.get_device_name()}")
    try:
        run_all(args, report)
    finally:
        if args.out is not None:
            report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
