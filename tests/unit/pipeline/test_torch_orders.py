"""Our orders are those of torch.distributed.pipelining, and each reads the other's CSV."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from megacore.pipeline import Schedule, build_schedule, schedule_catalog


class LoneStage(_PipelineStageBase):
    """A stage of rank 0 without processes: torch plans the orders of all ranks from its sizes."""

    def __init__(self, *, stage_index: int, num_stages: int, group_size: int) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = 0
        self.group = None
        self.submod = torch.nn.Identity()
        self.has_backward = True

    def _create_grad_recv_info(self, *_: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, *_: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_backward_infra(self, *_: Any) -> None:
        pass


def stages(p: int, v: int) -> list[LoneStage]:
    return [LoneStage(stage_index=chunk * p, num_stages=p * v, group_size=p) for chunk in range(v)]


def torch_schedule(name: str, p: int, v: int, m: int) -> Any:
    make = getattr(theirs, name, None)
    if make is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return make(stages(p, v), n_microbatches=m, loss_fn=lambda *_: None)


def cells(order: dict[int, list[Any]]) -> list[list[str]]:
    """Text of the compute actions of every rank."""
    return [
        [str(action) for action in order[rank] if action is not None and "GRAD" not in str(action)]
        for rank in sorted(order)
    ]


def our_cells(schedule: Schedule, path: Path) -> list[list[str]]:
    schedule.to_csv(path)
    with path.open(newline="") as file:
        return list(csv.reader(file))


def schedule_from_cells(rows: list[list[str]], path: Path) -> Schedule:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return Schedule.from_csv(path)


LOOPED = [
    ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
    ("looped_bfs", "ScheduleLoopedBFS"),
    ("interleaved_zb", "ScheduleInterleavedZeroBubble"),
]
SHARED = [*LOOPED, ("zb_v", "ScheduleZBVZeroBubble"), ("dualpipe_v", "ScheduleDualPipeV")]
# (chunks, microbatches, ranks) of torch's own TestSchedulePlan.
PLANS = [
    *((2, 2, 2), (2, 4, 2), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8)),
    *((4, 16, 4), (4, 32, 4), (4, 64, 4), (4, 16, 16), (4, 32, 32), (4, 128, 64)),
    *((3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (2, 15, 4)),
]


@pytest.mark.parametrize(("name", "torch_name"), LOOPED)
@pytest.mark.parametrize(("v", "m", "p"), PLANS)
def test_looped_orders_are_equal_token_for_token(
    name: str, torch_name: str, v: int, m: int, p: int, tmp_path: Path
) -> None:
    ours = build_schedule(name, num_ranks=p, num_chunks=v, num_microbatches=m)
    order = torch_schedule(torch_name, p, v, m).pipeline_order
    assert our_cells(ours, tmp_path / "ours.csv") == cells(order)


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("zb_v", "ScheduleZBVZeroBubble"), ("dualpipe_v", "ScheduleDualPipeV")],
)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("surplus", [0, 1, 5])
def test_v_orders_are_equal_token_for_token(
    name: str, torch_name: str, p: int, surplus: int, tmp_path: Path
) -> None:
    m = 2 * p + surplus
    ours = build_schedule(name, num_ranks=p, num_microbatches=m)
    order = torch_schedule(torch_name, p, 2, m).pipeline_order
    assert our_cells(ours, tmp_path / "ours.csv") == cells(order)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_zb_v_with_few_microbatches_is_equal_too(m: int, tmp_path: Path) -> None:
    ours = build_schedule("zb_v", num_ranks=4, num_microbatches=m)
    order = torch_schedule("ScheduleZBVZeroBubble", 4, 2, m).pipeline_order
    assert our_cells(ours, tmp_path / "ours.csv") == cells(order)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 7), (8, 3)])
def test_zb_h1_is_torchs_zero_bubble_with_one_chunk(p: int, m: int, tmp_path: Path) -> None:
    ours = build_schedule("zb_h1", num_ranks=p, num_microbatches=m)
    order = torch_schedule("ScheduleInterleavedZeroBubble", p, 1, m).pipeline_order
    assert our_cells(ours, tmp_path / "ours.csv") == cells(order)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 8)])
def test_gpipe_is_equal(p: int, m: int, tmp_path: Path) -> None:
    stage = LoneStage(stage_index=0, num_stages=p, group_size=p)
    order = theirs.ScheduleGPipe(
        stage, n_microbatches=m, loss_fn=lambda *_: None
    )._get_pipeline_order()
    ours = build_schedule("gpipe", num_ranks=p, num_microbatches=m)
    assert our_cells(ours, tmp_path / "ours.csv") == cells(order)


# torch 2.13 reports the last rank's forwards shifted by one; what it executes is right.
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8)])
def test_torchs_1f1b_order_is_ours_or_refused_where_it_is_wrong(
    p: int, m: int, tmp_path: Path
) -> None:
    stage = LoneStage(stage_index=0, num_stages=p, group_size=p)
    order = theirs.Schedule1F1B(
        stage, n_microbatches=m, loss_fn=lambda *_: None
    )._get_pipeline_order()
    ours = our_cells(build_schedule("1f1b", num_ranks=p, num_microbatches=m), tmp_path / "a.csv")
    reported = cells(order)
    if reported == ours:
        return
    assert reported[:-1] == ours[:-1]
    with pytest.raises(ValueError, match=f"rank {p - 1}: {p - 1}F0 is missing"):
        schedule_from_cells(reported, tmp_path / "theirs.csv")


@pytest.mark.parametrize(("name", "torch_name"), SHARED)
def test_csv_files_of_torch_read_as_ours(name: str, torch_name: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.csv"
    torch_schedule(torch_name, 4, 2, 8)._dump_csv(str(path), format="compute_only")
    ours = build_schedule(name, num_ranks=4, num_chunks=2, num_microbatches=8)
    assert Schedule.from_csv(path) == ours


ONE_CHAIN = [info.name for info in schedule_catalog() if info.placement != "bidirectional"]


@pytest.mark.parametrize("name", ONE_CHAIN)
def test_torch_loads_and_lowers_our_csv_files(name: str, tmp_path: Path) -> None:
    p, m = (1 if name == "no_pipelining" else 4), 8
    many = next(info for info in schedule_catalog() if info.name == name).num_chunks == 0
    ours = build_schedule(name, num_ranks=p, num_microbatches=m, num_chunks=2 if many else None)
    path = tmp_path / "ours.csv"
    rows = our_cells(ours, path)
    runtime = theirs._PipelineScheduleRuntime(
        stages(p, ours.num_chunks), n_microbatches=m, loss_fn=lambda *_: None
    )
    runtime._load_csv(str(path), format="compute_only")
    assert cells(runtime.pipeline_order) == rows
    assert runtime.stage_index_to_group_rank == {
        stage: rank for rank in range(p) for stage in ours.stages(rank)
    }
    # Its own lowering finds a place for every message.
    lowered = runtime.pipeline_order_with_comms
    sends = [str(action) for rank in lowered for action in lowered[rank] if "SEND" in str(action)]
    ranks = runtime.stage_index_to_group_rank
    edges = sum(ranks[stage] != ranks[stage + 1] for stage in range(ours.num_stages - 1))
    assert len(sends) == 2 * edges * m


def lowered_rows(runtime: Any) -> list[list[str]]:
    """Text of the actions with sends and receives; pairs apart, sharding and reduction left out."""
    order = runtime.pipeline_order_with_comms
    rows = []
    for rank in sorted(order):
        parts = [part for action in order[rank] for part in action.sub_actions or (action,)]
        texts = [str(part) for part in parts]
        rows.append([t for t in texts if "SHARD" not in t and "GRAD" not in t])
    return rows


def lowered(name: str, p: int, m: int, *, defer: bool) -> list[list[str]]:
    make = getattr(theirs, name, None)
    if make is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    if defer and "defer_pp_recv" not in inspect.signature(make).parameters:
        pytest.skip(f"torch {torch.__version__} does not defer receives")
    options = {"defer_pp_recv": True} if defer else {}
    return lowered_rows(make(stages(p, 2), n_microbatches=m, loss_fn=lambda *_: None, **options))


@pytest.mark.parametrize(("name", "torch_name"), SHARED)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
def test_torchs_lowering_is_proved(name: str, torch_name: str, p: int, m: int) -> None:
    schedule = build_schedule(name, num_ranks=p, num_chunks=2, num_microbatches=m)
    programs = schedule.programs_from(lowered(torch_name, p, m, defer=False))
    assert [program.rank for program in programs] == list(range(p))


# With deferred receives the gradients come out wrong, without an error: messages of one shape are
# received in another order than they are sent.
@pytest.mark.parametrize("torch_name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_torchs_deferred_receives_are_refused_as_out_of_order(torch_name: str) -> None:
    name = "zb_v" if "ZBV" in torch_name else "dualpipe_v"
    schedule = build_schedule(name, num_ranks=4, num_microbatches=16)
    with pytest.raises(ValueError, match="a channel must be received in the order of sending"):
        schedule.programs_from(lowered(torch_name, 4, 16, defer=True))


@pytest.mark.parametrize("p", [2, 4])
def test_torchs_deferred_receives_of_interleaved_1f1b_keep_the_order(p: int) -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=p, num_chunks=2, num_microbatches=2 * p)
    schedule.programs_from(lowered("ScheduleInterleaved1F1B", p, 2 * p, defer=True))


# How many of the sizes p in 2, 3, 4, 8 and m in p, 2p, 4p cannot run when torch defers the receives
# of its lowering. Without deferral all run.
DEFERRED = {
    "interleaved_1f1b": 0,
    "looped_bfs": 0,
    "interleaved_zb": 2,
    "zb_v": 8,
    "dualpipe_v": 6,
}


@pytest.mark.parametrize(("name", "torch_name"), SHARED)
def test_what_torch_lowers_runs_unless_it_defers_receives(name: str, torch_name: str) -> None:
    refused = {False: 0, True: 0}
    for p in (2, 3, 4, 8):
        for m in (p, 2 * p, 4 * p):
            if name == "dualpipe_v" and m < 2 * p:
                continue
            schedule = build_schedule(name, num_ranks=p, num_chunks=2, num_microbatches=m)
            for defer in refused:
                try:
                    schedule.programs_from(lowered(torch_name, p, m, defer=defer))
                except ValueError:
                    refused[defer] += 1
    assert refused == {False: 0, True: DEFERRED[name]}


def test_foreign_programs_are_checked_action_by_action() -> None:
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=1)
    first = ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    last = ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]
    schedule.programs_from([first, last])
    with pytest.raises(ValueError, match="rank 1, position 0: 1F0 reads a message, but no"):
        schedule.programs_from([first, ["1F0", "1RECV_F0", "1B0", "1SEND_B0"]])
    with pytest.raises(ValueError, match="rank 0, position 0: 2F0 is outside the 2 stages"):
        schedule.programs_from([["2F0", *first[1:]], last])
    with pytest.raises(ValueError, match="has no other end"):
        schedule.programs_from([[*first, "0SEND_B0"], last])


def test_two_chains_have_no_csv(tmp_path: Path) -> None:
    schedule = build_schedule("dualpipe", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="2 chains of stages; PyTorch's CSV knows one"):
        schedule.to_csv(tmp_path / "dualpipe.csv")
    assert Schedule.from_text(schedule.to_text()) == schedule
