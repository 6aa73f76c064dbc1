"""Autograd functions at the borders of tensor-parallel regions.

Each function communicates activations over a group in the forward pass and does the adjoint in the
backward pass. Over a group of one rank, the functions return their input.

==============================  ==========================  ==============================
function                        forward                     backward
==============================  ==========================  ==============================
``copy_to_group``               identity                    all-reduce
``reduce_from_group``           all-reduce                  identity
``scatter_sequence``            this rank's slice           all-gather
``gather_sequence``             all-gather                  this rank's slice
``all_gather_sequence``         all-gather                  reduce-scatter
``reduce_scatter_sequence``     reduce-scatter              all-gather
==============================  ==========================  ==============================

``gather_sequence`` is for results that every rank uses in the same way (each rank then holds the
whole gradient); ``all_gather_sequence`` for results with different uses (each holds a part).

Shapes: S sequence (dimension 0), B batch, H hidden. The sequence is the first dimension, so that
the slice of a rank is contiguous and collectives need no copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather, all_reduce_, reduce_scatter
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_positions


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Enter a region where each rank computes a part from the whole ``x``."""
    return x if group.size == 1 else _apply(_Copy, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Leave a region: sum the parts ``x`` of all ranks."""
    return x if group.size == 1 else _apply(_Reduce, x, group)


def scatter_sequence(x_SBH: Tensor, group: Group) -> Tensor:
    """Keep this rank's slice of a tensor that is the same on every rank.

    Raises:
        ValueError: If the group size does not divide the sequence.
    """
    return x_SBH if group.size == 1 else _apply(_Scatter, x_SBH, group)


def gather_sequence(x_SBH: Tensor, group: Group) -> Tensor:
    """Concatenate the slices of all ranks, for the same use on every rank."""
    return x_SBH if group.size == 1 else _apply(_Gather, x_SBH, group)


def all_gather_sequence(x_SBH: Tensor, group: Group) -> Tensor:
    """Concatenate the slices of all ranks, to enter a region where each rank computes its part."""
    return x_SBH if group.size == 1 else _apply(_AllGather, x_SBH, group)


def reduce_scatter_sequence(x_SBH: Tensor, group: Group) -> Tensor:
    """Leave a region: sum the parts of all ranks and keep this rank's slice of the sum.

    Raises:
        ValueError: If the group size does not divide the sequence.
    """
    return x_SBH if group.size == 1 else _apply(_ReduceScatter, x_SBH, group)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Entry to and exit from tensor-parallel regions of the model.

    Attributes:
        group: The tp group.
        sequence_parallel: Between regions, each rank has only its slice of the sequence.
        cp: The cp group. ``S`` in the methods is this cp rank's share of the sequence.
        cp_comm: Exchange of attention over it, see ``parallel.cp_comm``.
    """

    group: Group
    sequence_parallel: bool
    cp: Group = field(default_factory=Group.solo)
    cp_comm: str = "allgather"

    def enter(self, x_SBH: Tensor) -> Tensor:
        """Enter a region: ``(S[/tp], B, H)`` to the whole sequence ``(S, B, H)`` on every rank."""
        mapping = all_gather_sequence if self.sequence_parallel else copy_to_group
        return mapping(x_SBH, self.group)

    def leave(self, x_SBH: Tensor) -> Tensor:
        """Leave a region by a sum over ranks: ``(S, B, H)`` to ``(S[/tp], B, H)``."""
        mapping = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        return mapping(x_SBH, self.group)

    @property
    def num_slices(self) -> int:
        """Number of slices of the sequence outside of regions."""
        return self.group.size if self.sequence_parallel else 1

    @property
    def slice_index(self) -> int:
        """Index of this rank's slice."""
        return self.group.position if self.sequence_parallel else 0

    @property
    def sequence_unit(self) -> int:
        """Unit of the length of a whole sequence, which must be a multiple of it."""
        return self.num_slices * (2 * self.cp.size if self.cp.size > 1 else 1)

    def share(self, x_BS: Tensor) -> Tensor:
        """Select the columns of ``x``, one per token of the whole sequence, of this cp rank."""
        if self.cp.size == 1:
            return x_BS
        return x_BS[:, self.share_positions(x_BS.shape[1], device=x_BS.device)]

    def share_positions(self, seq_length: int, *, device: torch.device) -> Tensor:
        """Return the positions in the whole sequence of this cp rank, ``(seq_length / cp,)``."""
        return context_positions(
            seq_length, cp_size=self.cp.size, position=self.cp.position, device=device
        )

    def positions(self, num_tokens: int, *, device: torch.device) -> Tensor:
        """Return the positions of this rank's ``num_tokens`` tokens between regions."""
        whole = num_tokens * self.num_slices * self.cp.size
        share = self.share_positions(whole, device=device)
        return share.narrow(0, self.slice_index * num_tokens, num_tokens)


# ---- collectives with a result -------------------------------------------------------------------


def _all_reduced(x: Tensor, group: Group) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(result, group)
    return result


def _gathered(x: Tensor, group: Group) -> Tensor:
    result = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    all_gather(result, x.contiguous(), group)
    return result


def _reduce_scattered(x: Tensor, group: Group) -> Tensor:
    result = x.new_empty(_slice_length(x, group), *x.shape[1:])
    reduce_scatter(result, x.contiguous(), group)
    return result


def _own_slice(x: Tensor, group: Group) -> Tensor:
    length = _slice_length(x, group)
    return x.narrow(0, group.position * length, length).clone()


def _slice_length(x: Tensor, group: Group) -> int:
    if x.shape[0] % group.size:
        raise ValueError(
            f"sequence parallelism over {group.size} ranks must divide the sequence, "
            f"but it has {x.shape[0]} tokens"
        )
    return x.shape[0] // group.size


# ---- autograd ------------------------------------------------------------------------------------


def _apply(function: type[torch.autograd.Function], x: Tensor, group: Group) -> Tensor:
    result: Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ARG004
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_slice(grad, ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scattered(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None
