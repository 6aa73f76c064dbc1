"""Schedules: known orders, golden text, laws over many sizes, and an independent simulator."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megacore.pipeline import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    Costs,
    Schedule,
    best_group_size,
    build_schedule,
    num_warmup_forwards,
    schedule_table,
)

# The rest is in test_generators.py.
NAMES = ("gpipe", "1f1b", "interleaved_1f1b")
GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"


def interleaved(p: int, v: int, m: int, group_size: int | None = None) -> Schedule:
    return build_schedule(
        "interleaved_1f1b", num_ranks=p, num_chunks=v, num_microbatches=m, group_size=group_size
    )


def runs(p: int, v: int, m: int, group_size: int) -> bool:
    try:
        interleaved(p, v, m, group_size)
    except ValueError:
        return False
    return True


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule that can be built, also with group sizes that few would choose."""
    name = draw(st.sampled_from(NAMES))
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 14))
    if name != "interleaved_1f1b":
        return build_schedule(name, num_ranks=p, num_microbatches=m)
    v, group_size = draw(st.integers(1, 4)), draw(st.none() | st.integers(1, m + 2))
    assume(group_size is None or runs(p, v, m, group_size))
    return interleaved(p, v, m, group_size)


@pytest.mark.parametrize(
    ("file", "schedule"),
    [
        ("gpipe_p2_m3", build_schedule("gpipe", num_ranks=2, num_microbatches=3)),
        ("1f1b_p4_m6", build_schedule("1f1b", num_ranks=4, num_microbatches=6)),
        ("interleaved_p2_v2_m5_g3", interleaved(2, 2, 5, 3)),
        ("interleaved_p4_v2_m8", interleaved(4, 2, 8)),
    ],
)
def test_text_grid_and_programs_are_the_golden_ones(file: str, schedule: Schedule) -> None:
    parts = [schedule.to_text(), schedule.to_text(grid=True) + "\n"]
    for receives in ("ahead", "in_order"):
        parts.append(f"programs, receives {receives}:\n")
        parts += [
            f"rank {rank}: {schedule.program(rank, receives=receives).to_text()}\n"
            for rank in range(schedule.num_ranks)
        ]
    assert "\n".join(parts) == (GOLDEN / f"{file}.txt").read_text()


# Worked by hand from warmup counts and tables. The first is Megatron-LM's commented example; the
# third is what the source document on partial CUDA graphs derives (the list it draws has a slip).
@pytest.mark.parametrize(
    ("p", "v", "m", "group", "rank", "order"),
    [
        (2, 2, 5, 3, 0, "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"),
        (2, 2, 5, 3, 1, "1 1 1 2 -2 2 -2 2 -2 1 -1 1 -1 2 -1 2 -2 -2 -1 -1"),
        (
            *(4, 2, 8, 4, 0),
            "1 1 1 1 2 2 2 2 1 1 1 -2 1 -2 2 -2 2 -2 2 -1 2 -1 -1 -1 -2 -2 -2 -2 -1 -1 -1 -1",
        ),
        (
            *(4, 2, 8, 4, 3),
            "1 1 1 1 2 -2 2 -2 2 -2 2 -2 1 -1 1 -1 1 -1 1 -1 2 -2 2 -2 2 -2 2 -2 -1 -1 -1 -1",
        ),
        (2, 2, 7, 4, 0, "1 1 1 1 2 2 2 -2 2 -2 1 -2 1 -2 1 -1 2 -1 2 -1 2 -1 -2 -2 -2 -1 -1 -1"),
        (4, 1, 4, None, 0, "1 1 1 1 -1 -1 -1 -1"),
    ],
)
def test_order_lists_are_the_known_ones(
    p: int, v: int, m: int, group: int | None, rank: int, order: str
) -> None:
    assert interleaved(p, v, m, group).order(rank) == [int(token) for token in order.split()]


def test_schedule_table_of_the_source_document() -> None:
    # 4 ranks, 8 microbatches, 2 chunks per rank: groups of 4, chunk by chunk inside a group.
    table = schedule_table(8, 2, 4)
    assert [mb for mb, _ in table] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
    assert [chunk for _, chunk in table] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4


@given(schedules())
def test_every_stage_runs_each_microbatch_forward_once_and_then_backward_once(
    schedule: Schedule,
) -> None:
    for rank in range(schedule.num_ranks):
        actions = schedule.actions(rank)
        assert len(actions) == len(set(actions))
        pairs = [
            (stage, mb)
            for stage in schedule.stages(rank)
            for mb in range(schedule.num_microbatches)
        ]
        position = {action: i for i, action in enumerate(actions)}
        assert len(actions) == 2 * len(pairs)
        for stage, mb in pairs:
            forward = Action(stage, ActionKind.FORWARD, mb)
            backward = Action(stage, ActionKind.BACKWARD, mb)
            assert position[forward] < position[backward]


@given(schedules())
def test_gradients_are_accumulated_in_the_order_of_microbatches(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        for stage in schedule.stages(rank):
            order = [
                action.microbatch
                for action in schedule.actions(rank)
                if action.stage == stage and action.kind == ActionKind.BACKWARD
            ]
            assert order == sorted(order)


@given(schedules())
def test_order_lists_balance_and_never_run_below_zero(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        order = schedule.order(rank)
        for chunk in range(1, schedule.num_chunks + 1):
            held = 0
            for token in order:
                held += (token == chunk) - (token == -chunk)
                assert held >= 0
            assert held == 0


def naive_finish_times(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """Let every rank take its next action when its inputs are there, in rounds; no cleverness."""
    duration = {
        ActionKind.FORWARD: costs.forward,
        ActionKind.BACKWARD: costs.backward_input + costs.backward_weight,
    }
    owner = {s: r for r in range(schedule.num_ranks) for s in schedule.stages(r)}
    end: dict[Action, float] = {}
    todo = {rank: schedule.actions(rank) for rank in range(schedule.num_ranks)}
    clock = dict.fromkeys(todo, 0.0)
    progress = True
    while progress:
        progress = False
        for rank, actions in todo.items():
            while actions:
                action = actions[0]
                inputs = []
                if action.kind == ActionKind.FORWARD and action.stage > 0:
                    inputs.append(Action(action.stage - 1, action.kind, action.microbatch))
                if action.kind == ActionKind.BACKWARD:
                    inputs.append(Action(action.stage, ActionKind.FORWARD, action.microbatch))
                    if action.stage + 1 < schedule.num_stages:
                        inputs.append(Action(action.stage + 1, action.kind, action.microbatch))
                if any(needed not in end for needed in inputs):
                    break
                arrivals = [
                    end[n] + (costs.send if owner[n.stage] != rank else 0.0) for n in inputs
                ]
                start = max([clock[rank], *arrivals])
                clock[rank] = end[action] = start + duration[action.kind]
                actions.pop(0)
                progress = True
    assert not any(todo.values())
    return end


COSTS = st.builds(
    Costs,
    forward=st.floats(0.1, 5.0),
    backward_input=st.floats(0.1, 5.0),
    backward_weight=st.floats(0.1, 5.0),
    send=st.sampled_from([0.0, 0.1, 2.0]),
)


@given(schedules(), COSTS)
def test_simulation_agrees_with_a_naive_one(schedule: Schedule, costs: Costs) -> None:
    timeline = schedule.simulate(costs)
    end = naive_finish_times(schedule, costs)
    for event in timeline.events:
        assert event.end == pytest.approx(end[event.action], rel=1e-12)
    assert timeline.makespan == pytest.approx(max(end.values()), rel=1e-12)
    available = schedule.num_ranks * timeline.makespan
    assert timeline.bubble_fraction == pytest.approx(1 - sum(timeline.busy) / available, abs=1e-12)


@given(p=st.integers(1, 9), m=st.integers(1, 20), costs=COSTS)
def test_gpipe_and_1f1b_have_the_same_bubble_and_1f1b_holds_less(
    p: int, m: int, costs: Costs
) -> None:
    costs = Costs(
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
    )
    both = costs.forward + costs.backward_input + costs.backward_weight
    for name in ("gpipe", "1f1b"):
        timeline = build_schedule(name, num_ranks=p, num_microbatches=m).simulate(costs)
        assert timeline.makespan == pytest.approx((m + p - 1) * both)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        peaks = [m] * p if name == "gpipe" else [min(p - r, m) for r in range(p)]
        assert timeline.peak_in_flight == peaks


@given(p=st.integers(1, 8), v=st.integers(2, 4), m=st.integers(1, 30))
def test_interleaving_reaches_its_closed_form_for_any_number_of_microbatches(
    p: int, v: int, m: int
) -> None:
    timeline = interleaved(p, v, m).simulate()
    assert timeline.makespan == 3 * (max(m, p) * v + min(m, p) - 1)
    group = best_group_size(num_ranks=p, num_chunks=v, num_microbatches=m)
    for rank, peak in enumerate(timeline.peak_in_flight):
        assert peak == min(2 * (p - 1 - rank) + (v - 1) * group + 1, v * m)


@given(
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 30),
    multiplier=st.sampled_from([1, 2]),
    pairs=st.sampled_from([None, "whole", "split"]),
)
def test_warmup_forwards_are_those_before_the_first_backward(
    p: int, v: int, m: int, multiplier: int, pairs: Any
) -> None:
    sizes: dict[str, Any] = {"num_ranks": p, "num_chunks": v, "num_microbatches": m}
    order = {"warmup_multiplier": multiplier, "pairs": pairs}
    schedule = build_schedule("interleaved_1f1b", **sizes, **order)
    for rank in range(p):
        kinds = [action.kind for action in schedule.actions(rank)]
        before = next(at for at, kind in enumerate(kinds) if kind != ActionKind.FORWARD)
        warmup = num_warmup_forwards(
            rank, **sizes, warmup_multiplier=multiplier, pairs=pairs is not None
        )
        assert before == min(warmup + 1, v * m)
        if pairs is None and multiplier == 2:  # Megatron-LM's formula
            group = best_group_size(**sizes)
            theirs = 2 * (p - rank - 1) + (v - 1) * group if v > 1 else p - rank - 1
            assert warmup == min(theirs, v * m)


def test_a_warmup_of_no_rank_is_refused() -> None:
    sizes = {"num_ranks": 4, "num_microbatches": 8}
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank must be from 0 to 3, got {rank}"):
            num_warmup_forwards(rank, **sizes)
    with pytest.raises(ValueError, match="warmup_multiplier must be 1 or 2, got 3"):
        num_warmup_forwards(0, **sizes, warmup_multiplier=3)


@given(schedules())
def test_text_csv_and_pickle_give_the_schedule_back(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a b.csv"
    schedule.to_csv(path)
    for other in (
        Schedule.from_text(schedule.to_text()),
        Schedule.from_csv(path),
        pickle.loads(pickle.dumps(schedule)),
    ):
        assert other == schedule
        assert other.simulate().makespan == schedule.simulate().makespan
    assert Schedule.from_csv(path).name == "a_b"


@given(st.integers(0, 999), st.sampled_from(ActionKind), st.integers(0, 9999))
def test_action_text_reads_back(stage: int, kind: ActionKind, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action
    assert hash(Action.parse(str(action))) == hash(action)
    assert pickle.loads(pickle.dumps(action)) == action
    assert eval(repr(action), {"Action": Action}) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2f0", "2F0 ", "2F0x", "2G0", "2F-1"])
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an action.*for example 2F0"):
        Action.parse(text)


@given(schedules(), st.data())
def test_a_dropped_or_repeated_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    lines = schedule.to_text().splitlines()
    row = data.draw(st.integers(1, len(lines) - 1))
    cells = lines[row].split(" ")
    column = data.draw(st.integers(2, len(cells) - 1))
    without = [*cells[:column], *cells[column + 1 :]]
    repeated = [*cells[: column + 1], *cells[column:]]
    for broken, word in ((without, None), (repeated, "repeated")):
        lines[row] = " ".join(broken)
        with pytest.raises(ValueError, match=word):
            Schedule.from_text("\n".join(lines))


@given(schedules(), st.data())
def test_a_backward_ahead_of_what_it_needs_is_a_deadlock_that_names_the_rank(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    cells = [str(action) for action in schedule.actions(rank)]
    stage, mb = schedule.stages(rank)[0], data.draw(st.integers(0, schedule.num_microbatches - 1))
    i, j = cells.index(f"{stage}F{mb}"), cells.index(f"{stage}B{mb}")
    cells[i], cells[j] = cells[j], cells[i]
    lines = schedule.to_text().splitlines()
    lines[1 + rank] = " ".join([f"rank {rank}:", *cells])
    with pytest.raises(ValueError, match="deadlocks") as failure:
        Schedule.from_text("\n".join(lines))
    assert f"rank {rank} stops at position {i}: {stage}B{mb} waits for" in str(failure.value)
    assert f">{stage}B{mb}<" in str(failure.value)


def test_unknown_names_and_options_that_do_not_fit_are_explained() -> None:
    with pytest.raises(ValueError, match="did you mean '1f1b'"):
        build_schedule("1fb1", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match=f"choose one of {', '.join(SCHEDULE_NAMES)}, auto"):
        build_schedule("chimera", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="num_chunks is 2; use num_chunks 1"):
        build_schedule("gpipe", num_ranks=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(ValueError, match="group_size is 2"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2, group_size=2)
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        build_schedule("1f1b", num_ranks=0, num_microbatches=2)
    with pytest.raises(ValueError, match=r"rank must be in .*, got 2"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2).program(2)
    with pytest.raises(ValueError, match="'ahead' or 'in_order'"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=2).program(0, receives="late")


@pytest.mark.parametrize("what", ["ranks", "stages"])
def test_text_that_was_cut_short_is_no_smaller_schedule(what: str) -> None:
    text = build_schedule("gpipe", num_ranks=3, num_microbatches=2).to_text()
    rows = text.splitlines()[:-1]  # those of two ranks, which are a schedule of their own
    assert Schedule.from_text("\n".join(rows[1:])).num_ranks == 2
    header = rows[0].replace("num_ranks=3", "num_ranks=2") if what == "stages" else rows[0]
    with pytest.raises(ValueError, match=f"the header announces 3 {what}, but the rows hold 2"):
        Schedule.from_text("\n".join([header, *rows[1:]]))


def test_costs_that_no_number_holds_are_refused() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="more than a number can hold"):
        schedule.simulate(Costs(forward=1e308))


def test_a_csv_that_cannot_be_read_names_file_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(ValueError, match=r"broken\.csv: row 2, column 2: '1X0' is not an action"):
        Schedule.from_csv(path)
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ValueError, match="not ASCII"):
        Schedule.from_csv(path)


def test_pytorch_reads_every_cell_as_we_mean_it(tmp_path: Path) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = interleaved(2, 2, 4)
    path = tmp_path / "schedule.csv"
    schedule.to_csv(path)
    with path.open(newline="") as file:
        rows = [line.rstrip("\r\n").split(",") for line in file]
    for rank, row in enumerate(rows):
        assert len(row) == len(schedule.actions(rank))
        for cell, action in zip(row, schedule.actions(rank), strict=True):
            theirs = torch_schedules._Action.from_str(cell)
            assert (theirs.stage_index, theirs.microbatch_index) == (
                action.stage,
                action.microbatch,
            )
            expected = {ActionKind.FORWARD: "FORWARD", ActionKind.BACKWARD: "FULL_BACKWARD"}
            assert theirs.computation_type.name == expected[action.kind]


def test_the_grid_shows_fractional_costs_exactly_where_they_share_a_unit() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=1)
    costs = Costs(forward=1.0, backward_input=0.75, backward_weight=0.75)
    assert schedule.to_text(grid=True, costs=costs) == (
        "time    0   0.5 1   1.5 2\nrank 0  0F0---- 0B0--------"
    )


@pytest.mark.parametrize("unit", [1e-300, 1e-12, 1e300])
def test_the_grid_shows_costs_in_any_unit(unit: float) -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    costs = Costs(forward=unit, backward_input=unit, backward_weight=unit)
    row = schedule.to_text(grid=True, costs=costs).splitlines()[2]
    assert [cell.rstrip("-") for cell in row.split()] == ["rank", "1", "1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize("costs", [Costs(forward=1e-9, backward_input=1e9), Costs(send=1e12)])
def test_the_grid_stays_small_where_times_differ_by_orders_of_magnitude(costs: Costs) -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert len(schedule.to_text(grid=True, costs=costs)) < 500_000


def test_costs_and_limits_may_be_arrays() -> None:
    times, limits = torch.tensor([1.0, 2.0]), torch.tensor([2, 1])
    costs = Costs(forward=times.numpy(), backward_input=times, backward_weight=times[0])
    same = Costs(forward=[1.0, 2.0], backward_input=[1.0, 2.0], backward_weight=1.0)
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert schedule.simulate(costs).makespan == schedule.simulate(same).makespan
    for limit in (limits, limits.numpy()):
        schedule.validate(memory_limit=limit)
        assert schedule.lower_bound(costs, memory_limit=limit).value == (
            schedule.lower_bound(same, memory_limit=[2, 1]).value
        )
        found, expected = (
            build_schedule("auto", num_ranks=2, num_microbatches=3, memory_limit=m, costs=c)
            for m, c in ((limit, costs), ([2, 1], same))
        )
        assert found == expected
    schedule.validate(memory_limit=limits.numpy()[0])


def test_large_schedules_are_made_in_milliseconds() -> None:
    import time

    start = time.perf_counter()
    schedule = interleaved(64, 2, 1024)
    schedule.program(0)
    assert schedule.simulate().bubble_fraction == pytest.approx(63 / (2 * 1024 + 63))
    # About 0.2 s on the machine this was written on; the bound catches a wrong order of growth.
    assert time.perf_counter() - start < 5.0
