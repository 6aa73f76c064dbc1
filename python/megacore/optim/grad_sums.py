"""Sums of gradients before the average over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


def needs_sum(info: ParamInfo, groups: ProcessGroups) -> bool:
    """Return whether a parameter's gradient takes part in one of the sums of this module."""
    return info.shared is not None or (info.sequence_parallel and groups.tp.size > 1)


@torch.no_grad()
def sum_shared_grads(buffers: Sequence[ParamGradBuffer], groups: ProcessGroups) -> None:
    """Sum the gradients of each tied parameter over its holders.

    Holders are on the first and the last pipeline stage (``groups.embedding``), or on the same rank
    if it has several model chunks.

    Sync:
        Collective over ``groups.embedding``, one call per set of tied parameters.
    """
    by_name: dict[str, list[Tensor]] = {}
    for info, grad in _grads(buffers):
        if info.shared is not None:
            by_name.setdefault(info.shared, []).append(grad)
    for _, grads in sorted(by_name.items()):
        total = grads[0]
        for other in grads[1:]:
            total.add_(other)
        all_reduce_(total, groups.embedding)
        for other in grads[1:]:
            other.copy_(total)


@torch.no_grad()
def sum_sequence_parallel_grads(buffers: Sequence[ParamGradBuffer], groups: ProcessGroups) -> None:
    """Sum gradients of sequence-parallel replicas over tp: each rank had part of the sequence.

    Sync:
        Collective over ``groups.tp``, one call per gradient dtype and device, since such
        parameters are many and small.
    """
    if groups.tp.size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for info, grad in _grads(buffers):
        if info.sequence_parallel:
            by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for grads in by_kind.values():
        sizes = [grad.numel() for grad in grads]
        flat = torch.cat([grad.flatten() for grad in grads])
        all_reduce_(flat, groups.tp)
        for grad, part in zip(grads, torch.split(flat, sizes), strict=True):
            grad.copy_(part.view_as(grad))


def _grads(buffers: Sequence[ParamGradBuffer]) -> list[tuple[ParamInfo, Tensor]]:
    return [
        (info, buffer.main_grad(index))
        for buffer in buffers
        for index, (info, _) in enumerate(buffer.params)
    ]
