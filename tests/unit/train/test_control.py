"""Common decisions after a step: equal on all ranks, whoever has received which signal."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DivergedError
from megatrain.config import CheckpointConfig, RunConfig, TrainSectionConfig
from megatrain.train.control import NUM_VOTES, SPIKE_START, RunControl
from tests.support.configs import rank_context

WORLD = 5


def _control(
    rank: int = 0, *, number: int = 0, started: float = 0.0, **sections: Any
) -> RunControl:
    context = rank_context(rank, WORLD)
    context.stop.signal = number
    return RunControl(
        TrainSectionConfig(**sections.get("train", {})),
        RunConfig(**sections.get("run", {})),
        context,
        save_interval_s=CheckpointConfig(**sections.get("checkpoint", {})).interval_s,
        started=started,
    )


def _sum(controls: list[RunControl]) -> tuple[float, ...]:
    return tuple(map(math.fsum, zip(*(control.votes() for control in controls), strict=True)))


@given(numbers=st.lists(st.sampled_from([0, *signal.valid_signals()]), min_size=5, max_size=5))
def test_every_rank_decides_the_same_and_names_a_single_signal(numbers: list[int]) -> None:
    controls = [_control(rank, number=number) for rank, number in enumerate(numbers)]
    votes = _sum(controls)
    verdicts = [control.judge(votes, step=0, loss=1.0, skipped=False) for control in controls]
    assert len(set(verdicts)) == 1
    signalled = [rank for rank, number in enumerate(numbers) if number]
    stop = verdicts[0].stop
    if not signalled:
        assert stop is None
    elif len(signalled) > 1:
        assert stop == f"signals to {len(signalled)} ranks (Ctrl-C, SIGTERM or SIGUSR1)"
    else:
        assert stop is not None
        assert stop.endswith(f" to rank {signalled[0]}")


def test_only_the_clock_of_rank_0_counts() -> None:
    run = {"run": {"stop_after": "1s"}, "checkpoint": {"interval_time": "1s"}}
    late = [_control(rank, started=-1e9, **run) for rank in range(WORLD)]
    for control in late:
        control._saved_at = -1e9
    assert _sum(late) == (0.0, 0.0, 1.0, 1.0)
    verdict = late[3].judge(_sum(late), step=0, loss=1.0, skipped=False)
    assert (verdict.save, verdict.stop) == (True, "run.stop_after = 1s")
    assert _sum(late[1:]) == (0.0,) * NUM_VOTES


@pytest.mark.parametrize("checkpoint", [{"interval": 5}, {"interval": -1}, {"interval": 0}])
def test_checkpoints_by_time_can_be_turned_off(checkpoint: dict[str, Any]) -> None:
    control = _control(started=-1e9, checkpoint=checkpoint)
    control._saved_at = -1e9
    assert control.votes() == (0.0,) * NUM_VOTES


def test_a_streak_of_skipped_updates_ends_the_run() -> None:
    control = _control(train={"max_skipped_steps": 3})
    pattern = [True, True, False, True, True, True]
    for step, skipped in enumerate(pattern):
        assert control.will_give_up == (step in (2, 5))
        if step < 5:
            control.judge((0.0,) * 4, step=step, loss=1.0, skipped=skipped)
            assert control.is_skipping == skipped
    with pytest.raises(DivergedError, match="step 6: the updates of 3 steps in a row"):
        control.judge((0.0,) * 4, step=5, loss=math.nan, skipped=True)
    patient = _control(train={"max_skipped_steps": 0})
    for step in range(100):
        assert not patient.will_give_up
        patient.judge((0.0,) * 4, step=step, loss=math.nan, skipped=True)


@pytest.mark.parametrize("action", ["ignore", "warn", "skip", "stop"])
def test_a_spike_of_the_loss_is_judged_by_the_losses_before(action: str) -> None:
    control = _control(train={"on_spike": action, "max_skipped_steps": 1})
    none = (0.0,) * 4
    for step in range(SPIKE_START):
        assert control.loss_limit == math.inf
        assert (
            control.judge(none, step=step, loss=2.0 + 0.1 * (step % 2), skipped=False).notes == ()
        )
    limit = control.loss_limit
    if action == "ignore":
        assert limit == math.inf
        return
    assert limit == pytest.approx(2.05 + 8 * 0.05)
    assert control.judge(none, step=20, loss=limit, skipped=False).notes == ()
    if action == "stop":
        with pytest.raises(DivergedError, match=r"the loss 9\.0000 is a spike \(limit "):
            control.judge(none, step=21, loss=9.0, skipped=False)
        return
    before = control.loss_limit
    [note] = control.judge(none, step=21, loss=9.0, skipped=action == "skip").notes
    assert ("so the update was skipped" in note) == (action == "skip")
    assert (control.loss_limit == before) == (action == "skip")
    assert not control.is_skipping
