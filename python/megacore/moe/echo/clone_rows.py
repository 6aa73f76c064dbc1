"""Small weights of experts, as one row each, with the rows of clones behind those of home experts.

Unlike the weights of projections, rows are copied out of the spare slots, so the backward pass
needs no second transfer of them. Their gradients go home and are added there in the order of
(rank, slot), as those of projections.

Shapes: L home experts, S slots, n numbers of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.moe.echo.clones import FC1, set_of_turn
from megacore.moe.echo.device_plan import DevicePlan
from megacore.moe.echo.memory import CloneMemory
from megacore.moe.echo.slots import CloneRoutes, SlotBuffers, exchange_rows
from megacore.parallel.process_groups import Group


def append_rows(
    rows_Ln: Tensor, *, slots: SlotBuffers, plan: DevicePlan, ep: Group, tries_memory: bool
) -> Tensor:
    """Append the rows of the experts in this rank's slots: ``(L, n)`` to ``(L + S, n)``.

    Rows of unused slots may have any values. Gradients of rows of clones are added to those of
    their home experts.

    Args:
        rows_Ln: Rows of the home experts.
        slots: Spare slots for rows.
        plan: The clones.
        ep: The ranks of the plan.
        tries_memory: As in `Echo`.

    Sync:
        As ``Echo.clones``.
    """
    transport: _Messages | _Memory | None = None
    if tries_memory:
        whole = rows_Ln.detach()[:, None]
        # Rows have one projection; the second one is never sent.
        sets = slots.memory(ep, whole, whole[..., :1])
        transport = _Memory(sets, plan) if sets else None
    if transport is None:
        routes = CloneRoutes.of(plan.read_slots(), rows_Ln.shape[0], ep)
        transport = _Messages(routes, slots.num_slots)
    result: Tensor = _Append.apply(rows_Ln, transport)  # type: ignore[no-untyped-call]
    return result


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: _Messages | _Memory) -> Tensor:
        ctx.transport, ctx.num_home = transport, len(rows)
        return torch.cat((rows, transport.send(rows)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        home = grad[: ctx.num_home].clone()
        ctx.transport.send_home(grad[ctx.num_home :], home)
        return home, None


class _Messages:
    """Transport by point-to-point messages."""

    def __init__(self, routes: CloneRoutes, num_slots: int) -> None:
        self._routes, self._num_slots = routes, num_slots

    def send(self, rows: Tensor) -> Tensor:
        """Send rows to their clones, and return those of this rank's slots, ``(S, n)``."""
        routes = self._routes
        received = rows.new_zeros(self._num_slots, rows.shape[1])
        exchange_rows(
            [(rank, rows[expert]) for rank, expert in routes.outgoing],
            [(rank, received[slot]) for slot, rank in routes.incoming],
            routes.group,
        )
        return received

    def send_home(self, grads: Tensor, total: Tensor) -> None:
        """Send gradients of clones home, and add those of remote clones to ``total``."""
        routes = self._routes
        staging = total.new_empty(len(routes.outgoing), total.shape[1])
        exchange_rows(
            [(rank, grads[slot].contiguous()) for slot, rank in routes.incoming],
            [(rank, staging[index]) for index, (rank, _) in enumerate(routes.outgoing)],
            routes.group,
        )
        for value, (_, expert) in zip(staging, routes.outgoing, strict=True):
            total[expert].add_(value)


class _Memory:
    """Transport by memory that all ranks can access."""

    def __init__(self, sets: tuple[CloneMemory, ...], plan: DevicePlan) -> None:
        self._sets, self._plan = sets, plan

    def send(self, rows: Tensor) -> Tensor:
        """As `_Messages.send`."""
        memory = set_of_turn(self._sets)
        memory.open()
        memory.push(FC1, rows.detach()[:, None], self._plan)
        return memory.wait_for_weights(FC1, self._plan)[:, 0]

    def send_home(self, grads: Tensor, total: Tensor) -> None:
        """As `_Messages.send_home`."""
        memory = self._sets[0]
        memory.join()
        memory.reserve_grads(FC1).copy_(grads[:, None])
        memory.offer_grads(FC1, self._plan)
        memory.collect(FC1, total[:, None], self._plan)
