"""The experts of one rank: two grouped GEMMs with an activation in between.

Shapes: M rows of all local experts, L local experts, F inner width of an expert on this rank (its
shard, if etp splits experts), H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from megacore.moe.dispatchers import ExpertRows
from megacore.moe.echo.clones import FC1, FC2, LayerClones
from megacore.moe.expert_adapters import BoundAdapters, ExpertAdapters
from megacore.ops.activations import clamped_swiglu, gelu, swiglu
from megacore.ops.fp8 import fp8_grouped_gemm
from megacore.ops.gemm import grouped_gemm, main_grad_of
from megacore.ops.rounded_weight import rounded_of

Activation = Literal["swiglu", "gelu", "clamped_swiglu"]
_ACTIVATIONS = {"swiglu": swiglu, "gelu": gelu, "clamped_swiglu": clamped_swiglu}


class GroupedExperts(nn.Module):
    """Grouped MLP ``fc2(activation(fc1(x)))`` over each expert's rows, times each row's weight.

    The weight is applied between the two products, where rows are narrow, and to the bias of
    ``fc2``; since ``fc2`` is linear, this is equivalent to weighting the result. With
    ``scale_inputs`` the weight is that of the input instead.

    Args:
        fc1: ``(L, 2, F, H)`` for SwiGLU, gate first; ``(L, F, H)`` for GELU.
        fc2: ``(L, H, F)``.
        activation: Activation between ``fc1`` and ``fc2``.
        biases: Biases of both; not with clones.
        fp8: Whether the products have 8-bit operands; not with clones.
        scale_inputs: Whether rows are weighted before ``fc1``, with a torch operation.
        adapters: Low-rank adapters of both projections.

    Raises:
        ValueError: If the shapes are inconsistent.
    """

    def __init__(
        self,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        *,
        activation: Activation,
        biases: ExpertBiases | None = None,
        fp8: bool = False,
        scale_inputs: bool = False,
        adapters: ExpertAdapters | None = None,
    ) -> None:
        super().__init__()
        num_local, hidden, width = fc2.shape
        inner = (width,) if activation == "gelu" else (2, width)
        if tuple(fc1.shape) != (num_local, *inner, hidden):
            raise ValueError(
                f"fc1 has shape {tuple(fc1.shape)}, but {activation} before fc2 "
                f"{tuple(fc2.shape)} needs {(num_local, *inner, hidden)}"
            )
        self.fc1 = fc1
        self.fc2 = fc2
        self.activation = activation
        self.biases = biases
        self.product = fp8_grouped_gemm if fp8 else grouped_gemm
        self.scale_inputs = scale_inputs
        self.adapters = adapters

    def forward(
        self,
        arrived: ExpertRows,
        clones: LayerClones | None = None,
        adapters: BoundAdapters | None = None,
    ) -> Tensor:
        """Compute the expert outputs.

        Args:
            arrived: Rows of the local experts, followed by the rows of ``clones``.
            clones: Clone exchange of this layer: clones of this rank's experts on other ranks, and
                of other ranks' experts here.
            adapters: The adapters of experts and clones. Default: those of the experts.

        Returns:
            ``(M, H)``; a partial sum if etp splits experts.
        """
        activate = _ACTIVATIONS[self.activation]
        probs: Tensor | None = arrived.probs
        num_rows = arrived.num_rows
        if adapters is None and self.adapters is not None:
            adapters = self.adapters.bind()
        # Adapters add to results and gradients, which are then in other memory.
        is_final = self.product is grouped_gemm and adapters is None
        sent = arrived.sent_next if is_final else None
        grads_there: dict[str, Any] = {} if sent is None else {"grad_out": sent.input_grads}
        results_there: dict[str, Any] = {} if sent is None else {"out": sent.results}
        if self.scale_inputs:
            rows = (arrived.rows * arrived.probs[:, None]).to(arrived.rows.dtype)
            # The gradient of the products' input is not that of the rows that arrived.
            arrived, probs, grads_there = replace(arrived, rows=rows), None, {}
        if clones is not None:
            hints: dict[str, Any] = {
                "clear_padding": num_rows is None,
                "expected_rows": arrived.expected_rows,
            }
            inner = clones.product(FC1, arrived.rows, arrived.m_splits, **hints, **grads_there)
            inner = _adapted(FC1, inner, arrived.rows, arrived, adapters)
            active = activate(inner, probs, num_rows=num_rows)
            outer = clones.product(FC2, active, arrived.m_splits, **hints, **results_there)
            return _adapted(FC2, outer, active, arrived, adapters)
        inner = self._product(arrived.rows, self.fc1, arrived, **grads_there)
        inner = _adapted(FC1, inner, arrived.rows, arrived, adapters)
        if self.biases is None:
            active = activate(inner, probs, num_rows=num_rows)
            outer = self._product(active, self.fc2, arrived, **results_there)
            return _adapted(FC2, outer, active, arrived, adapters)
        fc1_bias, fc2_bias = self.biases(arrived.m_splits, len(arrived.rows))
        inner = inner + fc1_bias.to(inner.dtype)
        active = activate(inner, probs, num_rows=num_rows)
        outer = self._product(active, self.fc2, arrived)
        outer = _adapted(FC2, outer, active, arrived, adapters)
        fc2_bias = fc2_bias if probs is None else fc2_bias * probs[:, None]
        result: Tensor = outer + fc2_bias.to(outer.dtype)
        return result

    def _product(
        self, rows: Tensor, weight: nn.Parameter, arrived: ExpertRows, **options: Any
    ) -> Tensor:
        main_grad = main_grad_of(weight)
        if self.product is fp8_grouped_gemm:
            options["rounded"] = rounded_of(weight)
        return self.product(
            rows,
            weight.flatten(1, -2),
            arrived.m_splits,
            main_grad=None if main_grad is None else main_grad.flatten(1, -2),
            clear_padding=arrived.num_rows is None,
            expected_rows=arrived.expected_rows,
            **options,
        )


def _adapted(
    projection: int,
    result: Tensor,
    rows: Tensor,
    arrived: ExpertRows,
    adapters: BoundAdapters | None,
) -> Tensor:
    """Add the adapters of a projection to its result, if there are any."""
    if adapters is None:
        return result
    return adapters.add(
        projection,
        result,
        rows,
        arrived.m_splits,
        clear_padding=arrived.num_rows is None,
        expected_rows=arrived.expected_rows,
    )


class ExpertBiases(nn.Module):
    """Biases of both layers of the local experts.

    Args:
        fc1: ``(L, 2, F)``, or ``(L, F)`` for GELU.
        fc2: ``(L, H)``, the same on all etp ranks.
        num_shards: Number of etp ranks, whose results are summed.
    """

    def __init__(self, fc1: nn.Parameter, fc2: nn.Parameter, *, num_shards: int) -> None:
        super().__init__()
        self.fc1 = fc1
        self.fc2 = fc2
        self.num_shards = num_shards

    def forward(self, m_splits: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the bias of ``fc1``, and this rank's share of that of ``fc2``, for each row."""
        ends = m_splits.cumsum(0)
        rows = torch.arange(num_rows, device=ends.device)
        experts = torch.searchsorted(ends, rows, right=True)
        fc2: Tensor = _EqualShare.apply(self.fc2, self.num_shards)  # type: ignore[no-untyped-call]
        return _of_rows(self.fc1.flatten(1), experts), _of_rows(fc2, experts)


def _of_rows(bias: Tensor, experts: Tensor) -> Tensor:
    """Return the bias of each row in float32 at least; 0 for rows behind those of all experts."""
    wide = bias.float() if bias.dtype.itemsize < 4 else bias
    # Rows of no expert may have any gradient, which goes to the further row.
    rows: Tensor = embedding(experts, torch.cat((wide, wide.new_zeros(1, wide.shape[1]))))
    return rows


class _EqualShare(torch.autograd.Function):
    """Equal share of a value that is summed over ranks, each of which has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_shares: int) -> Tensor:  # noqa: ARG004
        return x / num_shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
