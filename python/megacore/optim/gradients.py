"""Sums of gradients before the average over data-parallel ranks, and the norm of the average."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer, ShardPiece
from megacore.ops.optim import sum_of_squares
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import Group, ProcessGroups


def needs_sum(info: ParamInfo, groups: ProcessGroups) -> bool:
    """Return whether a parameter's gradient takes part in one of the sums of this module."""
    return info.shared is not None or (info.sequence_parallel and _tp_of(info, groups).size > 1)


@torch.no_grad()
def sum_shared_grads(buffers: Sequence[ParamGradBuffer], groups: ProcessGroups) -> None:
    """Sum the gradients of each tied parameter over its holders.

    Holders are on the first and the last pipeline stage (``groups.embedding``), or on the same rank
    if it has several model chunks.

    Sync:
        Collective over ``groups.embedding``, one call per set of tied parameters.
    """
    by_name: dict[str, list[Tensor]] = {}
    for info, grad in _grads(buffers, lambda info: info.shared is not None):
        assert info.shared is not None
        by_name.setdefault(info.shared, []).append(grad)
    for _, grads in sorted(by_name.items()):
        total = grads[0]
        for other in grads[1:]:
            total.add_(other)
        all_reduce_(total, groups.embedding)
        for other in grads[1:]:
            other.copy_(total)


@torch.no_grad()
def sum_partial_grads(buffers: Sequence[ParamGradBuffer], groups: ProcessGroups) -> None:
    """Sum gradients that are partial over tp (``ParamInfo.sequence_parallel``), or etp of experts.

    Sync:
        Collective over ``groups.tp`` and ``groups.etp``, one call per gradient dtype and device,
        since such parameters are many and small.
    """
    by_kind: dict[tuple[bool, torch.dtype, torch.device], list[Tensor]] = {}
    for info, grad in _grads(buffers, lambda info: info.sequence_parallel):
        if _tp_of(info, groups).size > 1:
            by_kind.setdefault((info.expert, grad.dtype, grad.device), []).append(grad)
    for (expert, _, _), grads in by_kind.items():
        sizes = [grad.numel() for grad in grads]
        flat = torch.cat([grad.flatten() for grad in grads])
        all_reduce_(flat, groups.etp if expert else groups.tp)
        for grad, part in zip(grads, torch.split(flat, sizes), strict=True):
            grad.copy_(part.view_as(grad))


def _grads(
    buffers: Sequence[ParamGradBuffer], is_summed: Callable[[ParamInfo], bool]
) -> list[tuple[ParamInfo, Tensor]]:
    return [
        (info, buffer.main_grad(index))
        for buffer in buffers
        for index, (info, _) in enumerate(buffer.params)
        if is_summed(info)
    ]


def _tp_of(info: ParamInfo, groups: ProcessGroups) -> Group:
    """Return the ranks that split a parameter by tensor parallelism."""
    return groups.etp if info.expert else groups.tp


def is_counted(info: ParamInfo, groups: ProcessGroups) -> bool:
    """Return whether this rank's gradient of a parameter counts in the norm.

    Replicas of a parameter have equal gradients, so only one rank counts it: the first
    tensor-parallel rank for a replicated parameter, and the first holder of a tied one.
    """
    if info.is_shared_copy:
        return False
    return info.tp_dim is not None or _tp_of(info, groups).position == 0


def merge_neighbours(
    pieces: Iterable[tuple[ShardPiece, Hashable]],
) -> list[tuple[ShardPiece, ...]]:
    """Group consecutive pieces of one bucket that have equal flags, in order.

    Such pieces are separated only by alignment padding, which is zero in every buffer, so a kernel
    may process a group from the first element to the last.
    """
    runs: list[tuple[Hashable, list[ShardPiece]]] = []
    for piece, flag in pieces:
        if runs and runs[-1][0] == flag and runs[-1][1][-1].bucket == piece.bucket:
            runs[-1][1].append(piece)
        else:
            runs.append((flag, [piece]))
    return [tuple(run) for _, run in runs]


@dataclass(frozen=True, kw_only=True)
class GradRange:
    """Consecutive reduced gradients of this rank, their weights, and if they count in a norm.

    ``numel`` is that of the parameters, without the zeros between them that align each.
    """

    grad: Tensor
    param: Tensor
    counted: bool
    numel: int


def grad_ranges(buffers: Sequence[ParamGradBuffer], groups: ProcessGroups) -> list[GradRange]:
    """Cut the gradients that this rank reduces into ranges, as views of the buffers.

    Over the data-parallel ranks, each element is in one counted range, with ZeRO-1 or without, so
    the norms are bitwise equal. Of several optimizer instances, only the first counts.
    """
    ranges = []
    for buffer in buffers:
        first = buffer.across.position == 0
        counted = [first and is_counted(info, groups) for info, _ in buffer.params]
        pieces = [(piece, counted[piece.param_index]) for piece in buffer.reduced_pieces()]
        for run in merge_neighbours(pieces):
            own = slice(run[0].world_start, run[-1].world_end)
            ranges.append(
                GradRange(
                    grad=buffer.grad_data[own],
                    param=buffer.param_data[own],
                    counted=counted[run[0].param_index],
                    numel=sum(piece.world_end - piece.world_start for piece in run),
                )
            )
    return ranges


def norm_parts(ranges: Sequence[GradRange], *, device: torch.device) -> Tensor:
    """Compute this rank's share of the squared norm and a flag for a non-finite gradient.

    Ranges that do not count are checked too: a fault may affect one of several equal gradients.

    Returns:
        ``(2,)``, fp64: sum of squares of counted ranges (0 if not finite), and 0 or 1.

    Sync:
        None on CUDA.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    counted, others = zero, zero
    for item in ranges:
        squares = sum_of_squares(item.grad)
        if item.counted:
            counted = counted + squares
        else:
            others = others + squares
    finite = torch.isfinite(counted + others)
    return torch.stack([torch.where(finite, counted, zero), (~finite).double()])


def count_zeros(ranges: Sequence[GradRange], *, device: torch.device) -> Tensor:
    """Count the zeros of this rank's share of the gradient; ``(1,)``, fp64, on ``device``.

    Sync:
        None on CUDA.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for item in ranges:
        if item.counted:
            total += item.numel - torch.count_nonzero(item.grad)
    return total
