"""Exchanges of tokens and heads between context-parallel ranks, for attention.

Each rank holds two slices of the sequence (see ``megacore.parallel.sequence``).

Source:
    All-to-all of heads: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.

Shapes: S sequence, B batch, N heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.collectives import all_gather, reduce_scatter
from megacore.parallel.process_groups import Group
from megacore.parallel.row_exchange import RowSplits, all_to_all
from megacore.parallel.sequence import context_slices
from megatrain.models.mappings import all_gather_sequence

_Way = Callable[[Tensor, Group], Tensor]


def gather(tensors: tuple[Tensor, ...], group: Group, *, in_order: bool) -> tuple[Tensor, ...]:
    """Gather the tokens of all cp ranks: ``(S/cp, ...)`` to ``(S, ...)``.

    Each rank uses the results for its own queries, so the backward pass sums over ranks.

    Args:
        tensors: Tensors of the same shape.
        group: The cp group.
        in_order: Whether tokens have the order of the sequence. Otherwise they are in the order
            that needs no copy: the later slice of each rank, which descend, then the earlier ones.
            All tokens before a slice are then one range too.

    Sync:
        One or two all-gathers over ``group``, and as many reduce-scatters in the backward pass;
        none for a group of one.
    """
    if group.size == 1:
        return tensors
    if not in_order:
        slices: tuple[Tensor, ...] = _GatherSlices.apply(  # type: ignore[no-untyped-call]
            group, *tensors
        )
        return slices
    ordered = _in_order(all_gather_sequence(torch.stack(tensors, dim=1), group), group.size)
    return ordered.unbind(1)


def exchange_heads(tensors: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    """Exchange some tokens of all heads for all tokens of some heads.

    Args:
        tensors: Queries, keys and values, ``(S/cp, B, heads, D)``.
        group: The cp group.

    Returns:
        The same, ``(S, B, heads/cp, D)``, in the order of the sequence.

    Raises:
        ValueError: If the group does not divide the heads.

    Sync:
        One all-to-all over ``group``, and one in the backward pass.
    """
    heads = [x.shape[2] for x in tensors]
    if any(number % group.size for number in heads):
        raise ValueError(
            f"heads must be a multiple of the {group.size} members of group {group.name} for "
            f'cp_comm = "a2a", got {heads[0]} of queries and {heads[1]} of keys'
        )
    # First all heads for the first member, those of queries, keys and values.
    joined = torch.cat(
        [x.reshape(*x.shape[:2], group.size, -1, x.shape[3]) for x in tensors], dim=3
    )
    all_tokens: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        joined.flatten(2, 3), group, _to_heads, _to_tokens
    )
    return list(all_tokens.split_with_sizes([number // group.size for number in heads], dim=2))


def exchange_back(x_SBND: Tensor, group: Group) -> Tensor:
    """Reverse `exchange_heads` for a result of attention: ``(S, B, N/cp, D)`` to its tokens."""
    tokens: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        x_SBND, group, _to_tokens, _to_heads
    )
    return tokens


class _GatherSlices(torch.autograd.Function):
    """All-gather of tokens, see `gather`."""

    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        shape = tensors[0].shape[0] * group.size, len(tensors), *tensors[0].shape[1:]
        gathered = tensors[0].new_empty(shape)
        for whole, part in zip(gathered.chunk(2), (1, 0), strict=True):
            all_gather(whole, torch.stack([x.chunk(2)[part] for x in tensors], dim=1), group)
        return gathered.unbind(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape = grads[0].shape[0] // ctx.group.size, len(grads), *grads[0].shape[1:]
        reduced = grads[0].new_empty(shape)
        for whole, part in zip(reduced.chunk(2), (1, 0), strict=True):
            reduce_scatter(whole, torch.stack([x.chunk(2)[part] for x in grads], 1), ctx.group)
        return None, *reduced.unbind(1)


class _Exchange(torch.autograd.Function):
    """An all-to-all, and the reverse one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: _Way, back: _Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def _to_heads(x_SBND: Tensor, group: Group) -> Tensor:
    """Exchange ``(S/cp, B, N, D)`` for ``(S, B, N/cp, D)``."""
    tokens, batch, _, width = x_SBND.shape
    by_member = x_SBND.reshape(tokens, batch, group.size, -1, width).permute(2, 0, 1, 3, 4)
    received = all_to_all(by_member.contiguous(), group, RowSplits())
    return _in_order(received.flatten(0, 1), group.size)


def _to_tokens(x_SBND: Tensor, group: Group) -> Tensor:
    """Exchange ``(S, B, N/cp, D)`` for ``(S/cp, B, N, D)``."""
    slices = x_SBND.chunk(2 * group.size)
    by_member = [slices[index] for index in _held(group.size)]
    received = all_to_all(torch.cat(by_member), group, RowSplits())
    from_members = received.view(group.size, -1, *received.shape[1:])
    return from_members.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _in_order(gathered: Tensor, cp_size: int) -> Tensor:
    """Reorder gathered slices from rank order into sequence order."""
    slices = gathered.chunk(2 * cp_size)
    held = _held(cp_size)
    return torch.cat([slices[held.index(index)] for index in range(2 * cp_size)])


def _held(cp_size: int) -> list[int]:
    """Return the slices of the sequence in the order of the ranks that hold them."""
    return [index for position in range(cp_size) for index in context_slices(cp_size, position)]
