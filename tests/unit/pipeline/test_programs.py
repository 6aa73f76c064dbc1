"""Programs seen from Python: what they tell, how they are walked, what is refused."""

from __future__ import annotations

import pytest

from megacore.pipeline import Action, ActionKind, Program, StateMachine, build_schedule
from megacore.pipeline import validate_programs as validate
from megacore.pipeline.schedule import Receives


def programs(receives: str = "ahead") -> list[Program]:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=4)
    return [schedule.program(rank, receives=receives) for rank in range(2)]


def test_a_program_tells_where_its_messages_go() -> None:
    program = programs()[0]
    assert (program.rank, program.num_ranks, program.stages) == (0, 2, [0, 2])
    assert len(program) == len(program.actions) == len(program.peers) == len(program.acknowledged)
    for action, peer in zip(program.actions, program.peers, strict=True):
        is_compute = action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        assert peer == (-1 if is_compute else 1)
    assert not program.is_in_order
    assert programs("in_order")[0].is_in_order


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "v_min", "dualpipe"])
@pytest.mark.parametrize("receives", ["ahead", "in_order"])
def test_the_forward_only_program_is_that_of_the_forward_only_schedule(
    name: str, receives: Receives
) -> None:
    schedule = build_schedule(
        name,
        num_ranks=4,
        num_microbatches=10,
        num_chunks=2 if name == "interleaved_1f1b" else None,
    )
    evaluations = [schedule.program(rank, receives=receives).forward_only() for rank in range(4)]
    validate(evaluations)
    direct = schedule.forward_only()
    for rank, evaluation in enumerate(evaluations):
        assert evaluation.is_forward_only
        assert evaluation == direct.program(rank, receives=receives)


def test_programs_that_do_not_belong_together_are_refused() -> None:
    good = programs()
    validate(good)
    with pytest.raises(ValueError, match="there are 1 programs for 2 ranks"):
        validate(good[:1])
    with pytest.raises(ValueError, match="differ in placement"):
        validate([good[0], good[1].forward_only()])


def test_the_state_machine_walks_to_the_end_and_starts_again() -> None:
    program = programs()[0]
    machine = StateMachine(program)
    for _ in range(2):
        walked = []
        while (action := machine.next()) is not None:
            machine.start(action)
            assert machine.is_running
            machine.complete(action)
            walked.append(action)
        assert walked == program.actions
        assert machine.position == len(program)
        machine.reset()


def test_a_step_out_of_turn_names_position_expected_and_got() -> None:
    machine = StateMachine(programs()[0])
    wrong = Action(0, ActionKind.BACKWARD, 3)
    with pytest.raises(RuntimeError, match=r"rank 0, position 0 of \d+: expected start 0F0, got"):
        machine.start(wrong)
    with pytest.raises(RuntimeError, match="expected start 0F0, got complete 0F0"):
        machine.complete(Action.parse("0F0"))
    machine.start(Action.parse("0F0"))
    with pytest.raises(RuntimeError, match="expected complete 0F0, got complete 0B3"):
        machine.complete(wrong)
    with pytest.raises(RuntimeError, match="expected complete 0F0, got start 0F0"):
        machine.start(Action.parse("0F0"))
