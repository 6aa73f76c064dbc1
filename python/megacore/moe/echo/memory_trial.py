"""Trial of the memory for clones: weights of a pattern to a peer, and gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import PeerLostError
from megacore.moe.dispatchers.peer_trial import agreed_fault
from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.device_plan import NUM_SUMMARY, DevicePlan
from megacore.moe.echo.memory import CloneMemory


def clone_fault(memory: CloneMemory, fc1: Tensor, fc2: Tensor) -> str:
    """Exchange clones of a pattern with all ranks; return what is wrong on any, or ``""``.

    Each rank holds a clone of the expert of the next one. Collective.

    Args:
        memory: The memory.
        fc1: Weights of a layer's home experts, ``(L, N, K)``, for their shape.
        fc2: Weights of the second projection.

    Sync:
        Waits for the device and for all ranks.
    """
    try:
        problem = _problem(memory, {FC1: fc1[:1], FC2: fc2[:1]})
    except (PeerLostError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
    return agreed_fault(problem, "a fault of an exchange of clones", memory.group, fc1.device)


def _problem(memory: CloneMemory, like: dict[int, Tensor]) -> str:
    group, size = memory.group, memory.group.size
    plan = _plan(memory, like[FC1].device)
    found = []
    memory.open()
    for projection, one in like.items():
        memory.push(projection, torch.full_like(one, _value(group.position, projection)), plan)
    for projection in like:
        clone = memory.wait_for_weights(projection, plan)[0]
        found.append((clone == _value((group.position + 1) % size, projection)).all())
    memory.join()
    for projection, one in like.items() if memory.has_grads else ():
        memory.reserve_grads(projection)[0].fill_(_value(group.position, projection) / 2)
        memory.offer_grads(projection, plan)
        total = torch.ones_like(one, dtype=torch.promote_types(one.dtype, torch.float32))
        memory.collect(projection, total, plan)
        found.append((total == 1 + _value((group.position - 1) % size, projection) / 2).all())
    memory.check()
    is_good = host_values.read(torch.stack(found).all(), "reachable memory of peers")
    return "" if is_good else "wrong clones or gradients"


def _value(position: int, projection: int) -> float:
    """Return the value of a rank's weights, exact in 16 bits."""
    return float(2 * position % 128 + projection + 1)


def _plan(memory: CloneMemory, device: torch.device) -> DevicePlan:
    size, slots = memory.group.size, memory.num_slots
    slot_expert = torch.full((size, slots), -1, dtype=torch.int64, device=device)
    slot_expert[:, 0] = torch.arange(1, size + 1, device=device) % size
    load = torch.zeros(size, dtype=torch.int64, device=device)
    return DevicePlan(
        "balanced",
        num_experts=size,
        slot_expert=slot_expert,
        sent=torch.zeros_like(slot_expert),
        arriving=slot_expert.new_zeros(size, 1 + slots),
        load_before=load,
        load_after=load,
        summary=slot_expert.new_zeros(NUM_SUMMARY),
        elapsed_ns=slot_expert.new_zeros(1),
    )
