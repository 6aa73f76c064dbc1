"""Registered operations that exchange rows through the memory of peer GPUs.

A *start* writes into peer memory and raises a flag. A *finish* waits on the device for the flags of
all peers, then reads. There is no host sync, so all operations can be captured in a graph. For the
memory layout, see ``cuda/include/megacore/cuda/peer_exchange.h``. The operations change ``state``
and memory that is not an argument, so they have no derivatives of their own. In
:mod:`megacore.moe.dispatchers.peer`, push and pull are each other's derivatives.

After their tensors, all operations take the description of the members: ``memory``, the addresses
of all members' memory ``(G,)`` int64; ``state``, this member's counters; its ``position``;
``layout``, the maximum number of experts, of rows, and of bytes per row; and ``timeout_s``, the
timeout for a member.

Three operations plan an exchange. ``send_counts`` sorts the choices of this member's tokens, ``(T,
k)`` int64, as far as their counts, sends these, and returns what is known of the order; ``plan``
waits for the counts of all and returns the shift, ``(E,)``, and the other results of
:class:`megacore.moe.dispatchers.peer_memory.PeerPlan`; ``map_copies`` finishes the sort and returns
the map, from ``members``, the members of each part of the experts ``(P, r)`` int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.permutation import sort_by_expert
from megacore.ops.register import DTYPES, define_op, launch

_MEMBERS = "Tensor memory, Tensor(a!) state, int position, int[] layout, float timeout_s"


def _send_counts(experts: Tensor, *args: Any) -> Tensor:
    *members, shape = args
    experts, sorting = experts.contiguous(), _sorting_fake(experts, *args)
    if _sorts(shape[0]):
        choices: dict[str, Any] = _choices(experts)
        address = sorting.data_ptr()
        _launch("peer_send_counts", *members, shape=list(shape), workspace=address, **choices)
        return sorting
    sorted_Tk, counts = sort_by_expert(experts, shape[0])
    _launch("peer_send_sums", *members, shape=list(shape), counts=counts.data_ptr())
    return sorted_Tk


def _map_copies(
    experts: Tensor, sorting: Tensor, shift: Tensor, members: Tensor, capacity: int
) -> Tensor:
    experts, members = experts.contiguous(), members.contiguous()
    num_experts, repeats = shift.shape[0], members.shape[1]
    row_map = experts.new_empty(experts.shape[0], experts.shape[1] * repeats)
    is_sorted = not _sorts(num_experts)
    sorted_Tk = sorting if is_sorted else torch.empty_like(experts)
    launch(
        "peer_map_copies",
        experts,
        **_choices(experts),
        sorted=sorted_Tk.data_ptr(),
        workspace=0 if is_sorted else sorting.data_ptr(),
        shift=shift.data_ptr(),
        members=members.data_ptr(),
        num_experts=num_experts,
        num_parts=members.shape[0],
        repeats=repeats,
        capacity=capacity,
        row_map=row_map.data_ptr(),
    )
    return row_map


def _choices(experts: Tensor) -> dict[str, int]:
    num_tokens, num_choices = experts.shape
    address = experts.data_ptr()
    return {"experts": address, "num_tokens": num_tokens, "num_choices": num_choices}


def _sorts(num_experts: int) -> bool:
    """Return whether the kernels that exchange counts and map copies sort for this many experts."""
    limit: int = cuda_kernels().MAX_SORTED_EXPERTS
    return num_experts <= limit


def _sorting_fake(experts: Tensor, *args: Any) -> Tensor:
    num_experts = args[-1][0]
    if not _sorts(num_experts):
        return torch.empty_like(experts)
    num_tokens, num_choices = experts.shape
    numel = cuda_kernels().peer_sort_numel(
        num_tokens=num_tokens, num_choices=num_choices, num_experts=num_experts
    )
    return experts.new_empty(numel, dtype=torch.int32)


def _map_fake(
    experts: Tensor, sorting: Tensor, shift: Tensor, members: Tensor, capacity: int
) -> Tensor:
    del sorting, shift, capacity
    return experts.new_empty(experts.shape[0], experts.shape[1] * members.shape[1])


def _plan(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *members, shape, num_copies = args
    shift, kept, m_splits, totals = _plan_results(memory, shape)
    _launch(
        "peer_plan",
        memory,
        *members,
        shape=list(shape),
        num_copies=num_copies,
        shift=shift.data_ptr(),
        kept=kept.data_ptr(),
        m_splits=m_splits.data_ptr(),
        totals=totals.data_ptr(),
    )
    return shift, kept, m_splits, totals


def _plan_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _plan_results(memory, args[-2])


def _plan_results(memory: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, num_parts = shape[:2]
    return (
        memory.new_empty(num_experts),
        memory.new_empty(num_experts),
        memory.new_empty(num_experts // num_parts),
        memory.new_empty(3),
    )


def _tokens_side(name: str) -> Any:
    def run(rows: Tensor, probs: Tensor | None, row_map: Tensor, *args: Any) -> None:
        *members, slot, num_choices, capacity = args
        num_tokens, num_copies = row_map.shape
        repeats = num_copies // num_choices if num_choices else 1
        _launch(
            name,
            *members,
            slot=slot,
            **_rows(rows, probs),
            row_map=row_map.data_ptr(),
            sizes=[num_tokens, num_choices, repeats, capacity],
        )

    return run


def _finish_push(rows: Tensor, probs: Tensor | None, num_arrived: Tensor, *args: Any) -> None:
    *members, slot = args
    _launch(
        "peer_finish_push",
        *members,
        slot=slot,
        **_rows(rows, probs),
        num_arrived=num_arrived.data_ptr(),
        capacity=rows.shape[0],
    )


def _reserve_pull(memory: Tensor, *args: Any) -> None:
    *members, slot = args
    _launch("peer_reserve_pull", memory, *members, slot=slot)


def _start_pull(rows: Tensor, probs: Tensor | None, num_arrived: Tensor, *args: Any) -> None:
    *members, slot, are_there = args
    _launch(
        "peer_start_pull",
        *members,
        slot=slot,
        **{**_rows(rows, probs), **({"rows": 0} if are_there else {})},
        num_arrived=num_arrived.data_ptr(),
        capacity=rows.shape[0],
    )


def _rows(rows: Tensor, probs: Tensor | None) -> dict[str, Any]:
    if rows.dtype not in DTYPES:
        names = ", ".join(DTYPES.values())
        raise ValueError(
            f"rows of {rows.dtype} do not travel through memory of peers, only {names}; convert "
            "them, or set moe.static_transport = collective"
        )
    return {
        "rows": rows.data_ptr(),
        "probs": 0 if probs is None else probs.data_ptr(),
        "width": rows.shape[1],
        "dtype": DTYPES[rows.dtype],
    }


def _launch(
    name: str,
    memory: Tensor,
    state: Tensor,
    position: int,
    layout: Sequence[int],
    timeout_s: float,
    **arguments: Any,
) -> None:
    launch(
        name,
        memory,
        memory=memory.data_ptr(),
        state=state.data_ptr(),
        num_members=memory.shape[0],
        position=position,
        layout=list(layout),
        timeout_s=timeout_s,
        **arguments,
    )


def _needs_cuda(*args: Any) -> None:
    del args
    raise ValueError(
        "these exchanges are for CUDA tensors; on the CPU use megacore.moe.dispatchers.HostPeers"
    )


def _nothing(*args: Any) -> None:
    del args


def _define(schema: str, run: Any, fake: Any = _nothing) -> Any:
    return define_op(schema, cpu=_needs_cuda, cuda=run, fake=fake)


send_counts = _define(
    f"peer_send_counts(Tensor experts, {_MEMBERS}, int[] shape) -> Tensor",
    _send_counts,
    _sorting_fake,
)
plan = _define(
    f"peer_plan({_MEMBERS}, int[] shape, int num_copies) -> (Tensor, Tensor, Tensor, Tensor)",
    _plan,
    _plan_fake,
)
map_copies = _define(
    "peer_map_copies(Tensor experts, Tensor sorting, Tensor shift, Tensor members, int capacity)"
    " -> Tensor",
    _map_copies,
    _map_fake,
)
start_push = _define(
    f"peer_start_push(Tensor rows, Tensor? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _tokens_side("peer_start_push"),
)
finish_push = _define(
    f"peer_finish_push(Tensor(b!) rows, Tensor(c!)? probs, Tensor num_arrived, {_MEMBERS}, "
    "int slot) -> ()",
    _finish_push,
)
reserve_pull = _define(f"peer_reserve_pull({_MEMBERS}, int slot) -> ()", _reserve_pull)
start_pull = _define(
    f"peer_start_pull(Tensor rows, Tensor? probs, Tensor num_arrived, {_MEMBERS}, int slot, "
    "bool are_there) -> ()",
    _start_pull,
)
finish_pull = _define(
    f"peer_finish_pull(Tensor(b!) rows, Tensor(c!)? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _tokens_side("peer_finish_pull"),
)
