"""Collectives and messages over a ``Group``: a thin, checked layer over torch.distributed.

Every function checks shapes, dtypes, layout and device before it calls the backend, because gloo
aborts the process if sizes differ. In a group of one, collectives copy or are no-ops.

Collectives on CPU tensors use shared memory in a group that has it (``Group.host``). There, a
mismatch of calls, a terminated rank and a timeout each raise a ``RuntimeError`` with the rank and
the call.

Sync: with NCCL a call returns when the work is enqueued on the current stream; with gloo and shared
memory when it is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megacore._core import HostComm
from megacore.calls.records import DONE, ENQUEUED, ON_DEVICE, STARTED
from megacore.calls.ring import Call
from megacore.parallel.host.gloo_messages import GlooMessages
from megacore.parallel.host.shared_memory import HOST_DTYPES, HostCommunicator
from megacore.parallel.process_groups import Group, backend_for

# An exchange of all slices of at most this size is as fast as one in chunks, with less overhead.
_SMALL_BYTES = 1 << 20


@torch.no_grad()
def all_reduce_(tensor: Tensor, group: Group, *, op: Literal["sum", "max", "avg"] = "sum") -> None:
    """Replace a tensor by its sum, maximum or mean over the group, in place.

    On CPU tensors, bfloat16 and float16 are reduced in float32 and rounded once. In shared memory
    the sum is in rank order.

    Args:
        tensor: Any shape, contiguous, the same shape and dtype on every member.
        group: The members.
        op: ``"avg"`` needs a floating point dtype.

    Raises:
        ValueError: If the tensor does not support the reduction.
    """
    _check_tensor("all_reduce_", "tensor", tensor, group)
    _check_op("all_reduce_", op, ("sum", "max", "avg"), tensor)
    handle, host = group.handle, _host(group, tensor)
    if handle is None:
        return
    with recorded("all_reduce_", tensor, group):
        if host is not None:
            host.all_reduce_(tensor, op=op)
        elif _is_gloo(handle, tensor):
            _all_reduce_gloo(tensor, group, handle, op)
        else:
            dist.all_reduce(tensor, op=_reduce_op(op), group=handle)


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: Group,
    *,
    op: Literal["sum", "avg"] = "sum",
) -> None:
    """Reduce ``input`` over the group; each member gets its own slice.

    Member ``p`` receives elements ``[p * n, (p + 1) * n)`` of the flattened sum, ``n =
    output.numel()``. On CPU tensors the slices are added in rank order, in float32 for bfloat16 and
    float16, so the result depends neither on timing nor on the transport.

    Args:
        output: ``n`` elements, contiguous; may be a slice of ``input``. Its dtype may differ from
            the input's: the reduced value is cast to it.
        input: ``n * group.size`` elements, contiguous.
        group: The members.
        op: ``"avg"`` needs a floating point input.

    Raises:
        ValueError: If sizes, dtypes or devices do not match.
    """
    _check_tensor("reduce_scatter", "output", output, group)
    _check_tensor("reduce_scatter", "input", input, group)
    _check_op("reduce_scatter", op, ("sum", "avg"), input)
    _check_same_device("reduce_scatter", output, input)
    _check_slices("reduce_scatter", "input", input, "output", output, group)
    handle, host = group.handle, _host(group, input)
    if handle is None:
        output.copy_(input.view(output.shape))
        return
    with recorded("reduce_scatter", input, group):
        if host is not None:
            host.reduce_scatter(output, input, op=op)
        elif (messages := _reducing_messages(group, input, output)) is not None:
            messages.start_reduce_scatter(output, input, average=op == "avg").result()
        elif _is_gloo(handle, input):
            _exchange_and_add(output, input, group, handle, op)
        else:
            same = output.dtype == input.dtype
            reduced = output if same else torch.empty_like(output, dtype=input.dtype)
            _native("reduce_scatter_single", "reduce_scatter_tensor")(
                reduced.view(-1), input.view(-1), op=_reduce_op(op), group=handle
            )
            if not same:
                output.copy_(reduced)


@torch.no_grad()
def all_gather(output: Tensor, input: Tensor, group: Group) -> None:
    """Concatenate the inputs of all members along dimension 0, in the order of their positions.

    Args:
        output: Shape of ``input`` with dimension 0 multiplied by the group size, contiguous, same
            dtype.
        input: Contiguous, the same shape on every member; may be this member's slice of ``output``.
        group: The members.

    Raises:
        ValueError: If shapes, dtypes or devices do not match.
    """
    _check_tensor("all_gather", "output", output, group)
    _check_tensor("all_gather", "input", input, group)
    _check_same_device("all_gather", output, input)
    _check_slices("all_gather", "output", output, "input", input, group)
    expected = (input.shape[0] * group.size, *input.shape[1:]) if input.dim() else (group.size,)
    if tuple(output.shape) != expected or output.dtype != input.dtype:
        raise ValueError(
            f"all_gather over {_about(group)}: an input {_shape(input)} needs an output "
            f"{list(expected)} {_dtype(input)}, got {_shape(output)}"
        )
    if group.handle is None:
        output.copy_(input.view(output.shape))
        return
    with recorded("all_gather", input, group):
        if (host := _host(group, input)) is not None:
            host.all_gather(output, input)
        elif (messages := _messages(group, input)) is not None:
            for work in messages.start_all_gather(output, input):
                work.wait()
        else:
            _native("all_gather_single", "all_gather_into_tensor")(
                output, input, group=group.handle
            )


@torch.no_grad()
def broadcast_(tensor: Tensor, group: Group, *, source_position: int = 0) -> None:
    """Broadcast the tensor of one member to all, in place.

    Args:
        tensor: Any shape, contiguous, the same shape and dtype on every member.
        group: The members.
        source_position: Position of the source in the group.

    Raises:
        ValueError: If the position does not exist or the tensor cannot be sent.
    """
    _check_tensor("broadcast_", "tensor", tensor, group)
    source = _rank_at("broadcast_", "source_position", source_position, group)
    if group.handle is None:
        return
    with recorded("broadcast_", tensor, group):
        if (host := _host(group, tensor)) is not None:
            host.broadcast_(tensor, source_position=source_position)
        else:
            dist.broadcast(tensor, src=source, group=group.handle)


def barrier(group: Group) -> None:
    """Wait until every member has arrived.

    Sync: waits for all earlier work on the current device when the group uses NCCL.
    """
    if group.handle is None:
        return
    with recorded("barrier", None, group):
        if "nccl" in dist.get_backend(group.handle):
            dist.barrier(group=group.handle, device_ids=[torch.cuda.current_device()])
        elif group.host is not None:
            group.host.barrier()
        else:
            dist.barrier(group=group.handle)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Gather one picklable object per member at position 0; other members get ``[]``."""
    if group.handle is None or group.is_fake:
        return [obj] * group.size if group.position == 0 else []
    objects: list[Any] | None = [None] * group.size if group.position == 0 else None
    with recorded("gather_objects", None, group):
        dist.gather_object(obj, objects, dst=group.ranks[0], group=group.handle)
    return objects or []


def all_gather_objects(obj: Any, group: Group) -> list[Any]:
    """Gather one picklable object per member on every member, in the order of positions."""
    if group.handle is None or group.is_fake:
        return [obj] * group.size
    objects: list[Any] = [None] * group.size
    with recorded("all_gather_objects", None, group):
        dist.all_gather_object(objects, obj, group=group.handle)
    return objects


def broadcast_object(obj: Any, group: Group) -> Any:
    """Return the picklable object of position 0 on every member."""
    if group.handle is None or group.is_fake:
        return obj
    objects = [obj if group.position == 0 else None]
    with recorded("broadcast_object", None, group):
        dist.broadcast_object_list(objects, src=group.ranks[0], group=group.handle)
    return objects[0]


def isend(tensor: Tensor, group: Group, *, to_position: int, tag: int) -> Message:
    """Start to send a tensor to another member; do not change it before ``wait()`` on the result.

    Messages between two ranks arrive in the order they were sent. On gloo the tags must match as
    well; NCCL ignores them.

    Args:
        tensor: Any shape, contiguous.
        group: A group of at least two.
        to_position: Position of the receiver, another member.
        tag: A number >= 0, equal to that of the receiver.

    Raises:
        ValueError: If the receiver is not another member or the tensor cannot be sent.
    """
    peer, handle = _check_message("isend", "to_position", tensor, group, to_position, tag)
    call = _message_call("send", tensor, group, group.position, to_position, tag)
    return Message(_started(dist.isend(tensor, dst=peer, group=handle, tag=tag)), call)


def irecv(tensor: Tensor, group: Group, *, from_position: int, tag: int) -> Message:
    """Start to receive a tensor from another member; it is valid after ``wait()`` on the result.

    Args:
        tensor: Filled in place, contiguous; shape and dtype must be those of the sent tensor.
        group: A group of at least two.
        from_position: Position of the sender, another member.
        tag: The tag of the sender.

    Raises:
        ValueError: If the sender is not another member or the tensor cannot be received into.
    """
    peer, handle = _check_message("irecv", "from_position", tensor, group, from_position, tag)
    call = _message_call("receive", tensor, group, from_position, group.position, tag)
    return Message(_started(dist.irecv(tensor, src=peer, group=handle, tag=tag)), call)


class Message:
    """A message in flight."""

    def __init__(self, work: Work, call: Call | None) -> None:
        self._work = work
        self._call = call

    def is_completed(self) -> bool:
        """Poll whether :meth:`wait` would return at once."""
        done: bool = self._work.is_completed()
        if done and self._call is not None:
            self._call.move_to(DONE)
        return done

    def wait(self) -> None:
        """Wait until the message has arrived, or its tensor may be changed.

        Sync:
            With NCCL, only the current stream waits.
        """
        if self._call is None:
            self._work.wait()
            return
        self._call.wait()
        with self._call:
            self._work.wait()


def recorded(kind: str, tensor: Tensor | None, group: Group) -> AbstractContextManager[None]:
    """Return a context that records a call of the group, for the diagnosis of a hang."""
    calls = group.calls
    if calls is None:
        return nullcontext()
    if tensor is None:
        return calls.begin(kind, (), "")
    state = ON_DEVICE if tensor.is_cuda else STARTED
    return calls.begin(kind, tensor.shape, tensor.dtype, state)


def _message_call(
    kind: str, tensor: Tensor, group: Group, sender: int, receiver: int, tag: int
) -> Call | None:
    if group.calls is None:
        return None
    messages = group.calls.messages(sender, receiver, tag)
    state = ON_DEVICE if tensor.is_cuda else ENQUEUED
    return messages.begin(kind, tensor.shape, tensor.dtype, state)


def _all_reduce_gloo(tensor: Tensor, group: Group, handle: ProcessGroup, op: str) -> None:
    # Low precision is summed in float32: gloo would round after every addition, with a different
    # result on each rank.
    work = tensor.float() if _is_low_precision(tensor) else tensor
    dist.all_reduce(work, op=_reduce_op("sum" if op == "avg" else op), group=handle)
    if op == "avg":
        work.div_(group.size)
    if work is not tensor:
        tensor.copy_(work)


def _exchange_and_add(
    output: Tensor, input: Tensor, group: Group, handle: ProcessGroup, op: str
) -> None:
    terms = torch.empty(group.size, output.numel(), dtype=input.dtype, device=input.device)
    dist.all_to_all_single(terms.view(-1), input.view(-1), group=handle)
    _add_in_order(output, terms, average=op == "avg")


def _add_in_order(output: Tensor, terms: Tensor, *, average: bool) -> None:
    """Sum exchanged slices, ``(members, n)``, in the order of the members."""
    wide = torch.float32 if _is_low_precision(terms) else terms.dtype
    # The output is the accumulator if its dtype allows: terms do not alias it any more.
    total = output.view(-1) if output.dtype == wide else torch.empty_like(terms[0], dtype=wide)
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)
    if average:
        total.div_(terms.shape[0])
    if output.dtype != wide:
        output.copy_(total.view(output.shape))


def _is_low_precision(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _native(name: str, old_name: str) -> Any:
    """Return a torch.distributed function by its name since torch 2.13, or by its former name."""
    return getattr(dist, name, None) or getattr(dist, old_name)


def _host(group: Group, tensor: Tensor) -> HostCommunicator | None:
    return group.host if tensor.device.type == "cpu" else None


def _messages(group: Group, tensor: Tensor) -> GlooMessages | None:
    return group.messages if tensor.device.type == "cpu" else None


def _reducing_messages(group: Group, input: Tensor, output: Tensor) -> GlooMessages | None:
    """Return the exchange of messages for large tensors; small ones take less time in one call."""
    if input.nbytes <= _SMALL_BYTES:
        return None
    can_reduce = HostComm.can_reduce(HOST_DTYPES[input.dtype], HOST_DTYPES[output.dtype])
    return _messages(group, input) if can_reduce else None


def _is_gloo(handle: ProcessGroup, tensor: Tensor) -> bool:
    return backend_for(handle, tensor.device.type) == "gloo"


def _reduce_op(op: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}[op]


def _started(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("megacore bug: torch.distributed started no message for a group member")
    return work


def _check_tensor(function: str, argument: str, tensor: Tensor, group: Group) -> None:
    if tensor.dtype not in HOST_DTYPES:
        raise ValueError(
            f"{function} over {_about(group)}: {argument} has dtype {_dtype(tensor)}, which "
            "cannot be communicated; view it as uint8 or convert it"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{function} over {_about(group)}: {argument} {_shape(tensor)} with strides "
            f"{list(tensor.stride())} is not contiguous; pass tensor.contiguous()"
        )
    if group.handle is not None and group.host is None and tensor.device.type == "cpu":
        devices = dist.get_backend_config(group.handle)
        if "nccl" in devices and "cpu:" not in devices:
            raise ValueError(
                f"{function} over {_about(group)}: {argument} is on the CPU, but the group "
                "uses NCCL; move it to the GPU or make the groups with backend='gloo'"
            )


def _check_op(function: str, op: str, legal: tuple[str, ...], tensor: Tensor) -> None:
    if op not in legal:
        raise ValueError(f"{function}: unknown op {op!r}; use one of {', '.join(map(repr, legal))}")
    if op == "avg" and not tensor.is_floating_point():
        raise ValueError(
            f"{function}: op 'avg' needs a floating point tensor, got {_dtype(tensor)}; "
            "use op 'sum'"
        )


def _check_same_device(function: str, output: Tensor, input: Tensor) -> None:
    if output.device != input.device:
        raise ValueError(
            f"{function}: output is on {output.device} but input on {input.device}; "
            "they must share a device"
        )


def _check_slices(
    function: str, whole_name: str, whole: Tensor, slice_name: str, sliced: Tensor, group: Group
) -> None:
    if whole.numel() != sliced.numel() * group.size:
        raise ValueError(
            f"{function} over {_about(group)}: {whole_name} {_shape(whole)} has {whole.numel()} "
            f"elements; it needs {sliced.numel()} x {group.size} = {sliced.numel() * group.size} "
            f"for {slice_name} {_shape(sliced)}"
        )


def _check_message(
    function: str, argument: str, tensor: Tensor, group: Group, position: int, tag: int
) -> tuple[int, ProcessGroup]:
    _check_tensor(function, "tensor", tensor, group)
    peer = _rank_at(function, argument, position, group)
    if position == group.position or group.handle is None:
        raise ValueError(
            f"{function} over {_about(group)}: {argument} {position} is this rank itself"
        )
    if tag < 0:
        raise ValueError(f"{function} over {_about(group)}: tag must be at least 0, got {tag}")
    return peer, group.handle


def _rank_at(function: str, argument: str, position: int, group: Group) -> int:
    if not 0 <= position < group.size:
        raise ValueError(
            f"{function} over {_about(group)}: {argument} is {position}; "
            f"it must be in [0, {group.size})"
        )
    return group.ranks[position]


def _about(group: Group) -> str:
    ranks = ", ".join(map(str, group.ranks[:8])) + (", ..." if group.size > 8 else "")
    return f"group {group.name} (ranks {ranks}; here rank {group.rank})"


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_dtype(tensor)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
