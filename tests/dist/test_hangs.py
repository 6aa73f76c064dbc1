"""Planted hangs: the recorded calls name the cause and the rank."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacore.calls.records import read_rings, ring_folder
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.collectives import (
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    irecv,
    isend,
    reduce_scatter,
)
from megacore.parallel.row_exchange import RowSplits, all_to_all
from megatrain.cli import main
from megatrain.hang.diagnosis import Diagnosis, diagnose, diagnosis_of_run
from megatrain.hang.flight import save_dump
from megatrain.launch.start import LaunchOptions, RankContext, run_ranks_local
from tests.support.campaigns import representatives
from tests.support.jobs import Job, start_function

pytestmark = pytest.mark.dist

RANKS = 4
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp4": {},
    "tp2pp2": {"tp": 2, "pp": 2},
    "cp2pp2": {"cp": 2, "pp": 2},
    "ep2tp2": {"ep": 2, "tp": 2},
}
CAUSES = {"shape": "shape", "missing": "order", "order": "order", "dead": "ended", "slow": "slow"}
Operation = tuple[str, Callable[[int], None]]


@dataclass(frozen=True)
class Plant:
    """One planted hang, made by its seed."""

    kind: str
    layout: str
    host_memory: bool
    rank: int
    step: int
    place: float

    @staticmethod
    def of(kind: str, seed: int) -> Plant:
        chance = random.Random(f"{kind}/{seed}")
        return Plant(
            kind=kind,
            layout=list(LAYOUTS)[seed % len(LAYOUTS)],
            host_memory=chance.random() < 0.5,
            rank=chance.randrange(RANKS),
            step=chance.randrange(2, 6),
            place=chance.random(),
        )


def operations(groups: ProcessGroups) -> list[Operation]:
    """What a rank does in a step, by group; each call takes the number of surplus elements."""
    tp, cp, dp, ep, pp = groups.tp, groups.cp, groups.dp, groups.ep, groups.pp
    forward = [
        ("tp", lambda more: all_gather(torch.zeros(8 + 2 * more), torch.zeros(4 + more), tp)),
        ("tp", lambda more: reduce_scatter(torch.zeros(4 + more), torch.zeros(8 + 2 * more), tp)),
        ("cp", lambda more: all_reduce_(torch.zeros(3 + more), cp)),
        ("ep", lambda _: all_to_all(torch.zeros(4, 2), ep, RowSplits())),
        ("ep", lambda more: all_reduce_(torch.zeros(5 + more), ep, op="max")),
    ]
    if tp.size == RANKS:
        forward[:2] = [
            ("tp", lambda more: all_gather(torch.zeros(16 + 4 * more), torch.zeros(4 + more), tp)),
            ("tp", lambda more: all_reduce_(torch.zeros(16 + more), tp)),
        ]
    receive = [
        ("pp", lambda _: irecv(torch.zeros(6), pp, from_position=0, tag=1).wait()),
    ]
    send = [("pp", lambda _: isend(torch.zeros(6), pp, to_position=1, tag=1).wait())]
    layers = 3 * forward
    if pp.size > 1:
        layers = receive + layers if pp.position else layers + send
    ends = [
        ("dp", lambda more: all_reduce_(torch.zeros(7 + more), dp)),
        ("dp", lambda more: broadcast_(torch.zeros(2 + more), dp)),
        ("world", lambda more: all_reduce_(torch.zeros(1 + more), groups.world)),
        ("world", lambda _: barrier(groups.world)),
    ]
    return [each for each in layers + ends if getattr(groups, each[0]).size > 1]


def candidates(kind: str, made: list[Operation]) -> list[int]:
    """Places in a step where a fault of this kind lets somebody wait for ever."""
    collective = [place for place, (name, _) in enumerate(made) if name != "pp"]
    if kind == "shape":  # of what has a size
        return [
            place
            for place in collective
            if "barrier" not in _names(made[place]) and "all_to_all" not in _names(made[place])
        ]
    if kind == "order":  # of two calls of one group, or of which the second needs everybody
        return [
            place
            for place in range(len(made) - 1)
            if _names(made[place]) != _names(made[place + 1])
            and (made[place][0] == made[place + 1][0] or made[place + 1][0] == "world")
        ]
    return list(range(len(made)))


def _names(operation: Operation) -> tuple[str, ...]:
    return operation[1].__code__.co_names


def train(plant: Plant, folder: Path, timeout_s: float, context: RankContext) -> int:
    topology = Topology(world_size=RANKS, **LAYOUTS[plant.layout])
    groups = ProcessGroups.create(
        topology, timeout_s=timeout_s, host_memory=plant.host_memory, calls=context.calls
    )
    made = operations(groups)
    for step in range(1000):
        todo = [(call, 0) for _, call in made]
        if context.rank == plant.rank and step == plant.step:
            places = candidates(plant.kind, made)
            place = places[int(plant.place * len(places))]
            todo = planted(plant, todo, place, folder)
        for call, more in todo:
            call(more)
    return 0


def planted(
    plant: Plant, todo: list[tuple[Callable[[int], None], int]], place: int, folder: Path
) -> list[tuple[Callable[[int], None], int]]:
    def fault(_: int) -> None:
        (folder / "planted").touch()
        if plant.kind == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if plant.kind == "slow":
            time.sleep(1000)

    changed = {
        "shape": [(todo[place][0], 1)],
        "missing": [],
        "order": todo[place : place + 2][::-1],
    }.get(plant.kind, [todo[place]])
    taken = 2 if plant.kind == "order" else 1
    return [*todo[:place], (fault, 0), *changed, *todo[place + taken :]]


def start(plant: Plant, folder: Path, *, timeout_s: float = 60.0) -> Job:
    options = LaunchOptions(timeout_s=timeout_s, peer_timeout_s=1.5, error_dir=folder / "run")
    worker = partial(train, plant, folder, timeout_s)
    return start_function(lambda: run_ranks_local(RANKS, worker, options=options), folder)


def settled_diagnosis(folder: Path) -> Diagnosis:
    """Read the diagnosis when it has stopped changing."""
    deadline = time.monotonic() + 30
    last: Diagnosis | None = None
    while time.monotonic() < deadline:
        if (folder / "planted").exists():
            found = diagnosis_of_run(folder / "run")
            if found is not None and found.findings and found == last:
                return found
            last = found
        time.sleep(0.2)
    raise AssertionError(f"no diagnosis; the last one: {last}")


PLANTS = [(kind, seed) for kind in CAUSES for seed in range(10)]
KEPT = [("shape", 3), ("missing", 0), ("order", 5), ("slow", 4)]


@pytest.mark.parametrize(("kind", "seed"), representatives(PLANTS, KEPT))
def test_a_planted_hang_is_explained(tmp_path: Path, kind: str, seed: int) -> None:
    plant = Plant.of(kind, seed)
    print(plant)
    job = start(plant, tmp_path)
    try:
        found = settled_diagnosis(tmp_path)
    finally:
        os.kill(job.pid, signal.SIGTERM)
        ended = job.finish()
    print(found, ended.err)
    named = [(finding.cause, finding.ranks) for finding in found.findings]
    assert named == [(CAUSES[kind], (plant.rank,))]
    assert not ring_folder(tmp_path / "run").exists()


@pytest.mark.parametrize("kind", representatives(["slow", "order"], ["order"]))
def test_a_run_that_stops_responding_prints_the_diagnosis(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plant = Plant(kind=kind, layout="tp2", host_memory=True, rank=2, step=3, place=0.1)
    ended = start(plant, tmp_path, timeout_s=2.0).finish(timeout_s=60)
    assert ended.code == 1
    first, *others = ended.err.splitlines()
    assert first.startswith("megacore: rank ")
    assert " failed: RuntimeError: " in first
    assert others[0].startswith("  rank 2 (pid ")
    assert any(line.startswith("  rank 3 waited since ") for line in others)
    assert not ring_folder(tmp_path / "run").exists()
    capsys.readouterr()
    assert main(["why-hung", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == others[0].strip()


def test_calls_without_a_ring_are_explained_by_the_flight_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def dump(context: RankContext, *, when: int) -> None:
        while True:
            entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
            if len(entries) == when and entries[-1]["retired"] == (when == 3):
                break
            time.sleep(0.05)
        save_dump(run, context.rank, context.backend, os.environ)

    def own_loop(context: RankContext) -> int:
        for _ in range(3):
            dist.all_reduce(torch.zeros(5))
        if context.rank == 0:
            dump(context, when=3)
            time.sleep(600.0)
        threading.Thread(target=dump, args=(context,), kwargs={"when": 4}, daemon=True).start()
        dist.all_reduce(torch.zeros(7))
        return 0

    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    options = LaunchOptions(timeout_s=60.0, error_dir=run)
    job = start_function(lambda: run_ranks_local(2, own_loop, options=options), tmp_path)
    try:
        deadline = time.monotonic() + 30
        while len(list(run.glob("calls/flight_?"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = diagnosis_of_run(run)
    finally:
        os.kill(job.pid, signal.SIGTERM)
        job.finish()
    assert found is not None
    [finding] = found.findings
    assert (finding.cause, finding.ranks) == ("slow", (0,))
    assert "did not come to all_reduce [7] float over default_pg, number 4 (" in finding.text
    assert "test_hangs.py" in finding.text


def test_a_stopped_rank_and_a_lost_one_are_named(tmp_path: Path) -> None:
    def endless(context: RankContext) -> int:
        layout = Topology(world_size=RANKS, pp=RANKS)
        groups = ProcessGroups.create(layout, calls=context.calls)
        for step in range(10_000):
            all_reduce_(torch.zeros(1), groups.world)
            if step == 10:
                (tmp_path / f"{context.rank}.pid").write_text(str(os.getpid()))
        return 0

    options = LaunchOptions(peer_timeout_s=20.0, error_dir=tmp_path / "run")
    job = start_function(lambda: run_ranks_local(RANKS, endless, options=options), tmp_path)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.pid"))) < RANKS and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int((tmp_path / "1.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    (tmp_path / "planted").touch()
    [finding] = settled_diagnosis(tmp_path).findings
    assert (finding.cause, finding.ranks) == ("stopped", (1,))
    os.kill(pid, signal.SIGKILL)
    assert job.finish().code == 1
    [finding] = diagnose(read_rings(tmp_path / "run")).findings
    assert (finding.cause, finding.ranks) == ("ended", (1,))
    assert "killed by signal 9" in finding.text
