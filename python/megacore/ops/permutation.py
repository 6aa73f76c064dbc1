"""Permutation of tokens into expert order and back.

A *row map* ``(T, k)`` has the row of each copy of each token; ``-1`` marks a copy that does not
exist. All functions are based on two operations that are each other's derivative: :func:`permute`
copies tokens to their rows, :func:`unpermute` sums the rows of each token.

Shapes: T tokens, k choices per token, H features, R rows, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.dense import wide_dtype
from megacore.ops.register import define_compiled, define_gradient, describe


def permute_probs(probs: Tensor, row_map: Tensor, num_rows: int) -> Tensor:
    """Permute one number per copy into row order: ``(T, k)`` to ``(R,)``, zero-filled.

    Example:
        >>> row_map = torch.tensor([[2, 0], [1, -1]])
        >>> permute_probs(torch.tensor([[0.5, 0.25], [1.0, 9.0]]), row_map, 4).tolist()
        [0.25, 1.0, 0.5, 0.0]
    """
    # Each copy is treated as a token of width 1.
    return permute(probs.reshape(-1, 1), row_map.reshape(-1, 1), num_rows).flatten()


def sort_by_expert(expert_of: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assign a row to every copy: by expert, then by token, then by choice.

    Args:
        expert_of: ``(T, k)``, int64; -1 for no copy.
        num_experts: E.

    Returns:
        The row map ``(T, k)`` and the copies per expert ``(E,)``, both int64.

    Raises:
        ValueError: If ``expert_of`` has another shape or dtype or, on the CPU, an id out of range.
    """
    _check_choices("expert_of", expert_of)
    row_map, tokens_per_expert = _sort_by_expert(expert_of, num_experts)
    return row_map, tokens_per_expert


def sort_by_expert_reference(expert_of: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Compute :func:`sort_by_expert` with torch operations, on any device."""
    flat = expert_of.flatten()
    # Missing copies sort after the last expert.
    key = torch.where(flat < 0, num_experts, flat)
    order = torch.argsort(key, stable=True)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device)
    # Not bincount, which needs a host sync.
    counts = flat.new_zeros(num_experts + 1).scatter_add(0, key, torch.ones_like(key))
    return torch.where(flat < 0, -1, rows).view_as(expert_of), counts[:num_experts].clone()


def permute(
    tokens: Tensor, row_map: Tensor, num_rows: int, weights: Tensor | None = None
) -> Tensor:
    """Copy tokens to their rows: ``rows[row_map[t, j]] = weights[t, j] * tokens[t]``, others zero.

    Args:
        tokens: ``(T, H)``.
        row_map: ``(T, k)``, int64, each row at most once.
        num_rows: R.
        weights: ``(T, k)``, float32. Default: all one.

    Returns:
        ``(R, H)``, dtype of ``tokens``.

    Raises:
        ValueError: If shapes do not fit or, on the CPU, if a row is out of range.

    Sync:
        None. Shapes of the results depend on shapes only.

    Example:
        >>> row_map, _ = sort_by_expert(torch.tensor([[1], [0]]), 2)
        >>> permute(torch.tensor([[1.0], [2.0]]), row_map, 2).flatten().tolist()
        [2.0, 1.0]
    """
    _check_rows(tokens, row_map, weights)
    result: Tensor = _permute(tokens, row_map, num_rows, weights)
    return result


def permute_with_probs(
    tokens: Tensor, probs: Tensor, row_map: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Compute :func:`permute` and :func:`permute_probs` by one operation, which costs less.

    Args:
        tokens: ``(T, H)``.
        probs: ``(T, k)``.
        row_map: ``(T, k)``, int64, each row at most once.
        num_rows: R.

    Returns:
        Rows ``(R, H)`` and one number per row ``(R,)``.

    Raises:
        ValueError: As :func:`permute`.
    """
    _check_rows(tokens, row_map, probs, name="probs")
    rows, row_probs = _permute_both(tokens, probs, row_map, num_rows)
    return rows, row_probs


def unpermute(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum ``weights[t, j] * rows[row_map[t, j]]`` over ``j`` into ``tokens[t]``, in order of ``j``.

    Args:
        rows: ``(R, H)``.
        row_map: ``(T, k)``, int64.
        weights: ``(T, k)``, float32. Default: all one.

    Returns:
        ``(T, H)``, dtype of ``rows``; summed in float32 for narrower dtypes, in one order for any
        number of threads; zero for a token without copies.

    Raises:
        ValueError: If shapes do not fit or, on the CPU, if a row is out of range.

    Example:
        >>> row_map, _ = sort_by_expert(torch.tensor([[1, 0], [0, -1]]), 2)
        >>> unpermute(torch.tensor([[1.0], [2.0], [4.0]]), row_map).flatten().tolist()
        [5.0, 2.0]
    """
    _check_rows(None, row_map, weights)
    result: Tensor = _unpermute(rows, row_map, weights)
    return result


def permute_reference(
    tokens: Tensor, row_map: Tensor, num_rows: int, weights: Tensor | None = None
) -> Tensor:
    """Compute :func:`permute` with torch operations, on any device."""
    copies = tokens[:, None, :].expand(-1, row_map.shape[1], -1)
    if weights is not None:
        copies = (copies.to(wide_dtype(tokens)) * weights[..., None]).to(tokens.dtype)
    index = torch.where(row_map < 0, num_rows, row_map).flatten()
    out = tokens.new_zeros(num_rows + 1, tokens.shape[1])
    return out.index_copy(0, index, copies.reshape(-1, tokens.shape[1]))[:num_rows].clone()


def unpermute_reference(rows: Tensor, row_map: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute :func:`unpermute` with torch operations, on any device."""
    wide = wide_dtype(rows)
    total = rows.new_zeros(row_map.shape[0], rows.shape[1], dtype=wide)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    index = torch.where(row_map < 0, rows.shape[0], row_map)
    for choice in range(row_map.shape[1]):
        picked = padded[index[:, choice]].to(wide)
        total = total + (picked if weights is None else picked * weights[:, choice, None])
    return total.to(rows.dtype)


def _row_dots_reference(tokens: Tensor, rows: Tensor, row_map: Tensor) -> Tensor:
    """Compute ``dots[t, j] = tokens[t] . rows[row_map[t, j]]``, zero for missing copies."""
    wide = wide_dtype(rows)
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    index = torch.where(row_map < 0, rows.shape[0], row_map)
    return torch.einsum("th,tkh->tk", tokens.to(wide), padded[index].to(wide))


def _check_choices(name: str, choices: Tensor) -> None:
    if choices.dim() != 2 or choices.dtype != torch.int64:
        raise ValueError(f"{name} {describe(choices)} must be (T, k) int64")


def _check_rows(
    tokens: Tensor | None, row_map: Tensor, weights: Tensor | None, *, name: str = "weights"
) -> None:
    _check_choices("row_map", row_map)
    if tokens is not None and (tokens.dim() != 2 or tokens.shape[0] != row_map.shape[0]):
        raise ValueError(
            f"tokens {describe(tokens)} and row_map {describe(row_map)} must have one T"
        )
    if weights is not None and weights.shape != row_map.shape:
        raise ValueError(
            f"{name} {describe(weights)} must have the shape of row_map {describe(row_map)}"
        )


def _sorts(expert_of: Tensor, num_experts: int) -> bool:
    """Return whether the GPU's kernel supports the sizes of the sort."""
    limit: int = cuda_kernels().MAX_SORTED_EXPERTS
    return 1 <= num_experts <= limit and expert_of.numel() < 2**31


def _as_tokens(probs: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers and map with each copy as a token of width 1."""
    return probs.reshape(-1, 1), row_map.reshape(-1, 1)


def _probs_fit(tensor: Tensor, probs: Tensor, *rest: Any) -> bool:
    del tensor, rest
    return probs.dtype == torch.float32


def _permute_both_reference(
    tokens: Tensor, probs: Tensor, row_map: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    row_probs = permute_reference(*_as_tokens(probs, row_map), num_rows)
    return permute_reference(tokens, row_map, num_rows), row_probs.flatten().clone()


def _unpermute_both_reference(
    rows: Tensor, row_probs: Tensor, row_map: Tensor
) -> tuple[Tensor, Tensor]:
    probs = unpermute_reference(*_as_tokens(row_probs, row_map))
    return unpermute_reference(rows, row_map), probs.view(row_map.shape)


def _one_dtype(tokens: Tensor, rows: Tensor, row_map: Tensor) -> bool:
    del row_map
    return tokens.dtype == rows.dtype


def _sort_fake(expert_of: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(expert_of), expert_of.new_empty(num_experts)


def _permute_fake(tokens: Tensor, row_map: Tensor, num_rows: int, weights: Tensor | None) -> Tensor:
    del row_map, weights
    return tokens.new_empty(num_rows, tokens.shape[1])


def _unpermute_fake(rows: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    del weights
    return rows.new_empty(row_map.shape[0], rows.shape[1])


def _permute_both_fake(
    tokens: Tensor, probs: Tensor, row_map: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    return _permute_fake(tokens, row_map, num_rows, None), probs.new_empty(num_rows)


def _unpermute_both_fake(rows: Tensor, row_probs: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    return _unpermute_fake(rows, row_map, None), row_probs.new_empty(row_map.shape)


def _row_dots_fake(tokens: Tensor, rows: Tensor, row_map: Tensor) -> Tensor:
    del tokens
    return rows.new_empty(row_map.shape, dtype=wide_dtype(rows))


_sort_by_expert = define_compiled(
    "sort_by_expert(Tensor expert_of, SymInt num_experts) -> (Tensor, Tensor)",
    reference=sort_by_expert_reference,
    cuda_fits=_sorts,
    dtypes=(torch.int64,),
    fake=_sort_fake,
)
_permute = define_compiled(
    "permute(Tensor tokens, Tensor row_map, SymInt num_rows, Tensor? weights) -> Tensor",
    reference=permute_reference,
    fake=_permute_fake,
    has_gradient=True,
)
_unpermute = define_compiled(
    "unpermute(Tensor rows, Tensor row_map, Tensor? weights) -> Tensor",
    reference=unpermute_reference,
    fake=_unpermute_fake,
    has_gradient=True,
)
_permute_both = define_compiled(
    "permute_both(Tensor tokens, Tensor probs, Tensor row_map, SymInt num_rows)"
    " -> (Tensor, Tensor)",
    reference=_permute_both_reference,
    fits=_probs_fit,
    fake=_permute_both_fake,
    has_gradient=True,
)
_unpermute_both = define_compiled(
    "unpermute_both(Tensor rows, Tensor row_probs, Tensor row_map) -> (Tensor, Tensor)",
    reference=_unpermute_both_reference,
    fits=_probs_fit,
    fake=_unpermute_both_fake,
    has_gradient=True,
)
_row_dots = define_compiled(
    "row_dots(Tensor tokens, Tensor rows, Tensor row_map) -> Tensor",
    reference=_row_dots_reference,
    fits=_one_dtype,
    fake=_row_dots_fake,
)


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    tokens, row_map, _, weights = inputs
    ctx.save_for_backward(None if weights is None else tokens, row_map, weights)


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, row_map, weights = ctx.saved_tensors
    grad_tokens = _unpermute(grad, row_map, weights) if ctx.needs_input_grad[0] else None
    grad_weights = None
    if weights is not None and ctx.needs_input_grad[3]:
        grad_weights = _row_dots(tokens, grad, row_map).to(weights.dtype)
    return grad_tokens, None, None, grad_weights


def _permute_both_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    needs = zip(output, ctx.needs_input_grad, strict=False)
    ctx.mark_non_differentiable(*(part for part, needed in needs if not needed))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[2])


def _permute_both_backward(
    ctx: Any, grad: Tensor | None, grad_probs: Tensor | None
) -> tuple[Tensor | None, ...]:
    (row_map,) = ctx.saved_tensors
    # A split backward pass may request one of the two at a time.
    grad, grad_probs = (
        given if needed else None
        for given, needed in zip((grad, grad_probs), ctx.needs_input_grad, strict=False)
    )
    if grad is not None and grad_probs is not None:
        return *_unpermute_both(grad, grad_probs, row_map), None, None
    of_tokens = None if grad is None else _unpermute(grad, row_map, None)
    of_probs = None
    if grad_probs is not None:
        of_probs = _unpermute(*_as_tokens(grad_probs, row_map), None).view(row_map.shape)
    return of_tokens, of_probs, None, None


def _unpermute_both_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    del output
    ctx.num_rows = inputs[0].shape[0]
    ctx.save_for_backward(inputs[2])


def _unpermute_both_backward(
    ctx: Any, grad: Tensor, grad_probs: Tensor
) -> tuple[Tensor | None, ...]:
    return *_permute_both(grad, grad_probs, ctx.saved_tensors[0], ctx.num_rows), None


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    rows, row_map, weights = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(None if weights is None else rows, row_map, weights)


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, row_map, weights = ctx.saved_tensors
    grad_rows = None
    if ctx.needs_input_grad[0]:
        grad_rows = _permute(grad, row_map, ctx.num_rows, weights)
    grad_weights = None
    if weights is not None and ctx.needs_input_grad[2]:
        grad_weights = _row_dots(grad, rows, row_map).to(weights.dtype)
    return grad_rows, None, grad_weights


define_gradient(_permute, _permute_backward, _permute_setup)
define_gradient(_unpermute, _unpermute_backward, _unpermute_setup)
define_gradient(_permute_both, _permute_both_backward, _permute_both_setup)
define_gradient(_unpermute_both, _unpermute_both_backward, _unpermute_both_setup)
