"""Capture plans of schedules: the graphs, their static buffers, and the bytes of these buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megacore import _core
from megacore._core import BufferRole, BufferUse, Capture, CapturePlan, StepKind

__all__ = [
    "BufferRole",
    "BufferUse",
    "Capture",
    "CapturePlan",
    "StepKind",
    "plan_capture",
    "static_bytes",
]


def plan_capture(
    order: Sequence[float],
    *,
    num_layers_per_chunk: int | Sequence[int] = 1,
    input_signature: Sequence[int] | None = None,
    output_signature: Sequence[int] | None = None,
    reuse: Literal["none", "buffers", "graphs"] = "graphs",
) -> CapturePlan:
    """Plan the capture of one rank's layers for one step of a schedule.

    Every captured layer has a graph for its forward pass, one for its backward pass and, where the
    schedule splits backward passes, one for the weight half. A buffer passes to another microbatch
    only after the last pass that reads it. A weight half reads the same tensors as its backward
    pass, so a delayed weight half keeps its buffers allocated.

    Args:
        order: The rank's order list, as ``Schedule.order`` gives it: ``+c`` forward, ``-c``
            backward, ``-c - 0.5`` weight half of chunk c, from 1. The n-th entry of a kind and
            chunk is microbatch n; weight halves may lag behind.
        num_layers_per_chunk: Captured layers of each chunk, or one number for all.
        input_signature: One number per layer over all chunks: layers with equal numbers have inputs
            of one shape, dtype, layout and ``requires_grad``, and may share buffers. Default: all
            equal.
        output_signature: The same for outputs.
        reuse: ``"none"``: graphs and buffers of their own for every microbatch. ``"buffers"``:
            graphs of their own, buffers shared; their number does not grow with microbatches.
            ``"graphs"``: microbatches share graphs too, as many sets per chunk as it has live
            microbatches at its peak.

    Returns:
        ``captures`` in capture order; ``replays(position)``, the indices of captures for each entry
        of the order list; ``uses``, the lifetime of every tensor; ``slots_per_chunk`` and
        ``peak_per_chunk``; ``buffer_signatures(role)``, one per buffer.

    Raises:
        ValueError: If the order list is not a legal step (the message marks the position), or if
            layers, signatures and order do not match.

    Source:
        The order list is Megatron-LM's; the roles of static buffers are those of Transformer
        Engine's graph capture.

    Example:
        >>> plan = plan_capture([1, 1, -1, 1, -1, 1, -1, -1], num_layers_per_chunk=2)
        >>> plan.num_microbatches, plan.peak_per_chunk, len(plan.captures)
        (4, [2], 8)
        >>> plan.buffer_signatures(BufferRole.INPUT)
        [0, 0, 0, 0]
        >>> len(plan_capture([1, 1, -1, 1, -1, 1, -1, -1], reuse="none").captures)
        8
    """
    num_chunks = max((int(abs(entry)) for entry in order if abs(entry) < 2**31), default=0)
    layers = (
        [num_layers_per_chunk] * num_chunks
        if isinstance(num_layers_per_chunk, int)
        else list(num_layers_per_chunk)
    )
    same = [0] * sum(layers)
    return _core.plan_capture(
        order,
        layers_per_chunk=layers,
        input_signature=same if input_signature is None else input_signature,
        output_signature=same if output_signature is None else output_signature,
        reuse=reuse,
    )


def static_bytes(
    plan: CapturePlan,
    *,
    input_bytes: Sequence[int],
    output_bytes: Sequence[int],
    kept_bytes: Sequence[int] = (),
) -> dict[BufferRole, int]:
    """Return the bytes of the static buffers of a plan, by role.

    Args:
        plan: The plan.
        input_bytes: Bytes of an input (and of its gradient) of each signature number.
        output_bytes: The same for outputs.
        kept_bytes: Bytes that the backward pass of each layer keeps for its weight half, for plans
            with weight halves.

    Returns:
        Bytes by role, without the tensors a graph keeps between its forward and backward pass.

    Raises:
        ValueError: If a signature of the plan has no entry.

    Example:
        >>> plan = plan_capture([1, 1, -1, -1])
        >>> static_bytes(plan, input_bytes=[100], output_bytes=[10])[BufferRole.INPUT]
        200
    """
    found = {}
    for role in BufferRole:
        is_input = role in (BufferRole.INPUT, BufferRole.INPUT_GRAD)
        sizes = input_bytes if is_input else output_bytes
        if role == BufferRole.KEPT:
            sizes = kept_bytes
        signatures = plan.buffer_signatures(role)
        unknown = [number for number in signatures if not 0 <= number < len(sizes)]
        if unknown:
            raise ValueError(
                f"signature {unknown[0]} of {role.name.lower()} buffers has no size; "
                f"{len(sizes)} were given, for 0..{len(sizes) - 1}"
            )
        found[role] = sum(sizes[number] for number in signatures)
    return found
