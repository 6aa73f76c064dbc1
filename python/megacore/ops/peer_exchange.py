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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore import _core
from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.library import define_op


def map_copies(
    experts_Tk: Tensor, sorted_Tk: Tensor, shift_E: Tensor, members: Tensor, capacity: int
) -> Tensor:
    """Build the map of where the copies of tokens go, by one kernel.

    Args:
        experts_Tk: Expert of each copy, ``(T, k)`` int64; a number out of range for a copy that is
            not sent.
        sorted_Tk: Row of each copy among the copies sorted by expert, ``(T, k)`` int64.
        shift_E: From :func:`plan`, ``(E,)`` int64.
        members: Members that hold each part of the experts, ``(P, r)`` int64.
        capacity: Rows of a member's buffer.

    Returns:
        ``(T, k * r)``, int64: -1 for a copy that is not sent; ``a``, its row's address ``member *
        capacity + row``, for a copy that travels; ``-2 - a`` for a copy whose row is that of an
        earlier copy of the token on the same member.

    Example:
        >>> ids, rows = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 1, 2]])
        >>> shift, members = torch.tensor([0, 0, -2, -2]), torch.tensor([[0], [1]])
        >>> map_copies(ids, rows, shift, members, 10).tolist()
        [[0, -3, 10]]
    """
    result: Tensor = _map_copies(experts_Tk, sorted_Tk, shift_E, members, capacity)
    return result


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MEMBERS = "Tensor memory, Tensor(a!) state, int position, int[] layout, float timeout_s"


def _map(launch: Any) -> Any:
    def run(experts: Tensor, sorted_Tk: Tensor, shift: Tensor, *args: Any) -> Tensor:
        members, capacity = args
        row_map = _map_fake(experts, sorted_Tk, shift, members, capacity)
        tensors = {"experts": experts, "sorted": sorted_Tk, "shift": shift, "members": members}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        launch(
            experts.device,
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            num_tokens=experts.shape[0],
            num_choices=experts.shape[1],
            num_experts=shift.shape[0],
            num_parts=members.shape[0],
            repeats=members.shape[1],
            capacity=capacity,
            row_map=row_map.data_ptr(),
        )
        return row_map

    return run


def _map_fake(
    experts: Tensor, sorted_Tk: Tensor, shift: Tensor, members: Tensor, capacity: int
) -> Tensor:
    del sorted_Tk, shift, capacity
    return experts.new_empty(experts.shape[0], experts.shape[1] * members.shape[1])


def _map_on_host(device: torch.device, **arguments: int) -> None:
    del device
    _core.map_copies(**arguments)


def _map_on_device(device: torch.device, **arguments: int) -> None:
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        cuda_kernels().peer_map_copies(**arguments, stream=stream)


def _send_counts(counts: Tensor, *args: Any) -> None:
    *members, shape = args
    _launch("peer_send_counts", *members, shape=list(shape), counts=counts.data_ptr())


def _plan(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *members, shape = args
    shift, kept, arriving = _plan_results(memory, shape)
    _launch(
        "peer_plan",
        memory,
        *members,
        shape=list(shape),
        shift=shift.data_ptr(),
        kept=kept.data_ptr(),
        arriving=arriving.data_ptr(),
    )
    return shift, kept, arriving


def _plan_fake(memory: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _plan_results(memory, args[-1])


def _plan_results(memory: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, num_parts = shape[:2]
    return (
        memory.new_empty(num_experts),
        memory.new_empty(num_experts),
        memory.new_empty(memory.shape[0], num_experts // num_parts),
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


def _experts_side(name: str) -> Any:
    def run(rows: Tensor, probs: Tensor | None, num_arrived: Tensor, *args: Any) -> None:
        *members, slot = args
        _launch(
            name,
            *members,
            slot=slot,
            **_rows(rows, probs),
            num_arrived=num_arrived.data_ptr(),
            capacity=rows.shape[0],
        )

    return run


def _rows(rows: Tensor, probs: Tensor | None) -> dict[str, Any]:
    if rows.dtype not in _DTYPES:
        names = ", ".join(_DTYPES.values())
        raise ValueError(
            f"rows of {rows.dtype} do not travel through memory of peers, only {names}; convert "
            "them, or set debug.static_transport = collective"
        )
    return {
        "rows": rows.data_ptr(),
        "probs": 0 if probs is None else probs.data_ptr(),
        "width": rows.shape[1],
        "dtype": _DTYPES[rows.dtype],
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
    with torch.cuda.device(memory.device):
        getattr(cuda_kernels(), name)(
            memory=memory.data_ptr(),
            state=state.data_ptr(),
            num_members=memory.shape[0],
            position=position,
            layout=list(layout),
            timeout_s=timeout_s,
            stream=torch.cuda.current_stream().cuda_stream,
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


_map_copies = define_op(
    "peer_map_copies(Tensor experts, Tensor sorted, Tensor shift, Tensor members, int capacity)"
    " -> Tensor",
    cpu=_map(_map_on_host),
    cuda=_map(_map_on_device),
    fake=_map_fake,
)
send_counts = _define(
    f"peer_send_counts(Tensor counts, {_MEMBERS}, int[] shape) -> ()", _send_counts
)
plan = _define(f"peer_plan({_MEMBERS}, int[] shape) -> (Tensor, Tensor, Tensor)", _plan, _plan_fake)
start_push = _define(
    f"peer_start_push(Tensor rows, Tensor? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _tokens_side("peer_start_push"),
)
finish_push = _define(
    f"peer_finish_push(Tensor(b!) rows, Tensor(c!)? probs, Tensor num_arrived, {_MEMBERS}, "
    "int slot) -> ()",
    _experts_side("peer_finish_push"),
)
start_pull = _define(
    f"peer_start_pull(Tensor rows, Tensor? probs, Tensor num_arrived, {_MEMBERS}, int slot) -> ()",
    _experts_side("peer_start_pull"),
)
finish_pull = _define(
    f"peer_finish_pull(Tensor(b!) rows, Tensor(c!)? probs, Tensor row_map, {_MEMBERS}, int slot, "
    "int num_choices, int capacity) -> ()",
    _tokens_side("peer_finish_pull"),
)
