"""Norm of the gradient of the whole model, each element counted once, with a finite check."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer, ShardPiece
from megacore.ops.optim import sum_of_squares
from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


def is_counted(info: ParamInfo, groups: ProcessGroups) -> bool:
    """Return whether this rank's gradient of a parameter counts in the norm.

    Replicas of a parameter have equal gradients, so only one rank counts it: the first
    tensor-parallel rank for a replicated parameter, and the first holder of a tied one.
    """
    if info.is_shared_copy:
        return False
    tp = groups.etp if info.expert else groups.tp
    return info.tp_dim is not None or tp.position == 0


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
    """Consecutive reduced gradients of this rank, their weights, and if they count in a norm."""

    grad: Tensor
    param: Tensor
    counted: bool


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
