"""Clock of phases: on the host, and between events of a GPU's stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.pipeline.clock import PhaseClock, in_phase, named_range

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Event:
    """An event of a stream whose work between two records takes 2 ms."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self._at_ms = 0.0

    def record(self) -> None:
        type(self).recorded += 1
        self._at_ms = 2.0 * self.recorded

    def elapsed_time(self, last: Event) -> float:
        return last._at_ms - self._at_ms


@pytest.fixture
def is_capturing(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def test_a_gpu_is_measured_between_events(is_capturing: dict[str, bool]) -> None:
    clock = PhaseClock(CUDA)
    for _ in range(2):
        with clock.phase("optimizer"):
            pass
    with clock.phase("passes"), clock.phase("pipeline_wait"):
        pass
    is_capturing["capturing"] = True
    with clock.phase("optimizer"):
        pass
    is_capturing["capturing"] = False
    with clock.phase("data", on_host=True):
        pass
    seconds = clock.take()
    assert 0 <= seconds.pop("data") < 1
    assert seconds == pytest.approx({"optimizer": 0.004, "passes": 0.006, "pipeline_wait": 0.002})
    assert clock.take() == {}


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.usefixtures("is_capturing")
def test_an_error_ends_the_phase(device: torch.device) -> None:
    clock = PhaseClock(device)
    with pytest.raises(ValueError, match="in the phase"), clock.phase("optimizer"):
        raise ValueError("in the phase")
    assert clock.take()["optimizer"] > 0
    with clock.phase("optimizer"):
        pass
    clock.clear()
    assert clock.take() == {}


def test_a_disabled_clock_measures_nothing() -> None:
    clock = PhaseClock(CPU)
    clock.enabled = False
    with clock.phase("optimizer"), in_phase(None, "passes"):
        pass
    assert clock.take() == {}


def test_phases_are_ranges_of_the_profiler_only_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(
        "megacore.pipeline.clock.record_function",
        lambda name: entered.append(name) or named_range(""),
    )
    monkeypatch.setattr("megacore.pipeline.clock._profiler_enabled", lambda: bool(entered == []))
    with PhaseClock(CPU).phase("passes"):
        pass
    with PhaseClock(CPU).phase("optimizer"):
        pass
    assert entered == ["passes"]
