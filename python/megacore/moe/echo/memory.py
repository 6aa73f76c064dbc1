"""Spare-slot buffers in peer memory. Ranks write weights directly, without host sync.

Home ranks push weights into the spare slots of a plan, and pull the gradients of the clones from
there. Sources and destinations follow from the plan's slot table, which is read on its device
(``cpp/include/megacore/moe/clone_board.h``). There is no host sync, so the exchange can be captured
in a CUDA graph.

Shapes: R ranks, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from megacore._core import (
    CLONE_WINDOW_PARTS,
    CloneExchange,
    CloneLayout,
    CloneTable,
    HostWindow,
    peer_failure,
)
from megacore.errors import PeerLostError
from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.device_plan import DevicePlan
from megacore.ops import clone_exchange
from megacore.ops.cuda_module import runs_kernels
from megacore.parallel.host.row_all_to_all import memory_at
from megacore.parallel.host.shared_memory import HOST_DTYPES
from megacore.parallel.process_groups import Group


class CloneMemory(ABC):
    """Spare slots of a rank in memory accessible to all ranks of a group, shared by all layers.

    Ranks call all methods in the same order. Methods wait until memory may be read or written; on a
    GPU the device waits, not the host.

    Args:
        group: The ranks of the plans, by position.
        num_slots: k.
        fc1: Weights of a layer's home experts, ``(L, N, K)``; the shape is equal in all layers.
        fc2: Weights of the second projection, as for ``fc1``.
        has_grads: Whether slots have gradients; additional sets for weights have none.

    Attributes:
        group: The ranks.
        num_slots: k.
        has_grads: Whether slots have gradients.
        layout: Layout of the memory, the same on all ranks.
    """

    def __init__(
        self, group: Group, num_slots: int, fc1: Tensor, fc2: Tensor, *, has_grads: bool = True
    ) -> None:
        self.group = group
        self.num_slots = num_slots
        self.has_grads = has_grads
        self._shapes = {FC1: fc1.shape[1:], FC2: fc2.shape[1:]}
        self._dtype = fc1.dtype
        self._grad_dtype = torch.promote_types(fc1.dtype, torch.float32)
        self.layout = clone_layout(num_slots, fc1, fc2, has_grads=has_grads)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and gradients in all slots of this rank."""
        numel = sum(shape.numel() for shape in self._shapes.values())
        return self.num_slots * numel * (self._dtype.itemsize + self._grad_width)

    @property
    def _grad_width(self) -> int:
        """Bytes of one element of a gradient."""
        return self._grad_dtype.itemsize if self.has_grads else 0

    def _slots_in(self, buffer: Tensor) -> dict[tuple[int, bool], Tensor]:
        """Create views of this rank's slots, ``(k, N, K)``, by (projection, is gradient).

        Args:
            buffer: The memory as bytes, in the layout ``layout``.
        """
        slots = {}
        for projection, one in self._shapes.items():
            shape = (self.num_slots, *one)
            at = self.layout.weights_offset(self.group.size, projection)
            slots[projection, False] = _view(buffer, at, self._dtype, shape)
            if self.has_grads:
                at = self.layout.grads_offset(self.group.size, projection)
                slots[projection, True] = _view(buffer, at, self._grad_dtype, shape)
        return slots

    @abstractmethod
    def open(self) -> None:
        """Allow peers to overwrite the slots: this rank no longer needs the contents."""

    @abstractmethod
    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Write home experts, ``(L, N, K)``, to the slots of their clones in the plan."""

    @abstractmethod
    def wait_for_weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Wait for the clones, ``(k, N, K)``; contents of unused slots are undefined."""

    def join(self) -> None:  # noqa: B027
        """Make subsequent work wait for this rank's own pushes."""

    @abstractmethod
    def reserve_grads(self, projection: int) -> Tensor:
        """Reserve the gradient buffers, ``(k, N, K)``; waits until their last use was collected."""

    @abstractmethod
    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """Allow other ranks to read the gradients."""

    def check(self) -> None:  # noqa: B027
        """Raise an error if waiting for a rank timed out.

        Raises:
            PeerLostError: With the missing rank.

        Sync:
            Waits for a GPU, whose kernels cannot raise errors themselves.
        """

    @abstractmethod
    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        """Add the clones' gradients to those of home experts, ``(L, N, K)``, by (rank, slot)."""

    def _check(self, projection: int, weights: Tensor) -> None:
        if weights.shape[1:] != self._shapes[projection]:
            raise ValueError(
                f"experts of {tuple(weights.shape[1:])} do not fit slots for "
                f"{tuple(self._shapes[projection])}; layers that share slots have one size"
            )


class HostCloneMemory(CloneMemory):
    """Spare slots in shared memory of processes of one host.

    Every wait is bounded by the group's timeout and then raises a ``RuntimeError`` with the missing
    rank.

    Args:
        window: The memory; see `CloneMemory` for the other arguments.
    """

    def __init__(
        self,
        group: Group,
        num_slots: int,
        fc1: Tensor,
        fc2: Tensor,
        window: HostWindow,
        *,
        has_grads: bool = True,
    ) -> None:
        super().__init__(group, num_slots, fc1, fc2, has_grads=has_grads)
        self._native = CloneExchange(window, self.layout)
        memory = memory_at(window.data, window.bytes, window)
        self._slots = self._slots_in(torch.frombuffer(memory, dtype=torch.uint8))

    def open(self) -> None:
        """See `CloneMemory`."""
        self._native.open()

    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Wait until all ranks have opened their slots, then push. See `CloneMemory`."""
        self._check(projection, weights)
        weights = weights.contiguous()
        self._native.push(
            projection=projection, weights=weights.data_ptr(), table=self._table(plan)
        )

    def wait_for_weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Wait until all ranks have pushed. See `CloneMemory`."""
        del plan
        self._native.wait_for_weights(projection)
        return self._slots[projection, False]

    def reserve_grads(self, projection: int) -> Tensor:
        """Wait until all ranks have collected. See `CloneMemory`."""
        self._native.reserve_grads(projection)
        return self._slots[projection, True]

    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        del plan
        self._native.offer_grads(projection)

    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        """Wait until all ranks have offered, then add. See `CloneMemory`."""
        self._check(projection, total)
        assert total.is_contiguous()
        assert total.dtype == self._grad_dtype
        self._native.collect(
            projection=projection,
            dtype=HOST_DTYPES[total.dtype],
            total=total.data_ptr(),
            table=self._table(plan),
        )

    def _table(self, plan: DevicePlan) -> CloneTable:
        return CloneTable(
            slot_expert=plan.slot_expert.data_ptr(),
            num_ranks=self.group.size,
            num_slots=self.num_slots,
            num_experts=plan.num_experts,
            position=self.group.position,
        )


class DeviceCloneMemory(CloneMemory):
    """Spare slots in peer memory of GPUs; see ``cuda/include/megacore/cuda/clone_exchange.h``.

    There is no host sync. Weights are pushed on a separate stream, overlapping with the dispatch of
    tokens and the computation of home experts. A kernel waits for a rank for at most a third of the
    group's timeout; after a timeout gradients become NaN, so the optimizer skips them, and
    :meth:`check` raises.

    Args:
        beside: The set of slots that holds the gradients, if this is an additional set for weights;
            both sets share one failure word. See `CloneMemory` for the other arguments.
    """

    def __init__(
        self,
        group: Group,
        num_slots: int,
        fc1: Tensor,
        fc2: Tensor,
        *,
        beside: DeviceCloneMemory | None = None,
    ) -> None:
        super().__init__(group, num_slots, fc1, fc2, has_grads=beside is None)
        if self._grad_dtype != torch.float32:
            raise ValueError(
                f"experts are {fc1.dtype}; clones on GPUs take float32, bfloat16 and float16"
            )
        from megacore.moe.dispatchers.device_peers import kernel_timeout_s, symmetric_memory

        self._timeout_s = kernel_timeout_s(group, fc1.device)
        num_bytes = self.layout.bytes(group.size)
        self._addresses, buffer, self._owner = symmetric_memory(group, fc1.device, num_bytes)
        self._failure: Tensor = self._addresses.new_zeros(1) if beside is None else beside._failure
        self._side = torch.cuda.Stream(fc1.device)  # type: ignore[no-untyped-call]
        self._is_pushing = False
        self._slots = self._slots_in(buffer)

    def open(self) -> None:
        """See `CloneMemory`."""
        self.join()
        self._run(clone_exchange.open_slots)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        self._is_pushing = True

    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Push on a separate stream. See `CloneMemory`."""
        self._check(projection, weights)
        weights = weights.contiguous()
        with torch.cuda.stream(self._side):
            self._run(clone_exchange.push, projection, plan, weights)
        weights.record_stream(self._side)
        plan.slot_expert.record_stream(self._side)

    def wait_for_weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Wait on the device, after the home experts' computation. See `CloneMemory`."""
        self.join()
        self._run(clone_exchange.wait, projection, plan)
        return self._slots[projection, False]

    def reserve_grads(self, projection: int) -> Tensor:
        """See `CloneMemory`."""
        self._run(clone_exchange.reserve_grads, projection)
        return self._slots[projection, True]

    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        self._run(clone_exchange.offer_grads, projection, plan)

    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        self._check(projection, total)
        self._run(clone_exchange.collect, projection, plan, total)

    def check(self) -> None:
        """Raise an error if a wait of a kernel timed out. See `CloneMemory`."""
        word = int(self._failure)
        if word:
            _, member, _ = peer_failure(word)
            raise PeerLostError(
                f"group {self.group.name}: rank {self.group.ranks[member]} did not send or receive "
                f"clones of experts within {self._timeout_s:g} s"
            )

    def join(self) -> None:
        """See `CloneMemory`."""
        if self._is_pushing:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
            self._is_pushing = False

    def _run(
        self,
        step: Callable[..., None],
        projection: int = 0,
        plan: DevicePlan | None = None,
        tensor: Tensor | None = None,
    ) -> None:
        step(
            self._addresses,
            self._failure,
            None if plan is None else plan.slot_expert,
            tensor,
            projection,
            self.num_slots,
            self.group.size if plan is None else plan.num_experts,
            self.group.position,
            *(shape.numel() * self._dtype.itemsize for shape in self._shapes.values()),
            *(shape.numel() * self._grad_width for shape in self._shapes.values()),
            self._timeout_s,
        )


def _view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return buffer[offset : offset + num_bytes].view(dtype).view(shape)


def clone_layout(
    num_slots: int, fc1: Tensor, fc2: Tensor, *, has_grads: bool = True
) -> CloneLayout:
    """Compute the memory layout for clones of these experts, ``(L, N, K)``."""
    width = torch.promote_types(fc1.dtype, torch.float32).itemsize if has_grads else 0
    return CloneLayout(
        num_slots=num_slots,
        fc1_bytes=bytes_of_expert(fc1),
        fc2_bytes=bytes_of_expert(fc2),
        fc1_grad_bytes=fc1[0].numel() * width,
        fc2_grad_bytes=fc2[0].numel() * width,
    )


def make_clone_memory(
    group: Group, num_slots: int, fc1: Tensor, fc2: Tensor, *, num_sets: int = 1
) -> tuple[CloneMemory, ...]:
    """Allocate sets of slots on all ranks of a group; collective.

    Only the first set has gradients, because they are written, offered and collected without
    yielding to the other microbatch.

    Returns:
        The sets; an empty tuple on all ranks if they cannot access each other's memory.

    Raises:
        RuntimeError: On GPUs during graph capture; run the same shapes once before.
    """
    if fc1.device.type == "cpu" and group.host is not None:
        host: list[CloneMemory] = []
        for index in range(num_sets):
            layout = clone_layout(num_slots, fc1, fc2, has_grads=index == 0)
            window = group.host.make_window(layout.bytes(group.size), num_parts=CLONE_WINDOW_PARTS)
            if window is None:
                return ()
            host.append(HostCloneMemory(group, num_slots, fc1, fc2, window, has_grads=index == 0))
        return tuple(host)
    if fc1.device.type == "cuda" and runs_kernels(fc1.device):
        first = DeviceCloneMemory(group, num_slots, fc1, fc2)
        further = range(num_sets - 1)
        return first, *(
            DeviceCloneMemory(group, num_slots, fc1, fc2, beside=first) for _ in further
        )
    return ()


def bytes_of_expert(experts: Tensor) -> int:
    """Compute the size of one expert, bytes."""
    return experts[0].nbytes
