"""Rank groups of large worlds: the native core against plain Python and NumPy for the same rule.

For each world, makes the groups of 9 dense and 6 expert tokens (tp 8, cp 2, pp 16, ep 8, etp 8),
checks that all three ways agree, and prints the time each takes. Run:

    python benchmarks/bench_ranks.py [--worlds 1024,8192] [--json FILE]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from _common import facts, options, write_json
from megacore.parallel import RankGenerator, Topology

DENSE_TOKENS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")
EXPERT_TOKENS = ("etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp")
WORLDS = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20)
LAYOUT = {"tp": 8, "cp": 2, "pp": 16, "ep": 8}

Groups = Callable[[RankGenerator, str], Any]


def with_native_core(ranks: RankGenerator, token: str) -> npt.NDArray[np.int32]:
    return ranks.groups(token)


def with_plain_python(ranks: RankGenerator, token: str) -> list[list[int]]:
    """The rule as one would write it down: decompose both indices, add up the strides."""
    wanted = token.split("-")
    strides, stride = {}, 1
    for axis, size in ranks.sizes.items():
        strides[axis] = stride
        stride *= size
    varying = [(size, strides[axis]) for axis, size in ranks.sizes.items() if axis in wanted]
    fixed = [(size, strides[axis]) for axis, size in ranks.sizes.items() if axis not in wanted]
    group_size = math.prod(size for size, _ in varying)
    groups = []
    for group_index in range(ranks.world_size // group_size):
        start = offset_of(group_index, fixed)
        groups.append([start + offset_of(member, varying) for member in range(group_size)])
    return groups


def offset_of(index: int, axes: list[tuple[int, int]]) -> int:
    """Read an index as digits, the first axis lowest, and add up digit x stride."""
    offset = 0
    for size, stride in axes:
        offset += index % size * stride
        index //= size
    return offset


def with_numpy(ranks: RankGenerator, token: str) -> npt.NDArray[np.int32]:
    """The same rule as an n-dimensional transpose."""
    wanted = token.split("-")
    slowest_first = list(reversed(ranks.axes))
    grid = np.arange(ranks.world_size, dtype=np.int32)
    grid = grid.reshape([ranks.sizes[axis] for axis in slowest_first])
    fixed = [i for i, axis in enumerate(slowest_first) if axis not in wanted]
    varying = [i for i, axis in enumerate(slowest_first) if axis in wanted]
    moved = np.ascontiguousarray(grid.transpose(fixed + varying))
    return moved.reshape(-1, ranks.group_size(token))


def seconds(make: Groups, topology: Topology, *, repeats: int) -> float:
    """The best time for all tokens; the groups of a token are dropped before the next one."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        for token in DENSE_TOKENS:
            make(topology.dense, token)
        for token in EXPERT_TOKENS:
            make(topology.expert, token)
        best = min(best, time.perf_counter() - start)
    return best


def require_agreement(topology: Topology) -> None:
    """Stop unless all three ways give the same groups for every token."""
    views = ((topology.dense, DENSE_TOKENS), (topology.expert, EXPERT_TOKENS))
    for ranks, tokens in views:
        for token in tokens:
            native = with_native_core(ranks, token)
            for other in (with_numpy, with_plain_python):
                if not np.array_equal(native, np.asarray(other(ranks, token), dtype=np.int32)):
                    sys.exit(f"{other.__name__} disagrees for {token} at {ranks.world_size} ranks")


def measure(world_size: int) -> dict[str, float]:
    topology = Topology(world_size=world_size, **LAYOUT)
    require_agreement(topology)
    small = world_size <= 1 << 16
    native = seconds(with_native_core, topology, repeats=7)
    python = seconds(with_plain_python, topology, repeats=3 if small else 1)
    vectorised = seconds(with_numpy, topology, repeats=5)
    return {
        "world_size": world_size,
        "native_s": native,
        "numpy_s": vectorised,
        "python_s": python,
        "python_over_native": python / native,
        "numpy_over_native": vectorised / native,
    }


def show(results: list[dict[str, float]], known: dict[str, Any]) -> None:
    table = Table(title="all groups of 15 tokens (9 dense, 6 expert), best of several runs")
    for name in ("world", "native", "NumPy", "plain Python", "Python/native", "NumPy/native"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results:
        table.add_row(
            f"{row['world_size']:,.0f}",
            f"{1e3 * row['native_s']:.3f} ms",
            f"{1e3 * row['numpy_s']:.3f} ms",
            f"{1e3 * row['python_s']:,.1f} ms",
            f"{row['python_over_native']:,.0f}x",
            f"{row['numpy_over_native']:.1f}x",
        )
    console = Console(width=100, highlight=False)
    console.print(table)
    for name, value in known.items():
        console.print(f"{name}: {value}", markup=False)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="world sizes")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON too")
    args = parser.parse_args()
    results = [measure(int(world)) for world in args.worlds.split(",")]
    known = facts("numpy")
    show(results, known)
    write_json(args.json, results, known)


if __name__ == "__main__":
    main()
