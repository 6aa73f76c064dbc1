"""A trace of a step shows that communication is issued while the model computes.

Only the order of events is looked at, not their duration.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.jobs import start_command

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "support" / "trace_worker.py"
ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Start times, in order."""

    reduces: list[float]
    gathers: list[float]
    forwards: list[float]
    grads: list[float]
    transfers: list[float]


def trace_step(folder: Path, overlap: str, way: str) -> list[Trace]:
    arguments = ["2", str(folder), overlap, way]
    jobs = [
        start_command([sys.executable, str(WORKER), str(rank), *arguments], folder)
        for rank in range(2)
    ]
    for job in jobs:
        ended = job.finish(timeout_s=90)
        assert ended.code == 0, ended.err
    return [read(folder / f"trace{rank}.json") for rank in range(2)]


def read(path: Path) -> Trace:
    events = json.loads(path.read_text())

    def starts(*names: str) -> list[float]:
        return sorted(e["start"] for e in events if e["name"].startswith(names))

    grads = starts(ACCUMULATE)
    return Trace(
        reduces=starts("megacore::reduce_scatter"),
        gathers=starts("megacore::all_gather"),
        # Matrix products before the first gradient: forward passes.
        forwards=[start for start in starts("aten::linear", "aten::mm") if start < grads[0]],
        grads=grads,
        transfers=starts("gloo:all_to_all"),
    )


@pytest.mark.campaign
def test_gloo_reduces_during_backward_and_gathers_during_forward(tmp_path: Path) -> None:
    for trace in trace_step(tmp_path, "on", "gloo"):
        num_buckets = len(trace.reduces)
        assert num_buckets >= 4
        # The bucket of the tied embedding waits for the end; every other one is issued before the
        # last gradient has arrived, and the first transfer has begun by then.
        last_grad = trace.grads[-1]
        assert sum(start < last_grad for start in trace.reduces) >= num_buckets - 2
        assert trace.grads[0] < trace.reduces[0]
        assert trace.transfers[0] > trace.reduces[0]
        # One gather was started by the step before, one is started by this step's update. The
        # others are issued one by one between the products of the forward pass.
        during = [start for start in trace.gathers if start < trace.grads[0]]
        assert len(during) == num_buckets - 1
        check_gathers(trace, during)


def test_shared_memory_reduces_during_backward_and_gathers_during_forward(tmp_path: Path) -> None:
    traces = trace_step(tmp_path, "on", "shared")
    num_early = 0
    for trace in traces:
        assert trace.transfers == []
        assert trace.grads[0] < trace.reduces[0]
        num_early += sum(start < trace.grads[-1] for start in trace.reduces)
        # All gathers of the update before: their work is done where the weights are needed.
        during = [start for start in trace.gathers if start < trace.grads[0]]
        assert len(during) == len(trace.reduces) >= 4
        check_gathers(trace, during)
    # The work itself is shown. Whichever rank completes a bucket later finds the other's gradients
    # there and adds them at once, but for the buckets that wait for the end.
    assert num_early >= len(traces[0].reduces) - 2


def check_gathers(trace: Trace, during: list[float]) -> None:
    between = [start for start in during if start > trace.forwards[0]]
    assert len(between) >= 3
    for first, second in pairwise(between):
        assert any(first < product < second for product in trace.forwards)


@pytest.mark.campaign
def test_without_overlap_nothing_is_issued_during_the_passes(tmp_path: Path) -> None:
    for trace in trace_step(tmp_path, "off", "gloo"):
        assert len(trace.reduces) == len(trace.gathers) >= 4
        issued = trace.reduces + trace.gathers + trace.transfers
        assert all(start > trace.grads[-1] for start in issued)


@pytest.mark.campaign
def test_without_overlap_shared_memory_works_after_the_passes(tmp_path: Path) -> None:
    for trace in trace_step(tmp_path, "off", "shared"):
        assert len(trace.reduces) == len(trace.gathers) >= 4
        assert all(start > trace.grads[-1] for start in trace.reduces)
        assert all(start > trace.reduces[-1] for start in trace.gathers)
