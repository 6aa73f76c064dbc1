"""Clones of a layer by peer memory and by messages.

Shapes: M rows of this rank's experts, L home experts, k slots, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore import host_values
from megacore.moe.echo.clones import FC1, FC2, LayerClones, set_of_turn
from megacore.moe.echo.device_plan import DevicePlan
from megacore.moe.echo.memory import CloneMemory, bytes_of_expert
from megacore.moe.echo.slots import CloneRoutes, SlotBuffers
from megacore.ops.grouped_product import grouped_product
from megacore.ops.kernel_choice import Product


class MemoryClones(LayerClones):
    """Clones of one layer in one forward pass and its backward pass, in peer memory.

    Args:
        sets: The spare slots: one set per interleaved microbatch; gradients are in the first set.
        plan: The clones, on the device.
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
        on_sent: Callback for what this rank sends: slots of clones, the first expert and the end of
            a range of experts, and the bytes of each slot that holds one of them.
    """

    def __init__(
        self,
        sets: tuple[CloneMemory, ...],
        plan: DevicePlan,
        *,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        on_sent: Callable[[Tensor, int, int, int], None],
    ) -> None:
        super().__init__(fc1=fc1, fc2=fc2)
        self._sets, self._plan = sets, plan
        self._filled = sets[0]  # the set that has the clones, from `send_weights` on
        self._on_sent = on_sent
        self._first: Tensor | None = None

    def send_weights(self, order: tuple[int, ...] = (FC1, FC2)) -> None:
        """Fill the slots unconditionally, regardless of their last user. See `LayerClones`."""
        self._filled = set_of_turn(self._sets)
        self._filled.open()
        weights = self.home_weights()
        for projection in order:
            self._filled.push(projection, weights[projection], self._plan)
        first = self._sets[0].group.position * weights[FC1].shape[0]
        end = first + weights[FC1].shape[0]
        num_bytes = sum(bytes_of_expert(each) for each in weights.values())
        self._on_sent(self._plan.slot_expert, first, end, num_bytes)

    def multiply(
        self,
        projection: int,
        rows: Tensor,
        m_splits: Tensor,
        num_local: int,
        out: Tensor,
        *,
        is_backward: bool,
    ) -> None:
        """See `LayerClones`."""
        clones = self._filled.wait_for_weights(projection, self._plan)
        first, splits = self._split(m_splits, num_local)
        operands = rows, clones, splits
        hints: dict[str, Any] = {"first_row": first, "expected_rows": self.expected_rows}
        grouped_product("input_grad" if is_backward else "forward", *operands, out=out, **hints)

    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """See `LayerClones`."""
        self._filled.join()
        grads = self._sets[0].reserve_grads(projection)
        num_local = like.shape[0]
        first, splits = self._split(m_splits, num_local)
        hints: dict[str, Any] = {"first_row": first, "expected_rows": self.expected_rows}
        grouped_product("weight_grad", grad, rows, splits, out=grads, **hints)
        self._sets[0].offer_grads(projection, self._plan)
        held = self._plan.slot_expert[self._sets[0].group.position]
        self._on_sent(held, 0, self._plan.num_experts, bytes_of_expert(grads))

    def _split(self, m_splits: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Return the first row of clones, and the rows of each; the same for all products."""
        if self._first is None:
            self._first = m_splits[:num_local].sum()
        return self._first, m_splits[num_local:]

    def finish_weight_grads(self, projection: int, total: Tensor) -> None:
        """Pull now, because peers cannot reuse their buffers before. See `LayerClones`."""
        self._sets[0].collect(projection, total, self._plan)


class MessageClones(LayerClones):
    """Clones of one layer in one forward pass and its backward pass, sent as messages.

    Args:
        slots: The rank's spare slots.
        routes: The clones of this rank.
        owner: Identity of the forward pass; the same object when it is recomputed.
        fc1: Weights of the home experts, ``(L, ..., K)``.
        fc2: Weights of the home experts, ``(L, ..., K)``.
        on_sent: Callback with the bytes of each send of this rank.
    """

    def __init__(
        self,
        slots: SlotBuffers,
        routes: CloneRoutes,
        *,
        owner: object,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        on_sent: Callable[[int], object],
    ) -> None:
        super().__init__(fc1=fc1, fc2=fc2)
        self._slots = slots
        self._filled = slots.sets[0]  # the set that has the clones, from `send_weights` on
        self._owner, self._routes = owner, routes
        self._on_sent = on_sent
        self._coming_home: dict[int, tuple[Tensor, list[dist.Work]]] = {}

    def send_weights(self, order: tuple[int, ...] = (FC1, FC2)) -> None:
        """Start sending weights, unless the slots still hold them. See `LayerClones`."""
        self._filled = set_of_turn(self._slots.sets)
        self._on_sent(self._filled.fill(self._owner, self._routes, self.home_weights(), order))

    def multiply(
        self,
        projection: int,
        rows: Tensor,
        m_splits: Tensor,
        num_local: int,
        out: Tensor,
        *,
        is_backward: bool,
    ) -> None:
        """Wait for the clones in use, even without rows for them. See `LayerClones`."""
        if not self._routes.num_used:
            return
        num_home, splits = self._clone_rows(m_splits, num_local, len(rows))
        clones = self._filled.weights(projection, self._routes.num_used)
        operands = rows[num_home:], clones, splits
        product: Product = "input_grad" if is_backward else "forward"
        out[num_home:] = grouped_product(product, *operands, expected_rows=self.expected_rows)

    def start_weight_grads(
        self, projection: int, grad: Tensor, rows: Tensor, m_splits: Tensor, like: Tensor
    ) -> None:
        """Compute the gradients of this rank's clones and send them. See `LayerClones`."""
        routes = self._routes
        if routes.num_used:
            num_home, splits = self._clone_rows(m_splits, like.shape[0], len(rows))
            grads = self._slots.grads(projection, like, routes.num_used)
            operands = grad[num_home:], rows[num_home:], splits
            hint = self.expected_rows
            grouped_product("weight_grad", *operands, out=grads, expected_rows=hint)
        dtype = torch.promote_types(like.dtype, torch.float32)
        staging = like.new_empty(len(routes.outgoing), *like.shape[1:], dtype=dtype)
        arriving, num_bytes = self._slots.exchange_grads(projection, routes, staging)
        self._coming_home[projection] = staging, arriving
        self._on_sent(num_bytes)

    def add_to_home(self, projection: int, total: Tensor) -> None:
        """Wait for the remote gradients and add them. See `LayerClones`."""
        if projection not in self._coming_home:
            return
        staging, works = self._coming_home.pop(projection)
        for work in works:
            work.wait()
        for value, (_, expert) in zip(staging, self._routes.outgoing, strict=True):
            total[expert].add_(value)

    def _clone_rows(self, m_splits: Tensor, num_local: int, num_rows: int) -> tuple[int, Tensor]:
        """Compute the rows of all home experts, and the rows of each slot in use."""
        clones = m_splits[num_local : num_local + self._routes.num_used]
        num_home = host_values.read(
            m_splits[:num_local].sum(),
            "rows of home experts",
            assumed=lambda: num_rows * num_local // (num_local + self._routes.num_used),
        )
        return num_home, clones
