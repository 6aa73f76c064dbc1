"""Training steps of megacore beside its peers, as living processes that take turns.

    make bench-peers [BENCH_ARGS="--rounds 10 --record"] [MEGACORE_AVX512=OFF]

Each contestant is a world of processes that stays alive and waits for its turn, so a busy moment of
the machine hits all of them. A turn is several steps in a row, as training makes them. The first
one does not count: it finds the caches full of the other contestants' data. A turn ends early where
its steps take seconds, after two of them at the earliest.

The wall time of a step is that of its slowest rank, its processor time the sum of all ranks, of
which the median and the quartiles are shown. ``ratio`` is peer / megacore: above 1, megacore is
faster. ``foreign`` is the number of cores that other work took meanwhile. ``products`` are the
milliseconds of a step in matrix products of linear layers and experts, by torch's profiler in a
turn of its own; the wall time without them is what a step takes outside of products. `make`
installs the peers into ``build/peers``; megacore's environment is not changed.
``--record`` appends a row to ``benchmarks/history.jsonl``.

A build of megacore without kernels for AVX-512, on a processor that has it, holds all libraries to
AVX2 (`AVX2_ONLY`), and the record says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _peer_steps import DENSE, NARROW, STEPS, Shape, Step

HERE = Path(__file__).parent
# A turn in which the steps that count have taken this long is over.
LONGEST_TURN_S = 2.0
# Environment that holds oneDNN, MKL, torch's own kernels and those that it compiles to AVX2.
AVX2_ONLY = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
}


# Products of linear layers and experts, by their names in torch's profiler.
PRODUCTS = frozenset(
    [
        *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")),
        *("mkldnn::_linear_pointwise", "megacore::_grouped_product"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step that contestants make, megacore first.

    Attributes:
        name: Shown above the rows.
        names: Contestants, of ``_peer_steps.STEPS``, or of ``bench_optimizer.VARIANTS`` with ranks.
        shape: Model and batch of a step on one rank.
        ranks: Processes of each contestant.
        threads: Threads of each process.
    """

    name: str
    names: tuple[str, ...]
    shape: Shape = field(default_factory=Shape)
    ranks: int = 1
    threads: int = 1


WORKS = (
    Work(name="dense step, d 256, 4 layers, 1,024 tokens", names=DENSE),
    Work(name="dense step, two threads", names=DENSE, threads=2),
    Work(
        name="MoE step, d 96, 4 layers, 8 experts, 1,024 tokens",
        names=("megacore", "transformers"),
        shape=Shape(hidden=96, ffn=192, experts=8),
    ),
    Work(name="dense step, bfloat16", names=NARROW, shape=Shape(dtype="bfloat16")),
    Work(
        name="MoE step, bfloat16",
        names=NARROW,
        shape=Shape(hidden=96, ffn=192, experts=8, dtype="bfloat16"),
    ),
    Work(
        name="ZeRO-1 step, 100.7 M parameters",
        names=("megacore", "megacore-overlap", "ddp", "zero", "fsdp"),
        ranks=2,
    ),
    Work(
        name="ZeRO-1 step between hosts (gloo)",
        names=("megacore-gloo", "megacore-gloo-overlap", "megacore-gloo-overlap-plain", "ddp"),
        ranks=2,
    ),
)


def optimizer_step(name: str, rank: int, world: int, store: str) -> Step:
    import torch
    import torch.distributed as dist

    import bench_optimizer

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    shape = bench_optimizer.Shape(hidden=1024, layers=12, tokens=8)
    step, _ = bench_optimizer.make_step(name, shape)
    return lambda number: step(
        torch.randn(shape.tokens, shape.hidden, generator=bench_optimizer.seeded(number, rank))
    )


def serve(work: Work, name: str, rank: int, store: str) -> None:
    """Make one step per line of the input, and answer with its wall and processor time."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(work.threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if work.ranks == 1:
        step = STEPS[name](work.shape)
    else:
        step = optimizer_step(name, rank, work.ranks, store)
    for number, line in enumerate(sys.stdin):
        if line.startswith("products"):
            print(products_s(step, number), file=answers, flush=True)
            continue
        start, cpu = time.perf_counter(), time.process_time()
        step(number)
        print(time.perf_counter() - start, time.process_time() - cpu, file=answers, flush=True)
    os._exit(0)  # groups need no orderly end


def products_s(step: Step, number: int) -> float:
    """Return the time of the products of a step, in seconds: the least of three steps."""
    from torch.profiler import ProfilerActivity, profile

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes lines of its own
    found = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(number)
        events = profiled.key_averages()
        found.append(sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS))
    return float(min(found)) / 1e6


class Contestant:
    """A world of processes that make steps when they are told to."""

    def __init__(self, work: Work, name: str, folder: str, peer_python: str) -> None:
        is_peer = work.ranks == 1 and not name.startswith("megacore")
        python = peer_python if is_peer else sys.executable
        store = f"{folder}/{name.replace(' ', '_')}"
        number = str(WORKS.index(work))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(work.threads),
            "TORCH_GLOO_LAZY_INIT": "1",
        }
        self.name = name
        self.cpu_s = 0.0  # of all steps so far
        self._ranks = [
            subprocess.Popen(
                [python, __file__, "--serve", number, name, str(rank), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(work.ranks)
        ]

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """Return the times of all but the first of at most ``steps`` steps in a row."""
        self.step()
        times: list[tuple[float, float]] = []
        while len(times) < steps - 1 and sum(wall for wall, _ in times) < LONGEST_TURN_S:
            times.append(self.step())
        return times

    def step(self) -> tuple[float, float]:
        """Return the wall time of the slowest rank and the processor time of all, in seconds."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        lines = [rank.stdout.readline().split() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit(f"bench_peers: contestant {self.name} ended; see its error above")
        wall, cpu = max(float(line[0]) for line in lines), sum(float(line[1]) for line in lines)
        self.cpu_s += cpu
        return wall, cpu

    def products_s(self) -> float:
        """Return the time of products in a step of the first rank, in seconds."""
        rank = self._ranks[0]
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("products\n")
        rank.stdin.flush()
        return float(rank.stdout.readline())

    def end(self) -> None:
        """End the processes, which are waiting."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def busy_s() -> float:
    """Processor time that all processes of the machine have taken."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def compare(work: Work, rounds: int, steps: int, peer_python: str) -> list[dict[str, Any]]:
    """Let the contestants of one work take turns; returns a row for each."""
    names = work.names
    with tempfile.TemporaryDirectory() as folder:
        contestants = [Contestant(work, name, folder, peer_python) for name in names]
        try:
            for contestant in contestants:
                contestant.turn(min(steps, 3))  # to compile, and to fill pools of memory
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            start, busy = time.perf_counter(), busy_s()
            before = sum(contestant.cpu_s for contestant in contestants)
            for _ in range(rounds):
                for contestant in contestants:
                    times[contestant.name] += contestant.turn(steps)
            ours = sum(contestant.cpu_s for contestant in contestants) - before
            foreign = (busy_s() - busy - ours) / (time.perf_counter() - start)
            products = {
                contestant.name: round(1e3 * contestant.products_s(), 1) if work.ranks == 1 else 0.0
                for contestant in contestants
            }
        finally:
            for contestant in contestants:
                contestant.end()
    rows = []
    for name in names:
        wall, cpu = ([1e3 * each[i] for each in times[name]] for i in (0, 1))
        row = {
            "work": work.name,
            "ranks": work.ranks,
            "threads": work.threads,
            "name": name,
            "foreign": round(max(0.0, foreign), 2),
        }
        row |= {"wall_ms": quartiles(wall), "cpu_ms": quartiles(cpu)}
        rows.append({**row, "products_ms": products[name]} if products[name] else row)
    return rows


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [round(value, 1) for value in statistics.quantiles(values, n=4, method="inclusive")]


def vector_width() -> str:
    flags = Path("/proc/cpuinfo").read_text()
    names = {"avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in flags), "no AVX2")


def hold_to_build() -> str:
    """Hold the contestants to the vectors of megacore's build; returns which those are."""
    from megacore import _core

    width = vector_width()
    if width == "AVX-512" and _core.vector_bits() < 512:
        os.environ.update(AVX2_ONLY)
        return "AVX2 only, by all libraries; the processor has AVX-512"
    return width


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines, work = [], ""
    for row in rows:
        if row["work"] != work:
            work, base = row["work"], row
            lines += [
                "",
                f"{work}; ranks {row['ranks']}, foreign {row['foreign']} cores",
                f"{'':28}{'cpu ms':>8}{'quartiles':>18}{'ratio':>7}"
                f"{'wall ms':>9}{'quartiles':>18}{'ratio':>7}"
                + (f"{'products':>10}{'outside':>9}{'ratio':>7}" if "products_ms" in row else ""),
            ]
        text = f"{row['name']:28}"
        for key, width in (("cpu_ms", 8), ("wall_ms", 9)):
            low, median, high = row[key]
            ratio = median / base[key][1]
            text += f"{median:{width}.0f}{f'{low:.0f} to {high:.0f}':>18}{ratio:6.2f}x"
        if "products_ms" in row:
            outside, ours = (each["wall_ms"][1] - each["products_ms"] for each in (row, base))
            text += f"{row['products_ms']:10.0f}{outside:9.0f}{outside / ours:6.2f}x"
        lines.append(text)
    return "\n".join(lines)


def record(rows: Sequence[dict[str, Any]], known: dict[str, Any], path: Path) -> None:
    """Append one row for this commit to the history."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    with path.open("a") as file:
        file.write(json.dumps({"commit": commit, **known, "rows": list(rows)}) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        number, name, rank, store = sys.argv[2:]
        serve(WORKS[int(number)], name, int(rank), store)
        return
    from _common import facts, finish, header, options

    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, at least 2")
    parser.add_argument("--peer-python", default=str(HERE.parent / "build/peers/bin/python"))
    parser.add_argument("--only", default="", help="part of the name of a work")
    parser.add_argument("--record", action="store_true", help="append to history.jsonl")
    parser.add_argument("--out", type=Path, help="also write the output here")
    args = parser.parse_args()
    if not Path(args.peer_python).exists():
        parser.error(f"--peer-python {args.peer_python} does not exist; run `make bench-peers`")
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, got {args.steps}: the first does not count")
    vectors = hold_to_build()
    works = [work for work in WORKS if args.only in work.name]
    rows = [
        row for work in works for row in compare(work, args.rounds, args.steps, args.peer_python)
    ]
    known = {**facts("torch"), "vectors": vectors}
    finish([f"{header('torch')}; {vectors}", table(rows).lstrip()], args.out)
    if args.record:
        record(rows, known, HERE / "history.jsonl")


if __name__ == "__main__":
    main()
