"""Memory of spare slots that ranks reach: nobody asks the host what goes where.

Home experts push their weights into the spare slots that a plan names, and pull the gradients of
their clones from there. Who writes what follows from the plan's slot table, which is read where it
lies (``cpp/include/megacore/moe/clone_board.h``). So the host reads nothing, and all of it can be
part of a CUDA graph.

Shapes: R ranks, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor

from megacore._core import (
    CLONE_WINDOW_PARTS,
    CloneLayout,
    CloneTable,
    HostWindow,
    peer_failure,
)
from megacore._core import CloneExchange as NativeExchange
from megacore.errors import PeerLostError
from megacore.moe.echo.device_plan import DevicePlan
from megacore.moe.echo.exchange import FC1, FC2
from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.parallel.host_memory import HOST_DTYPES
from megacore.parallel.process_groups import Group


class CloneMemory(ABC):
    """The spare slots of a rank, which all ranks of a group reach. All layers share it.

    Ranks call all methods in the same order. Whatever must not be written or read yet is waited
    for; on a GPU it is the device that waits.

    Args:
        group: The ranks of the plans, by position.
        num_slots: k.
        fc1: Weights of a layer's home experts, ``(L, N, K)``; those of all layers have this shape.
        fc2: Likewise.
        has_grads: Whether slots have gradients; a further set of slots for weights has none.

    Attributes:
        group: The ranks.
        layout: How memory is cut, the same on all ranks.
    """

    def __init__(
        self, group: Group, num_slots: int, fc1: Tensor, fc2: Tensor, *, has_grads: bool = True
    ) -> None:
        self.group = group
        self._num_slots = num_slots
        self._has_grads = has_grads
        self._shapes = {FC1: fc1.shape[1:], FC2: fc2.shape[1:]}
        self._dtype = fc1.dtype
        self._grad_dtype = torch.promote_types(fc1.dtype, torch.float32)
        self.layout = clone_layout(num_slots, fc1, fc2, has_grads=has_grads)

    @property
    def num_bytes(self) -> int:
        """Weights and gradients in all slots of this rank."""
        numel = sum(shape.numel() for shape in self._shapes.values())
        return self._num_slots * numel * (self._dtype.itemsize + self._grad_width)

    @property
    def _grad_width(self) -> int:
        """Bytes of one element of a gradient."""
        return self._grad_dtype.itemsize if self._has_grads else 0

    def _slots_in(self, buffer: Tensor) -> dict[tuple[int, bool], Tensor]:
        """All slots of this rank, ``(k, N, K)``, by projection and whether they hold gradients.

        Args:
            buffer: The memory as bytes, cut as ``layout`` says.
        """
        slots = {}
        for projection, one in self._shapes.items():
            shape = (self._num_slots, *one)
            at = self.layout.weights_offset(self.group.size, projection)
            slots[projection, False] = _view(buffer, at, self._dtype, shape)
            if self._has_grads:
                at = self.layout.grads_offset(self.group.size, projection)
                slots[projection, True] = _view(buffer, at, self._grad_dtype, shape)
        return slots

    @abstractmethod
    def open(self) -> None:
        """Let the slots be written: nothing that comes later needs what is in them."""

    @abstractmethod
    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Write home experts, ``(L, N, K)``, to where the plan has clones of them."""

    @abstractmethod
    def weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Clones, ``(k, N, K)``, when they have come; unused slots hold anything."""

    def join(self) -> None:  # noqa: B027
        """Let what follows wait for this rank's own pushes."""

    @abstractmethod
    def grads(self, projection: int) -> Tensor:
        """Memory for their gradients, when nobody needs those before any more, ``(k, N, K)``."""

    @abstractmethod
    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """Let others read the gradients."""

    def check(self) -> None:  # noqa: B027
        """Raise if a rank did not come.

        Raises:
            PeerLostError: Naming it.

        Sync:
            Waits for the device, if it is one that cannot raise errors by itself.
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
    """Processes of one host, through memory that they share.

    Every wait is bounded by the group's timeout and ends in a ``RuntimeError`` that names who did
    not come.

    Args:
        window: The memory; see `CloneMemory` for the rest.
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
        self._native = NativeExchange(window, self.layout)
        memory = (ctypes.c_uint8 * window.bytes).from_address(window.data)
        memory.window = window  # type: ignore[attr-defined]
        self._slots = self._slots_in(torch.frombuffer(memory, dtype=torch.uint8))

    def open(self) -> None:
        """See `CloneMemory`."""
        self._native.open()

    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Waits until all ranks have opened their slots. See `CloneMemory`."""
        self._check(projection, weights)
        weights = weights.contiguous()
        self._native.push(
            projection=projection, weights=weights.data_ptr(), table=self._table(plan)
        )

    def weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Waits until all ranks have pushed. See `CloneMemory`."""
        del plan
        self._native.wait_for_weights(projection)
        return self._slots[projection, False]

    def grads(self, projection: int) -> Tensor:
        """Waits until all ranks have collected. See `CloneMemory`."""
        self._native.reserve_grads(projection)
        return self._slots[projection, True]

    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        del plan
        self._native.offer_grads(projection)

    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        """Waits until all ranks have offered. See `CloneMemory`."""
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
            num_slots=self._num_slots,
            num_experts=plan.num_experts,
            position=self.group.position,
        )


class DeviceCloneMemory(CloneMemory):
    """GPUs that reach each other's memory; see ``cuda/include/megacore/cuda/clone_exchange.h``.

    The host waits for nothing. Weights are pushed on a stream of their own, while tokens travel and
    home experts are computed. A kernel waits for a rank for at most the group's timeout; then
    gradients become NaN, which keeps the optimizer from using them, and :meth:`check` raises.

    Args:
        beside: The set of slots with the gradients, if this is a further one without: where one has
            failed the other one has as well. See `CloneMemory` for the rest.
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
        from megacore.moe.dispatchers.symmetric_peers import symmetric_memory

        assert group.handle is not None
        options = group.handle._get_backend(fc1.device).options
        self._timeout_s: float = options._timeout.total_seconds()
        num_bytes = self.layout.bytes(group.size)
        self._addresses, owner = symmetric_memory(group, fc1.device, num_bytes)
        self._owner = owner
        buffer = cast(tuple[Tensor, object], owner)[0]
        self._failure: Tensor = self._addresses.new_zeros(1) if beside is None else beside._failure
        self._side = torch.cuda.Stream(fc1.device)  # type: ignore[no-untyped-call]
        self._is_pushing = False
        self._slots = self._slots_in(buffer)

    def open(self) -> None:
        """See `CloneMemory`."""
        self.join()
        self._launch("clones_open")
        self._side.wait_stream(torch.cuda.current_stream())
        self._is_pushing = True

    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """On a stream of its own. See `CloneMemory`."""
        self._check(projection, weights)
        weights = weights.contiguous()
        with torch.cuda.stream(self._side):
            self._launch("clones_push", projection, plan, weights)
        weights.record_stream(self._side)
        plan.slot_expert.record_stream(self._side)

    def weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Home experts have been computed when the device waits. See `CloneMemory`."""
        self.join()
        self._launch("clones_wait", projection, plan)
        return self._slots[projection, False]

    def grads(self, projection: int) -> Tensor:
        """See `CloneMemory`."""
        self._launch("clones_reserve_grads", projection)
        return self._slots[projection, True]

    def offer_grads(self, projection: int, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        self._launch("clones_offer_grads", projection, plan)

    def collect(self, projection: int, total: Tensor, plan: DevicePlan) -> None:
        """See `CloneMemory`."""
        self._check(projection, total)
        assert total.is_contiguous()
        assert total.dtype == torch.float32
        self._launch("clones_collect", projection, plan, total)

    def check(self) -> None:
        """Raise if a kernel gave up waiting. See `CloneMemory`."""
        word = int(self._failure)
        if word:
            _, member, _ = peer_failure(word)
            raise PeerLostError(
                f"group {self.group.name}: rank {self.group.ranks[member]} did not bring or take "
                f"clones of experts within {self._timeout_s:g} s"
            )

    def join(self) -> None:
        """See `CloneMemory`."""
        if self._is_pushing:
            torch.cuda.current_stream().wait_stream(self._side)
            self._is_pushing = False

    def _launch(
        self,
        name: str,
        projection: int = 0,
        plan: DevicePlan | None = None,
        tensor: Tensor | None = None,
    ) -> None:
        sizes = [
            self.group.size,
            self._num_slots,
            self.group.size if plan is None else plan.num_experts,
            self.group.position,
            *(shape.numel() * self._dtype.itemsize for shape in self._shapes.values()),
            *(shape.numel() * self._grad_width for shape in self._shapes.values()),
        ]
        getattr(cuda_kernels(), name)(
            memory=self._addresses.data_ptr(),
            failure=self._failure.data_ptr(),
            sizes=sizes,
            slot_expert=0 if plan is None else plan.slot_expert.data_ptr(),
            timeout_s=self._timeout_s,
            projection=projection,
            tensor=0 if tensor is None else tensor.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )


def _view(buffer: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return buffer[offset : offset + num_bytes].view(dtype).view(shape)


def clone_layout(
    num_slots: int, fc1: Tensor, fc2: Tensor, *, has_grads: bool = True
) -> CloneLayout:
    """How the memory for clones of these experts, ``(L, N, K)``, is cut."""
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
    """Make sets of slots on all ranks of a group; collective.

    Only the first set has gradients: they are written, offered and collected in one turn.

    Returns:
        Nothing, on all ranks, where they do not reach each other's memory.

    Raises:
        RuntimeError: On GPUs, while a graph is captured: run the same once before.
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
    if fc1.device.type == "cuda" and has_cuda_kernels():
        first = DeviceCloneMemory(group, num_slots, fc1, fc2)
        further = range(num_sets - 1)
        return first, *(
            DeviceCloneMemory(group, num_slots, fc1, fc2, beside=first) for _ in further
        )
    return ()


def bytes_of_expert(experts: Tensor) -> int:
    """Size of one of them."""
    return experts[0].numel() * experts.element_size()
