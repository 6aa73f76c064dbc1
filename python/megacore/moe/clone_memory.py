"""Clones through memory that ranks reach: nobody asks the host what goes where.

Home experts push their weights into the spare slots that a plan names, and pull the gradients of
their clones from there. Who writes what follows from the plan's slot table, which is read where it
lies (``cpp/include/megacore/moe/clone_board.h``). So the host reads nothing, and all of it can be
part of a CUDA graph.

Shapes: M rows of this rank's experts, R ranks, L home experts, k slots, N output features, K input
features.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from megacore._core import (
    CLONE_WINDOW_PARTS,
    CloneLayout,
    CloneTable,
    HostWindow,
    peer_failure,
)
from megacore._core import CloneExchange as NativeExchange
from megacore.errors import PeerLostError
from megacore.moe.clone_weights import FC1, FC2, CloneExchange
from megacore.moe.device_plan import DevicePlan
from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.ops.gemm_parts import part_input_grad_, part_product_, part_weight_grad_
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

    Attributes:
        group: The ranks.
        layout: How memory is cut, the same on all ranks.
    """

    def __init__(self, group: Group, num_slots: int, fc1: Tensor, fc2: Tensor) -> None:
        self.group = group
        self._num_slots = num_slots
        self._shapes = {FC1: fc1.shape[1:], FC2: fc2.shape[1:]}
        self._dtype = fc1.dtype
        self._grad_dtype = torch.promote_types(fc1.dtype, torch.float32)
        self.layout = clone_layout(num_slots, fc1, fc2)

    @property
    def num_bytes(self) -> int:
        """Weights and gradients in all slots of this rank."""
        numel = sum(shape.numel() for shape in self._shapes.values())
        return self._num_slots * numel * (self._dtype.itemsize + self._grad_dtype.itemsize)

    @abstractmethod
    def open(self) -> None:
        """Let the slots be written: nothing that comes later needs what is in them."""

    @abstractmethod
    def push(self, projection: int, weights: Tensor, plan: DevicePlan) -> None:
        """Write home experts, ``(L, N, K)``, to where the plan has clones of them."""

    @abstractmethod
    def weights(self, projection: int, plan: DevicePlan) -> Tensor:
        """Clones, ``(k, N, K)``, when they have come; unused slots hold anything."""

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
        window: The memory; see `make_clone_memory` for the rest.
    """

    def __init__(
        self, group: Group, num_slots: int, fc1: Tensor, fc2: Tensor, window: HostWindow
    ) -> None:
        super().__init__(group, num_slots, fc1, fc2)
        self._native = NativeExchange(window, self.layout)
        memory = (ctypes.c_uint8 * window.bytes).from_address(window.data)
        memory.window = window  # type: ignore[attr-defined]
        self._weights, self._grads = {}, {}
        for projection, shape in self._shapes.items():
            count = num_slots * shape.numel()
            self._weights[projection] = torch.frombuffer(
                memory,
                dtype=self._dtype,
                count=count,
                offset=self.layout.weights_offset(group.size, projection),
            ).view(num_slots, *shape)
            self._grads[projection] = torch.frombuffer(
                memory,
                dtype=self._grad_dtype,
                count=count,
                offset=self.layout.grads_offset(group.size, projection),
            ).view(num_slots, *shape)

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
        return self._weights[projection]

    def grads(self, projection: int) -> Tensor:
        """Waits until all ranks have collected. See `CloneMemory`."""
        self._native.reserve_grads(projection)
        return self._grads[projection]

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
    """

    def __init__(self, group: Group, num_slots: int, fc1: Tensor, fc2: Tensor) -> None:
        super().__init__(group, num_slots, fc1, fc2)
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
        self._failure = self._addresses.new_zeros(1)
        self._side = torch.cuda.Stream(fc1.device)  # type: ignore[no-untyped-call]
        self._is_pushing = False
        self._slots = {
            (projection, is_grad): _view(
                buffer,
                self.layout.grads_offset(group.size, projection)
                if is_grad
                else self.layout.weights_offset(group.size, projection),
                self._grad_dtype if is_grad else self._dtype,
                (num_slots, *shape),
            )
            for projection, shape in self._shapes.items()
            for is_grad in (False, True)
        }

    def open(self) -> None:
        """See `CloneMemory`."""
        self._join()
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
        self._join()
        self._launch("clones_wait", projection, plan)
        return self._slots[projection, False]

    def grads(self, projection: int) -> Tensor:
        """See `CloneMemory`."""
        self._join()
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

    def _join(self) -> None:
        """Let what follows wait for this rank's own pushes."""
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
            *(shape.numel() * self._grad_dtype.itemsize for shape in self._shapes.values()),
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


def clone_layout(num_slots: int, fc1: Tensor, fc2: Tensor) -> CloneLayout:
    """How the memory for clones of these experts, ``(L, N, K)``, is cut."""
    width = torch.promote_types(fc1.dtype, torch.float32).itemsize
    return CloneLayout(
        num_slots=num_slots,
        fc1_bytes=_bytes_of_one(fc1),
        fc2_bytes=_bytes_of_one(fc2),
        fc1_grad_bytes=fc1[0].numel() * width,
        fc2_grad_bytes=fc2[0].numel() * width,
    )


def make_clone_memory(group: Group, num_slots: int, fc1: Tensor, fc2: Tensor) -> CloneMemory | None:
    """Make the memory on all ranks of a group; collective.

    Returns:
        ``None``, on all ranks, where they do not reach each other's memory.

    Raises:
        RuntimeError: On GPUs, while a graph is captured: run the same once before.
    """
    if fc1.device.type == "cpu" and group.host is not None:
        layout = clone_layout(num_slots, fc1, fc2)
        window = group.host.make_window(layout.bytes(group.size), num_parts=CLONE_WINDOW_PARTS)
        return None if window is None else HostCloneMemory(group, num_slots, fc1, fc2, window)
    if fc1.device.type == "cuda" and has_cuda_kernels():
        return DeviceCloneMemory(group, num_slots, fc1, fc2)
    return None


class MemoryClones(CloneExchange):
    """Clones of one layer in one forward pass and its backward pass.

    Args:
        memory: The spare slots.
        plan: Which clones there are, on the device.
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
        on_sent: Gets the bytes that this rank sends, an int64 scalar on the device.
    """

    def __init__(
        self,
        memory: CloneMemory,
        plan: DevicePlan,
        *,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        on_sent: Callable[[Tensor], None],
    ) -> None:
        super().__init__(fc1=fc1, fc2=fc2)
        self._memory, self._plan = memory, plan
        self._on_sent = on_sent

    def bring(self, order: tuple[int, ...]) -> None:
        """Slots are filled anew each time, so it does not matter who used them. See base."""
        self._memory.open()
        weights = self.home_weights()
        for projection in order:
            self._memory.push(projection, weights[projection], self._plan)
        first = self._memory.group.position * weights[FC1].shape[0]
        held = self._plan.slot_expert
        is_mine = (held >= first) & (held < first + weights[FC1].shape[0])
        self._on_sent(is_mine.sum() * sum(_bytes_of_one(each) for each in weights.values()))

    def multiply(
        self, projection: int, rows: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """See `CloneExchange`."""
        clones = self._memory.weights(projection, self._plan)
        part_product_(rows, clones, m_splits[num_local:], m_splits[:num_local].sum(), out)

    def multiply_back(
        self, projection: int, grad: Tensor, m_splits: Tensor, num_local: int, out: Tensor
    ) -> None:
        """See `CloneExchange`."""
        clones = self._memory.weights(projection, self._plan)
        part_input_grad_(grad, clones, m_splits[num_local:], m_splits[:num_local].sum(), out)

    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """See `CloneExchange`."""
        grads = self._memory.grads(projection)
        num_local = like.shape[0]
        part_weight_grad_(grad, rows, m_splits[num_local:], m_splits[:num_local].sum(), grads)
        self._memory.offer_grads(projection, self._plan)
        held = self._plan.slot_expert[self._memory.group.position]
        self._on_sent((held >= 0).sum() * _bytes_of_one(grads))

    def finish_weight_grads(self, projection: int, total: Tensor) -> None:
        """Pull: others may not overwrite what has not been read. See `CloneExchange`."""
        self._memory.collect(projection, total, self._plan)


def _bytes_of_one(experts: Tensor) -> int:
    return experts[0].numel() * experts.element_size()
