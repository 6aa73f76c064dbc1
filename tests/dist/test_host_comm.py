"""Collectives through shared memory on real ranks: the bits of gloo, and every failure told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.errors import ConfigError
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.collectives import (
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    reduce_scatter,
)
from megacore.parallel.host import shared_memory as host_memory_module
from megacore.parallel.host.shared_memory import Place
from tests.support.distributed import run_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLES = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)  # gloo lacks int16
SMALL_SLOT = 4096  # bytes: a few thousand elements need many pieces
SIZES = (0, 1, 7, 64, 1000, 5003)  # elements per member
ALL_FIELDS = ("world", "tp", "cp", "dp", "dp_cp", "pp", "ep", "etp", "expert_dp", "embedding")


def groups_of(**settings: Any) -> ProcessGroups:
    layout = settings.pop("layout", {})
    return ProcessGroups.create(Topology(world_size=dist.get_world_size(), **layout), **settings)


def both_worlds() -> tuple[Group, Group]:
    """The world through shared memory, in small pieces, and the world on gloo."""
    host = groups_of(host_slot_bytes=SMALL_SLOT).world
    gloo = groups_of(host_memory=False).world
    assert host.host is not None
    assert gloo.host is None
    return host, gloo


def values_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_dtype_and_size_gives_the_bits_of_the_gloo_path(world_size: int) -> None:
    assert run_ranks(world_size, differences_to_gloo) == [[]] * world_size


def differences_to_gloo(rank: int) -> list[str]:
    host, gloo = both_worlds()
    found = []
    for dtype in (*FLOATS, *WHOLES):
        for numel in SIZES:
            for name, on_host, on_gloo in results(rank, host, gloo, dtype, numel):
                if not same_bits(on_host, on_gloo):
                    found.append(f"{name} of {numel} {dtype}")
    return found


def results(
    rank: int, host: Group, gloo: Group, dtype: torch.dtype, numel: int
) -> list[tuple[str, Tensor, Tensor]]:
    """(operation, result through shared memory, the same on gloo)."""
    whole = values_of(rank, numel * host.size, dtype)
    ops: tuple[Literal["sum", "avg"], ...] = ("sum", "avg") if dtype.is_floating_point else ("sum",)
    found = []
    for op in ops:
        scattered = [torch.empty(numel, dtype=dtype) for _ in range(2)]
        for output, group in zip(scattered, (host, gloo), strict=True):
            reduce_scatter(output, whole, group, op=op)
        found.append((f"reduce_scatter {op}", *scattered))
        # gloo's own all_reduce adds in another order; the sum in the order of ranks is this one.
        gathered = torch.empty_like(whole)
        all_gather_on_gloo(gathered, scattered[1], gloo)
        reduced = whole.clone()
        all_reduce_(reduced, host, op=op)
        found.append((f"all_reduce_ {op}", reduced, gathered))
    largest = [whole.clone(), whole.clone()]
    all_reduce_(largest[0], host, op="max")
    all_gather_then_max(largest[1], gloo)
    found.append(("all_reduce_ max", *largest))
    mine = values_of(rank, numel, dtype)
    outputs = [torch.empty_like(whole) for _ in range(2)]
    all_gather(outputs[0], mine, host)
    all_gather_on_gloo(outputs[1], mine, gloo)
    found.append(("all_gather", *outputs))
    for source in (0, host.size - 1):
        copy = mine.clone()
        broadcast_(copy, host, source_position=source)
        found.append((f"broadcast_ from {source}", copy, values_of(source, numel, dtype)))
    return found


def all_gather_on_gloo(output: Tensor, input: Tensor, group: Group) -> None:
    if input.numel():
        all_gather(output, input, group)


def all_gather_then_max(tensor: Tensor, group: Group) -> None:
    gathered = tensor.new_empty(tensor.numel() * group.size)
    all_gather_on_gloo(gathered, tensor, group)
    parts = gathered.view(group.size, -1)
    tensor.copy_(parts.any(0) if tensor.dtype == torch.bool else parts.amax(0))


@pytest.mark.dist
def test_outputs_of_another_dtype_get_the_bits_of_the_gloo_path() -> None:
    assert run_ranks(3, differences_in_casts) == [[]] * 3


def differences_in_casts(rank: int) -> list[str]:
    host, gloo = both_worlds()
    found = []
    for dtype in (*FLOATS, torch.int32):
        for out in (*FLOATS, torch.int64):
            whole = values_of(rank, 3 * 2000, dtype)
            outputs = [torch.empty(2, 1000, dtype=out) for _ in range(2)]
            reduce_scatter(outputs[0], whole, host)
            reduce_scatter(outputs[1], whole, gloo)
            if not same_bits(*outputs):
                found.append(f"{dtype} to {out}")
    return found


@pytest.mark.dist
def test_two_ranks_get_the_bits_of_gloos_own_all_reduce() -> None:
    # With two ranks there is only one order to add in.
    assert run_ranks(2, all_reduce_equals_gloo) == [True, True]


def all_reduce_equals_gloo(rank: int) -> bool:
    host, gloo = both_worlds()
    tensors = [values_of(rank, 5003, torch.float32) for _ in range(2)]
    all_reduce_(tensors[0], host, op="avg")
    all_reduce_(tensors[1], gloo, op="avg")
    return same_bits(*tensors)


@pytest.mark.dist
def test_results_do_not_depend_on_the_size_of_pieces() -> None:
    assert run_ranks(3, distinct_results_by_slot_size) == [1, 1, 1]


def distinct_results_by_slot_size(rank: int) -> int:
    found = set()
    for slot_bytes in (1, 256, 4096, 1 << 20):
        group = groups_of(host_slot_bytes=slot_bytes).world
        tensor = values_of(rank, 20001, torch.bfloat16)
        all_reduce_(tensor, group, op="avg")
        found.add(bytes(tensor.view(torch.uint8).numpy()))
    return len(found)


@pytest.mark.dist
def test_views_and_slices_in_place() -> None:
    assert run_ranks(4, in_place_round_trip) == [[]] * 4


def in_place_round_trip(rank: int) -> list[str]:
    """ZeRO's life of a buffer: reduce-scatter into one's slice of a view, gather it back."""
    host, gloo = both_worlds()
    found = []
    for dtype in FLOATS:
        buffers = [values_of(rank, 4 * 3001 + 10, dtype) for _ in range(2)]
        for buffer, group in zip(buffers, (host, gloo), strict=True):
            view = buffer[5:-5].view(4, 3001)
            reduce_scatter(view[rank], view, group, op="avg")
            all_gather(view.view(-1), view[rank], group)
        if not same_bits(*buffers):
            found.append(str(dtype))
    return found


@pytest.mark.dist
def test_changes_in_place_are_seen_by_autograd() -> None:
    assert run_ranks(2, error_of_a_stale_backward) == ["modified by an inplace operation"] * 2


def error_of_a_stale_backward(_rank: int) -> str:
    host, _ = both_worlds()
    weight = torch.ones(8, requires_grad=True)
    factor = torch.ones(8)
    loss = (weight * factor).sum()
    all_reduce_(factor, host)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
    return "modified by an inplace operation"


# ---- groups --------------------------------------------------------------------------------------


@pytest.mark.dist
def test_many_groups_at_once_keep_their_values_apart() -> None:
    layouts = [{"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 4}, {"cp": 2, "ep": 2, "etp": 2}]
    results = run_ranks(4, sums_over_all_groups, layouts)
    assert all(wrong == [] for wrong, _ in results)
    # Groups of one rank have no path; all others share memory, equal rank lists one segment.
    assert all(paths == {"alone", "shared memory"} for _, paths in results)


def sums_over_all_groups(rank: int, layouts: list[dict[str, int]]) -> tuple[list[str], set[str]]:
    all_groups = [groups_of(layout=layout) for layout in layouts]
    wrong, paths = [], set()
    for round_number in range(20):
        for groups in all_groups:
            for name in ALL_FIELDS:
                group: Group = getattr(groups, name)
                total = torch.tensor([float(rank), float(round_number)])
                all_reduce_(total, group)
                if total.tolist() != [sum(group.ranks), group.size * round_number]:
                    wrong.append(f"{name} in round {round_number}: {total.tolist()}")
                paths.add("alone" if group.size == 1 else path_of(group))
    groups = all_groups[0]
    assert groups.dp.host is groups.dp_cp.host
    return wrong, paths


def path_of(group: Group) -> str:
    return "shared memory" if "shared memory of this host" in group.describe() else "gloo"


@pytest.mark.dist
def test_describe_tells_the_path_of_every_group() -> None:
    for on, off in run_ranks(4, descriptions):
        assert on.splitlines()[0] == (
            "world: ranks 0, 1, 2, 3 over shared memory of this host (2 MiB per rank)"
        )
        assert [line.partition(":")[0] for line in on.splitlines()] == [
            "world", "tp", "dp", "dp_cp", "etp", "etp_ep", "expert_dp",
        ]  # fmt: skip
        assert off.splitlines()[0] == "world: ranks 0, 1, 2, 3 over gloo: host_memory is off"


def descriptions(_rank: int) -> tuple[str, str]:
    layout = {"tp": 2}
    on = groups_of(layout=layout)
    return on.describe(), groups_of(layout=layout, host_memory=False).describe()


@pytest.mark.dist
def test_too_little_memory_leaves_the_groups_on_gloo() -> None:
    for total, text in run_ranks(2, sum_with_huge_slots):
        assert total == 2.0
        assert "over gloo: the host has " in text
        assert "would take more than half" in text


def sum_with_huge_slots(_rank: int) -> tuple[float, str]:
    group = groups_of(host_slot_bytes=1 << 44).world
    tensor = torch.ones(1)
    all_reduce_(tensor, group)
    return tensor.item(), group.describe()


@pytest.mark.dist
def test_one_rank_on_another_host_keeps_its_groups_on_gloo() -> None:
    # Rank 3 says that it is elsewhere: {0, 1} can share memory, {2, 3} and the world cannot.
    paths = run_ranks(4, paths_with_rank_3_elsewhere)
    assert paths[0] == paths[1] == ("gloo", "shared memory")
    assert paths[2] == paths[3] == ("gloo", "gloo")


def paths_with_rank_3_elsewhere(rank: int) -> tuple[str, str]:
    if rank == 3:
        Place.mine = staticmethod(lambda: Place(host="elsewhere"))  # type: ignore[method-assign]
    groups = groups_of(layout={"tp": 2})
    if "elsewhere" not in groups.world.host_note:
        raise AssertionError(groups.world.host_note)
    total = torch.tensor([1.0])
    all_reduce_(total, groups.tp)
    all_reduce_(total, groups.world)
    assert total.item() == 8.0
    return path_of(groups.world), path_of(groups.tp)


@pytest.mark.dist
def test_a_member_that_cannot_open_the_segment_keeps_all_on_gloo() -> None:
    for note in run_ranks(3, note_if_rank_1_cannot_open):
        assert note == "rank 1 out of luck"


def note_if_rank_1_cannot_open(rank: int) -> str:
    if rank == 1:

        def refuse(**_settings: Any) -> None:
            raise RuntimeError("out of luck")

        refuse.segment_bytes = lambda *_sizes: 1  # type: ignore[attr-defined]
        host_memory_module.HostComm = refuse  # type: ignore[assignment,misc]
    group = groups_of().world
    tensor = torch.ones(1)
    all_reduce_(tensor, group)
    assert tensor.item() == 3.0
    return group.host_note


@pytest.mark.dist
def test_ranks_that_disagree_about_shared_memory_are_all_told() -> None:
    for message in run_ranks(2, message_of_disagreement):
        assert "host_memory True" in message
        assert "host_memory False" in message


def message_of_disagreement(rank: int) -> str:
    # The rank without shared memory must not come first: it would wait for nobody.
    if rank == 1:
        time.sleep(0.3)
    with pytest.raises(ConfigError) as caught:
        groups_of(host_memory=rank == 0)
    return str(caught.value)


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.dist
def test_nothing_remains_of_memory_that_has_no_name() -> None:
    assert run_ranks(2, open_memory_files) == [[], []]


def open_memory_files(_rank: int) -> list[str]:
    groups = groups_of(layout={"tp": 2})
    assert groups.tp.host is not None
    barrier(groups.tp)
    # Folders with records of calls have names; other tests may have them now.
    assert not [path for path in Path("/dev/shm").glob("megacore*") if path.is_file()]
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "memfd:megacore" in link]


@pytest.mark.dist
def test_a_killed_rank_is_named_by_the_others_long_before_the_timeout() -> None:
    texts = run_ranks(4, message_when_rank_2_is_killed, may_die=(2,), timeout_s=30)
    assert texts[2] is None
    for rank in (0, 1, 3):
        first, again, pid = texts[rank]
        assert "reduce_scatter over ranks 0, 1, 2, 3 of this host lost a peer" in first
        assert f"the process of rank 2 (position 2, pid {pid}) has ended" in first
        # A group that lost a member stays lost.
        assert f"rank 2 (position 2, pid {pid}) has ended in an earlier reduce_scatter" in again


def message_when_rank_2_is_killed(rank: int) -> tuple[str, str, int]:
    group = groups_of(timeout_s=300.0).world
    pids = torch.zeros(4, dtype=torch.int64)
    pids[rank] = os.getpid()
    all_reduce_(pids, group)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as first:
        reduce_scatter(torch.empty(5), torch.ones(20), group)
    with pytest.raises(RuntimeError) as again:
        barrier(group)
    return str(first.value), str(again.value), int(pids[2])


@pytest.mark.dist
def test_a_timeout_names_the_rank_that_did_not_come() -> None:
    texts = run_ranks(3, message_when_rank_1_is_late)
    for text in texts:
        assert "all_reduce over ranks 0, 1, 2 of this host timed out after 0.5 s" in text
        assert "rank 1 (position 1, pid " in text
        assert "did not come" in text
        assert "rank 2 (position" not in text


def message_when_rank_1_is_late(rank: int) -> str:
    group = groups_of(timeout_s=0.5, host_slot_bytes=SMALL_SLOT).world
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as caught:
        all_reduce_(torch.ones(10), group)
    return str(caught.value)


@pytest.mark.dist
def test_ranks_in_different_calls_are_told_both_and_go_on() -> None:
    texts = run_ranks(4, messages_of_different_calls)
    for different_op, different_size in texts:
        assert "rank 0 (position 0, pid " in different_op
        assert "in all_reduce (sum) of 8 float32, rank 3" in different_op
        assert "in all_gather of 2 float32 per member" in different_op
        assert "in reduce_scatter (sum) of 4 bfloat16 per member" in different_size
        assert "in reduce_scatter (sum) of 2 bfloat16 per member" in different_size


def messages_of_different_calls(rank: int) -> list[str]:
    group = groups_of().world
    texts = []
    calls = (lambda: all_reduce_(torch.ones(8), group), lambda: gather_pairs(group))
    with pytest.raises(RuntimeError, match="in different calls") as caught:
        calls[rank == 3]()
    texts.append(str(caught.value))
    numel = 2 if rank == 2 else 4
    whole = torch.ones(4 * numel, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="in different calls") as caught:
        reduce_scatter(torch.empty(numel), whole, group)
    texts.append(str(caught.value))
    total = torch.ones(3)
    all_reduce_(total, group)
    assert total.tolist() == [4.0] * 3
    return texts


def gather_pairs(group: Group) -> None:
    all_gather(torch.empty(8), torch.ones(2), group)


@pytest.mark.dist
def test_int16_works_too() -> None:
    assert run_ranks(2, sum_of_int16) == [[30002, -30002]] * 2


def sum_of_int16(rank: int) -> list[int]:
    tensor = torch.tensor([30000, -30000] if rank else [2, -2], dtype=torch.int16)
    all_reduce_(tensor, groups_of().world)
    return tensor.tolist()


@pytest.mark.dist
def test_a_signal_interrupts_a_wait_at_once() -> None:
    texts = run_ranks(3, message_when_rank_0_is_interrupted)
    assert texts[0] == "stop now"
    assert "was given up by a peer: rank 0 (position 0, pid " in texts[1]
    assert "was interrupted" in texts[1]


def message_when_rank_0_is_interrupted(rank: int) -> str:
    group = groups_of(timeout_s=300.0).world

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("stop now")

    if rank == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    text = ""
    if rank != 2:  # which never comes
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
            barrier(group)
        text = str(caught.value)
    dist.barrier()
    return text
