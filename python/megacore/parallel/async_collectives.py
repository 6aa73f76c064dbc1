"""Asynchronous collectives, which overlap with computation between start and wait.

Arguments, checks and results are those of the functions of the same names in ``collectives``.
Members must start the collectives of a group in the same order. On CPU tensors, gloo threads run
the transfer, even in groups with shared memory; ``WindowTensor`` is faster there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from megacore.calls.records import ENQUEUED, ON_DEVICE
from megacore.calls.ring import Call
from megacore.parallel import collectives
from megacore.parallel.process_groups import Group


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, when transfers must not be polled."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class PendingCollective:
    """A collective in flight. Its tensors must not be accessed until :meth:`wait` has returned.

    Args:
        work: The torch handle; ``None`` if nothing was started.
        complete: Work to do after the transfer.
        is_ready: Without ``work``: returns, without waiting, whether ``complete`` would not block.
        staging_bytes: Memory held until the end of :meth:`wait`.
        call: Record of the call.
    """

    def __init__(
        self,
        work: Work | None = None,
        *,
        complete: Callable[[], object] | None = None,
        is_ready: Callable[[], bool] | None = None,
        staging_bytes: int = 0,
        call: Call | None = None,
    ) -> None:
        self._work = work
        self._is_ready = is_ready
        self._complete = complete
        self.staging_bytes = staging_bytes
        self._call = call

    def is_transferred(self) -> bool:
        """Poll whether :meth:`wait` would start without blocking."""
        if self._work is not None:
            return not is_capturing() and self._work.is_completed()
        return self._is_ready is None or self._is_ready()

    def wait(self) -> None:
        """Make the result valid; later calls are no-ops.

        Sync:
            With gloo, waits for the transfer. With NCCL, only the current stream waits.
        """
        call, self._call = self._call, None
        work, self._work = self._work, None
        complete, self._complete = self._complete, None
        # It may refer to the tensors, which autograd would keep until the backward pass.
        self._is_ready = None
        if call is not None:
            call.wait()
        with call or nullcontext():
            if work is not None:
                work.wait()
            if complete is not None:
                complete()
        self.staging_bytes = 0


def enqueued(kind: str, shape: Sequence[int], tensor: Tensor, group: Group) -> Call | None:
    """Record a collective that is waited for later."""
    if group.calls is None:
        return None
    state = ON_DEVICE if tensor.is_cuda else ENQUEUED
    return group.calls.begin(kind, shape, tensor.dtype, state)


@torch.no_grad()
def reduce_scatter_async(
    output: Tensor,
    input: Tensor,
    group: Group,
    *,
    op: Literal["sum", "avg"] = "sum",
    fp32_accumulation: bool = False,
) -> PendingCollective:
    """Start :func:`megacore.parallel.collectives.reduce_scatter`.

    On gloo, a thread exchanges and adds slices of more than 1 MiB, chunk by chunk. Smaller ones,
    and those with ``fp32_accumulation`` on NCCL, are exchanged in the background and added in rank
    order in ``wait()``; until then the received slices take as much memory as ``input``.

    Raises:
        ValueError: If sizes, dtypes or devices do not match.
    """
    name = "reduce_scatter_async"
    collectives._check_tensor(name, "output", output, group)
    collectives._check_tensor(name, "input", input, group)
    collectives._check_op(name, op, ("sum", "avg"), input)
    collectives._check_same_device(name, output, input)
    collectives._check_slices(name, "input", input, "output", output, group)
    handle = group.handle
    if handle is None:
        output.copy_(input.view(output.shape))
        return PendingCollective()
    call = enqueued("reduce_scatter_async", input.shape, input, group)
    if (messages := collectives._reducing_messages(group, input, output)) is not None:
        future = messages.start_reduce_scatter(output, input, average=op == "avg")
        return PendingCollective(complete=future.result, is_ready=future.done, call=call)
    exchanges = fp32_accumulation and collectives._is_low_precision(input)
    if exchanges or collectives._is_gloo(handle, input):
        terms = torch.empty(group.size, output.numel(), dtype=input.dtype, device=input.device)
        work = dist.all_to_all_single(terms.view(-1), input.view(-1), group=handle, async_op=True)
        return PendingCollective(
            work,
            complete=torch.no_grad()(
                lambda: collectives._add_in_order(output, terms, average=op == "avg")
            ),
            staging_bytes=terms.nbytes,
            call=call,
        )
    same = output.dtype == input.dtype
    reduced = output if same else torch.empty_like(output, dtype=input.dtype)
    work = collectives._native("reduce_scatter_single", "reduce_scatter_tensor")(
        reduced.view(-1),
        input.view(-1),
        op=collectives._reduce_op(op),
        group=handle,
        async_op=True,
    )
    complete = None if same else torch.no_grad()(lambda: output.copy_(reduced))
    return PendingCollective(work, complete=complete, call=call)


@torch.no_grad()
def all_gather_async(output: Tensor, input: Tensor, group: Group) -> PendingCollective:
    """Start :func:`megacore.parallel.collectives.all_gather`.

    Raises:
        ValueError: If shapes, dtypes or devices do not match.
    """
    name = "all_gather_async"
    collectives._check_tensor(name, "output", output, group)
    collectives._check_tensor(name, "input", input, group)
    collectives._check_same_device(name, output, input)
    collectives._check_slices(name, "output", output, "input", input, group)
    if output.dtype != input.dtype:
        raise ValueError(
            f"{name}: output is {output.dtype} but input {input.dtype}; they must share a dtype"
        )
    if group.handle is None:
        output.copy_(input.view(output.shape))
        return PendingCollective()
    call = enqueued("all_gather_async", input.shape, input, group)
    if (messages := collectives._messages(group, input)) is not None:
        works = messages.start_all_gather(output, input)
        return PendingCollective(
            complete=lambda: [work.wait() for work in works],
            is_ready=lambda: all(work.is_completed() for work in works),
            call=call,
        )
    work = collectives._native("all_gather_single", "all_gather_into_tensor")(
        output.view(-1), input.view(-1), group=group.handle, async_op=True
    )
    return PendingCollective(work, call=call)
