"""All sets of scopes in all layouts: bits of eager training, a line per setting; takes hours.

    python -m tests.dist.graph_matrix --steps 50 --done runs/matrix.jsonl --record FILE

The tests run a part of it. What is done is kept in the file of `--done`, and left out when the same
command runs again. Exits with 1 if a number differs, if a training fails, or if the number of
static tensors depends on the number of microbatches; with 3 if `--minutes` were over before the
end.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, before torch is imported

from tests.dist.test_graph_training import (
    OF_DENSE,
    OF_EXPERTS,
    STATIC,
    Changes,
    laid_out,
    train,
)
from tests.support.distributed import RankFailed, run_ranks
from tests.support.graph_evidence import GATHERED, REDUCED, Trained

SETTINGS = {"dense": OF_DENSE, "experts": OF_EXPERTS}
# Pipeline and data-parallel ranks.
RANKS = ["1x2", "2x1", "2x2", "4x1"]
EXIT_DIFFERS, EXIT_UNFINISHED = 1, 3

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, chunks, number of microbatches and kind of model."""

    pp: int
    dp: int
    chunks: int
    m: int
    kind: str

    @property
    def world_size(self) -> int:
        return self.pp * self.dp

    @property
    def changes(self) -> Changes:
        changes = laid_out(self.pp, self.m, self.chunks, self.dp)[1]
        return changes if self.kind == "dense" else {**changes, **STATIC, "parallel.ep": self.dp}

    def text(self) -> str:
        return f"pp {self.pp} x {self.chunks} chunks, dp {self.dp}, m {self.m}, {self.kind}"


def name_of(graphs: Changes) -> str:
    """What is captured, for people."""
    if not graphs["mode"].startswith("full"):
        return ",".join(graphs["scopes"])
    return "whole steps with the optimizer" if graphs["mode"] == "full_step" else "whole steps"


def train_ranks(layout: Layout, graphs: Changes, asked: argparse.Namespace) -> list[Trained]:
    """A training in processes of its own; results by rank."""
    timeout_s = 300.0 + asked.steps * layout.m * layout.chunks
    every = asked.compare_every
    return run_ranks(
        layout.world_size, train_one, layout, graphs, asked.steps, every, timeout_s=timeout_s
    )


def train_one(
    rank: int, layout: Layout, graphs: Changes, steps: int, compare_every: int
) -> Trained:
    del rank
    return train(layout.world_size, layout.changes, graphs, steps, compare_every=compare_every)


def check_one(
    layout: Layout, graphs: Changes, eager: list[Trained], asked: argparse.Namespace
) -> tuple[str, Entry]:
    """Train with graphs; return what is wrong, or nothing, and what is to be kept."""
    start = time.perf_counter()
    found = train_ranks(layout, graphs, asked)
    entry: Entry = {
        "compare_every": asked.compare_every,
        "seconds": round(time.perf_counter() - start, 1),
        "numbers": len(found[0].numbers),
        "last_loss": found[0].numbers[f"loss of step {asked.steps}"],
        "static": [asdict(one.static) for one in found if one.static is not None],
        "poisoned": [one.num_poisoned for one in found],
        "reduced": [one.transfers[REDUCED] for one in found],
        "gathered": [one.transfers[GATHERED] for one in found],
    }
    for rank, (one, expected) in enumerate(zip(found, eager, strict=True)):
        if difference := one.difference(expected):
            return f"rank {rank}: {difference}", entry
    if sum(entry["poisoned"]) == 0:
        return "no rank has captured anything", entry
    return "", entry


def run_layout(
    layout: Layout, asked: argparse.Namespace, done: dict[str, Entry], out_of_time: float
) -> Iterator[str]:
    """Run what is not done yet of a layout; yield what is wrong."""
    settings = settings_of(layout, asked)
    missing = [g for g in settings if key_of(layout, g, asked.steps) not in done]
    eager: list[Trained] | None = None
    for graphs in missing:
        if time.time() > out_of_time:
            return
        what = f"{layout.text()}: {name_of(graphs)}"
        try:
            eager = eager or train_ranks(layout, {}, asked)
            wrong, entry = check_one(layout, graphs, eager, asked)
        except RankFailed as error:
            wrong, entry = str(error), {}
        if wrong:
            print(f"WRONG {what}: {wrong}", flush=True)
            yield f"{what}: {wrong}"
            continue
        key = key_of(layout, graphs, asked.steps)
        done[key] = {"key": key, "commit": commit(), **entry}
        if asked.done:
            with asked.done.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        print(f"{what}: {asked.steps} steps equal, {shown(entry)}", flush=True)


def settings_of(layout: Layout, asked: argparse.Namespace) -> list[Changes]:
    """Those that are asked for."""
    every = SETTINGS[layout.kind]
    return [g for g in every if not asked.settings or name_of(g) in asked.settings]


def key_of(layout: Layout, graphs: Changes, steps: int) -> str:
    return f"{layout.text()}: {name_of(graphs)}, {steps} steps"


def shown(entry: Entry) -> str:
    """What a line says besides that numbers are equal; figures by rank."""
    counts = {name: [rank[name] for rank in entry["static"]] for name in ("graphs", "inputs")}
    return (
        f"{slashed(counts['graphs'])} graphs, {slashed(counts['inputs'])} static inputs, "
        f"{slashed(entry['poisoned'])} poisoned, {slashed(entry['reduced'])} early reductions, "
        f"{entry['seconds']} s"
    )


def slashed(numbers: list[int]) -> str:
    return "/".join(map(str, numbers))


def check_counts(
    layouts: list[Layout], asked: argparse.Namespace, done: dict[str, Entry]
) -> list[str]:
    """Where static tensors of parts of layers depend on the number of microbatches.

    A step with fewer microbatches than others have alive at once needs fewer. Whole steps have
    inputs for every microbatch.
    """
    families: dict[str, dict[int, list[Entry]]] = {}
    for layout in layouts:
        for graphs in settings_of(layout, asked):
            key = key_of(layout, graphs, asked.steps)
            entry = done.get(key)
            if entry is not None and not graphs["mode"].startswith("full"):
                family = key.replace(f"m {layout.m},", "any m,")
                families.setdefault(family, {})[layout.m] = entry["static"]
    wrong = []
    for family, by_number in families.items():
        most = by_number[max(by_number)]
        for m, static in by_number.items():
            for rank, (own, other) in enumerate(zip(static, most, strict=True)):
                if own != other and not (own["peak"] == m < other["peak"]):
                    wrong.append(
                        f"{family}: rank {rank} has {own} at m {m}, {other} at {max(by_number)}"
                    )
    return wrong


def commit() -> str:
    """The commit that is checked out, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return said.stdout.strip() or "unknown"


def layouts_of(asked: argparse.Namespace) -> list[Layout]:
    """All that is asked for, in the order of the options."""
    ranks = [tuple(map(int, one.split("x"))) for one in asked.ranks]
    return [
        Layout(pp=pp, dp=dp, chunks=chunks, m=m, kind=kind)
        for m, (pp, dp), chunks, kind in itertools.product(
            asked.microbatches, ranks, asked.chunks, asked.kinds
        )
    ]


def record_text(
    layouts: list[Layout], asked: argparse.Namespace, done: dict[str, Entry], wrong: list[str]
) -> str:
    """What was run and seen, and what was not run."""
    steps = asked.steps
    keys = {one: [key_of(one, g, steps) for g in settings_of(one, asked)] for one in layouts}
    every = [key for own in keys.values() for key in own]
    ran = [done[key] for key in every if key in done]
    commits = sorted({entry["commit"] for entry in ran})
    versions = ", ".join(f"{name} {version(name)}" for name in ("megacore", "torch"))
    lines = [
        f"Training with captured layers and steps against eager training, {steps} steps, "
        "to the last bit (tests/dist/graph_matrix.py)",
        "",
        f"# {datetime.datetime.now(datetime.UTC).date().isoformat()}; {processor()}, "
        f"{os.cpu_count()} cores; python {platform.python_version()}, {versions}",
        f"# commit {', '.join(commits)}",
        f"# python -m tests.dist.graph_matrix {' '.join(sys.argv[1:])}",
        "",
        "Equal on every rank: loss and gradient norm of each step, two validations. Asserted of",
        "every training: after the last step all released static tensors are poisoned, ZeRO-1",
        "shards every buffer, reductions begin in backward and weights are awaited in forward",
        "passes. With dp 1 that code runs in groups of one rank: nothing to shard or to send.",
        "early: the fewest reductions that began in backward passes of a rank, over all settings.",
        "graphs and inputs: captured graphs and static inputs by rank, for the set of scopes with",
        "the most graphs.",
        compared_text(ran),
        "",
        "pp chunks dp  m  kind     equal   early  graphs           inputs",
    ]
    lines += [row(one, own, done) for one, own in keys.items() if any(key in done for key in own)]
    lines += ["", f"{len(ran)} of {len(every)} combinations ran, all of them equal"]
    if wrong:
        lines[-1] = f"{len(ran)} of {len(every)} combinations ran and are equal; wrong:"
        lines += wrong
    if len(ran) < len(every):
        lines += [
            "",
            "Not complete: layouts without a line did not run; of these some settings ran:",
        ]
        lines += [part for one in layouts if (part := part_of(one, asked, done))]
    return "\n".join(lines) + "\n"


def part_of(layout: Layout, asked: argparse.Namespace, done: dict[str, Entry]) -> str:
    """What ran of a layout if not all did; empty if all did, or nothing."""
    settings = settings_of(layout, asked)
    ran = [name_of(g) for g in settings if key_of(layout, g, asked.steps) in done]
    return f"{layout.text()}: {'; '.join(ran)}" if 0 < len(ran) < len(settings) else ""


def compared_text(ran: list[Entry]) -> str:
    """In which steps replays compared their operations with those of the capture."""
    numbers = Counter(entry["compare_every"] for entry in ran)
    parts = [
        f"in every step ({count})" if every == 1 else f"in 10 steps, then every {every}th ({count})"
        for every, count in sorted(numbers.items())
    ]
    return f"Operations of replays were compared with the capture's {', '.join(parts)}."


def row(layout: Layout, keys: list[str], done: dict[str, Entry]) -> str:
    """A line of the record."""
    entries = [done[key] for key in keys if key in done]
    start = (
        f"{layout.pp:2} {layout.chunks:6} {layout.dp:2} {layout.m:2}  {layout.kind:8}"
        f"{len(entries):2} of {len(keys):2}"
    )
    most = max(entries, key=lambda entry: sum(rank["graphs"] for rank in entry["static"]))
    counts = [slashed([r[name] for r in most["static"]]) for name in ("graphs", "inputs")]
    early = min(min(entry["reduced"]) for entry in entries)
    return f"{start}  {early:5}  {counts[0]:15}  {counts[1]}"


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", nargs="+", default=RANKS, metavar="PPxDP")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--kinds", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--settings", nargs="+", default=[], help="only these, such as attn,mlp")
    parser.add_argument(
        "--compare-every",
        type=int,
        default=1,
        metavar="N",
        help="compare the operations of replays in the first ten steps, then in every Nth step",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--done", type=Path, help="what is done: read, left out, added to")
    parser.add_argument("--record", type=Path, help="write what was seen to this file")
    return parser.parse_args()


def main() -> int:
    """Run what the command line asks for; print a line for each setting."""
    asked = parse()
    done: dict[str, Entry] = {}
    if asked.done and asked.done.exists():
        entries = [json.loads(line) for line in asked.done.read_text().splitlines()]
        done = {entry["key"]: entry for entry in entries}
    layouts = layouts_of(asked)
    out_of_time = time.time() + 60 * asked.minutes
    wrong = [w for one in layouts for w in run_layout(one, asked, done, out_of_time)]
    wrong += check_counts(layouts, asked, done)
    every = [key_of(one, g, asked.steps) for one in layouts for g in settings_of(one, asked)]
    num_done = sum(key in done for key in every)
    for text in wrong:
        print(f"WRONG {text}")
    print(f"{num_done} of {len(every)} combinations equal over {asked.steps} steps")
    if asked.record:
        asked.record.write_text(record_text(layouts, asked, done, wrong))
    if wrong:
        return EXIT_DIFFERS
    return 0 if num_done == len(every) else EXIT_UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
