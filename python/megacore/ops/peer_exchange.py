"""Registered operations that exchange rows through the memory of peer GPUs.

A *start* writes into peer memory and raises a flag. A *finish* waits on the device for the flags of
all peers, then reads. There is no host sync, so all operations can be captured in a graph. For the
memory layout, see ``cuda/include/megacore/cuda/peer_exchange.h``. The operations change ``state``
and memory that is not an argument, so they have no derivatives of their own. In
:mod:`megacore.moe.dispatchers.peer`, push and pull are each other's derivatives.

After their tensors, all operations take the description of the members: ``memory``, the addresses
of all members' memory ``(G,)`` int64; ``state``, this member's counters; its ``position``; the
maximum number of experts, of rows, and of bytes per row, which are the layout of the memory; and
``timeout_s``, the timeout for a member. A shape is the number of experts and of parts, the part of
this member, and the rows of each buffer. CPUs have no such operations: there
:class:`megacore.moe.dispatchers.HostPeers` exchanges rows.

Three operations plan an exchange. ``send_counts`` sorts the choices of this member's tokens, ``(T,
k)`` int64, as far as their counts, sends these, and returns what is known of the order; ``plan``
waits for the counts of all and returns the shift, ``(E,)``, and the other results of
:class:`megacore.moe.dispatchers.peer_memory.PeerPlan`; ``map_copies`` finishes the sort and returns
the map, from ``members``, the members of each part of the experts ``(P, r)`` int64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.permutation import sort_by_expert
from megacore.ops.register import compiled

_MEMBERS = (
    "Tensor memory, Tensor(a!) state, int position, int max_experts, int max_capacity,"
    " int max_row_bytes, float timeout_s"
)
_SHAPE = "int num_experts, int num_parts, int part, int capacity"


def send_counts(experts: Tensor, *args: Any) -> Tensor:
    """Sort choices as far as their counts and send these; see the module."""
    num_experts = args[-4]
    if num_experts <= cuda_kernels().MAX_SORTED_EXPERTS:
        sorting: Tensor = _send_counts(experts, *args)
        return sorting
    sorted_Tk, counts = sort_by_expert(experts, num_experts)
    _send_sums(counts, *args)
    return sorted_Tk


def _sorting_fake(experts: Tensor, *args: Any) -> Tensor:
    num_tokens, num_choices = experts.shape
    numel = cuda_kernels().peer_sort_numel(
        num_tokens=num_tokens, num_choices=num_choices, num_experts=args[-4]
    )
    return experts.new_empty(numel, dtype=torch.int32)


def _plan_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_experts, num_parts = args[-5:-3]
    return (
        memory.new_empty(num_experts),
        memory.new_empty(num_experts),
        memory.new_empty(num_experts // num_parts),
        memory.new_empty(3),
    )


def _map_fake(
    experts: Tensor, sorting: Tensor, shift: Tensor, members: Tensor, capacity: int
) -> Tensor:
    del sorting, shift, capacity
    return experts.new_empty(experts.shape[0], experts.shape[1] * members.shape[1])


def _nothing(*args: Any) -> None:
    del args


_send_counts = compiled(
    f"peer_send_counts(Tensor experts, {_MEMBERS}, {_SHAPE}) -> Tensor", _sorting_fake
)
_send_sums = compiled(f"peer_send_sums(Tensor counts, {_MEMBERS}, {_SHAPE}) -> ()", _nothing)
plan = compiled(
    f"peer_plan({_MEMBERS}, {_SHAPE}, int num_copies) -> (Tensor, Tensor, Tensor, Tensor)",
    _plan_fake,
)
map_copies = compiled(
    "peer_map_copies(Tensor experts, Tensor sorting, Tensor shift, Tensor members, int capacity)"
    " -> Tensor",
    _map_fake,
)
start_push = compiled(
    f"peer_start_push(Tensor rows, Tensor? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _nothing,
)
finish_push = compiled(
    f"peer_finish_push(Tensor(b!) rows, Tensor(c!)? probs, Tensor num_arrived, {_MEMBERS}, "
    "int slot) -> ()",
    _nothing,
)
reserve_pull = compiled(f"peer_reserve_pull({_MEMBERS}, int slot) -> ()", _nothing)
start_pull = compiled(
    f"peer_start_pull(Tensor rows, Tensor? probs, Tensor num_arrived, {_MEMBERS}, int slot, "
    "bool are_there) -> ()",
    _nothing,
)
finish_pull = compiled(
    f"peer_finish_pull(Tensor(b!) rows, Tensor(c!)? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _nothing,
)
