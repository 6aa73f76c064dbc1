"""Transformer layer: attention, then an MLP or experts, on the residual stream.

A recomputed part ends in a matrix product if possible, because then only the input of the product
is recomputed, not the product.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from megacore.ops.activations import geglu, gelu, squared_relu, swiglu
from megacore.ops.recompute import RecomputeCache, recompute
from megacore.parallel.batch import Microbatch
from megatrain.models.attention.gqa import Attention
from megatrain.models.attention.mla import LatentAttention
from megatrain.models.dropout import Site, batch_in_use
from megatrain.models.layers import (
    ColumnLinear,
    ModelContext,
    ResidualDropout,
    RMSNorm,
    RowLinear,
    make_norm,
)
from megatrain.models.moe_block import GatedExpert, MoEBlock


class LayerGraphs(Protocol):
    """Runner of a layer whose scopes are captured as graphs (``models/captured.py``)."""

    def run(
        self,
        layer: TransformerLayer,
        x_SBH: Tensor,
        batch: Microbatch,
        rotary: tuple[Tensor, Tensor],
        recomputed: frozenset[str],
    ) -> Tensor:
        """Run the whole layer: ``(S[/tp], B, H)`` to the same shape."""


class MLP(nn.Module):
    """MLP ``down(activation(gate(x)) * up(x))``; gate and up are one column-parallel layer.

    Without a gate, the layer is ``up`` alone: ``down(activation(up(x)))``.
    """

    def __init__(self, name: str, context: ModelContext, *, width: int) -> None:
        super().__init__()
        infos = context.infos.mlp(name, width)
        wide = f"{name}.gate_up" if context.config.gated else f"{name}.up"
        self.gate_up = ColumnLinear.of(infos, wide, context=context)
        self.down = RowLinear.of(infos, f"{name}.down", context=context)
        self.activation = context.config.activation
        self.activate = _ACTIVATIONS[self.activation]

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Apply the MLP: ``(S[/tp], B, H)`` to the same shape."""
        return self.start(x_SBH)()

    def start(self, x_SBH: Tensor) -> Callable[[], Tensor]:
        """Apply ``gate_up``; the result computes the rest and returns the output."""
        wide_SBF = self.gate_up(x_SBH)
        return lambda: self.finish(wide_SBF)

    def finish(self, x_SBF: Tensor) -> Tensor:
        """Apply the activation and ``down`` to the output of ``gate_up``."""
        output: Tensor = self.down(self.activate(x_SBF))
        return output


def _gelu(x_SBF: Tensor) -> Tensor:
    return gelu(x_SBF.flatten(0, -2)).view(x_SBF.shape)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": _gelu,
    "relu2": squared_relu,
}


class TransformerLayer(nn.Module):
    """One layer; ``index`` is the global layer index, used in parameter names.

    The index and the ``[moe]`` section determine whether the layer has an MLP or experts.
    """

    def __init__(self, index: int, context: ModelContext) -> None:
        super().__init__()
        self.index = index
        self._recompute = context.recompute
        name = f"layers.{index}"
        self.attention_norm, self.attention_output_norm = _norms(f"{name}.attention", context)
        kind = LatentAttention if context.config.mla.kv_rank else Attention
        self.attention = kind(f"{name}.attention", index, context)
        self.attention_dropout = ResidualDropout(layer=index, site=Site.ATTENTION, context=context)
        is_moe = context.moe.is_moe_layer(index)
        self.parallel = context.config.parallel_blocks
        self.residual_factor = context.config.residual_factor
        # Parallel blocks have the same norm; it is computed for each.
        self.mlp_norm, self.mlp_output_norm = (
            (self.attention_norm, nn.Identity())
            if self.parallel
            else _norms(f"{name}.{'moe' if is_moe else 'mlp'}", context)
        )
        self.mlp: MLP | MoEBlock
        if is_moe:
            shared = _shared_expert(f"{name}.moe", context)
            self.mlp = MoEBlock(f"{name}.moe", index, context, shared=shared)
        else:
            self.mlp = MLP(f"{name}.mlp", context, width=context.shape.ffn)
        self.mlp_dropout = ResidualDropout(layer=index, site=Site.MLP, context=context)
        # Set while partial graphs of the layer exist.
        self.captured: LayerGraphs | None = None

    def forward(
        self,
        x_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        *,
        keep_activations: bool = False,
    ) -> Tensor:
        """Apply the layer, ``(S[/tp], B, H)``; see ``GPTChunk`` for ``keep_activations``."""
        recomputed = frozenset[str]() if keep_activations else self._recompute
        if self.captured is not None and self.training and batch.number is not None:
            return self.captured.run(self, x_SBH, batch, rotary, recomputed)
        cache = RecomputeCache() if "layer" in recomputed else None

        def blocks(x_SBH: Tensor) -> Tensor:
            return self.blocks(x_SBH, rotary, batch, recomputed, cache=cache)

        return recompute(blocks, x_SBH, cache=cache) if "layer" in recomputed else blocks(x_SBH)

    def blocks(
        self,
        x_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        recomputed: frozenset[str],
        *,
        cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Apply both blocks, ``(S[/tp], B, H)``; for ``cache`` see `mlp_block`.

        ``recomputed`` lists modules to recompute in the backward pass, as in `ModelContext`.
        The sum between the blocks is computed with the norm that follows, if this norm is kept.
        """
        mixed_SBH = self._mix(x_SBH, rotary, batch, recomputed)
        if self.parallel:
            return self.mlp_block(x_SBH, batch, recomputed, cache=cache) + mixed_SBH
        parts = {"moe"} if isinstance(self.mlp, MoEBlock) else {"mlp", "norm"}
        if type(self.mlp_norm) is RMSNorm and not parts & recomputed:
            x_SBH, normed_SBH = self.mlp_norm(x_SBH, mixed_SBH)
            return self.mlp_block(x_SBH, batch, recomputed, cache=cache, normed_SBH=normed_SBH)
        return self.mlp_block(x_SBH + mixed_SBH, batch, recomputed, cache=cache)

    def attention_block(
        self,
        x_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        recomputed: frozenset[str],
    ) -> Tensor:
        """Add attention, with its norm and dropout, to the residual stream ``(S[/tp], B, H)``."""
        return x_SBH + self._mix(x_SBH, rotary, batch, recomputed)

    def _mix(
        self,
        x_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        recomputed: frozenset[str],
    ) -> Tensor:
        """Compute what `attention_block` adds."""

        def project(x_SBH: Tensor) -> Tensor:
            with batch_in_use(batch):
                return self.attention.qkv(self.attention_norm(x_SBH))  # type: ignore[no-any-return]

        def mix(qkv_SBX: Tensor) -> Tensor:
            with batch_in_use(batch):
                return self.attention(qkv_SBX, rotary, batch.documents)  # type: ignore[no-any-return]

        qkv_SBX = recompute(project, x_SBH) if "norm" in recomputed else project(x_SBH)
        mixed_SBH = recompute(mix, qkv_SBX) if "attention" in recomputed else mix(qkv_SBX)
        mixed_SBH = self._factored(self.attention_output_norm(mixed_SBH))
        dropped_SBH: Tensor = self.attention_dropout(mixed_SBH, batch)
        return dropped_SBH

    def mlp_block(
        self,
        x_SBH: Tensor,
        batch: Microbatch,
        recomputed: frozenset[str],
        *,
        cache: RecomputeCache | None = None,
        normed_SBH: Tensor | None = None,
    ) -> Tensor:
        """Add the MLP or the experts, with norm and dropout, to the stream ``(S[/tp], B, H)``.

        ``cache`` is that of a recomputed region around this block, if there is one; ``normed_SBH``
        the normalized stream, if it is known and not recomputed.
        """
        mlp = self.mlp

        def norm(x_SBH: Tensor) -> Tensor:
            return self.mlp_norm(x_SBH) if normed_SBH is None else normed_SBH

        if isinstance(mlp, MoEBlock):
            cache = RecomputeCache() if "moe" in recomputed else cache

            def experts(x: Tensor) -> Tensor:
                with batch_in_use(batch):
                    return mlp(norm(x), batch, cache=cache)  # type: ignore[no-any-return]

            inner_SBH = (
                recompute(experts, x_SBH, cache=cache) if "moe" in recomputed else experts(x_SBH)
            )
        elif "mlp" in recomputed:

            def whole(x: Tensor) -> Tensor:
                with batch_in_use(batch):
                    return mlp(norm(x))  # type: ignore[no-any-return]

            inner_SBH = recompute(whole, x_SBH)
        else:

            def widen(x_SBH: Tensor) -> Tensor:
                with batch_in_use(batch):
                    return mlp.gate_up(norm(x_SBH))  # type: ignore[no-any-return]

            def finish(wide_SBF: Tensor) -> Tensor:
                with batch_in_use(batch):
                    return mlp.finish(wide_SBF)

            wide_SBF = recompute(widen, x_SBH) if "norm" in recomputed else widen(x_SBH)
            inner_SBH = (
                recompute(finish, wide_SBF) if "activation" in recomputed else finish(wide_SBF)
            )
        return self.add_mlp(x_SBH, inner_SBH, batch)

    def add_mlp(self, x_SBH: Tensor, inner_SBH: Tensor, batch: Microbatch) -> Tensor:
        """Add the result of the MLP or the experts to the residual stream ``(S[/tp], B, H)``."""
        inner_SBH = self._factored(self.mlp_output_norm(inner_SBH))
        added_SBH: Tensor = x_SBH + self.mlp_dropout(inner_SBH, batch)
        return added_SBH

    def _factored(self, x_SBH: Tensor) -> Tensor:
        return x_SBH if self.residual_factor == 1.0 else x_SBH * self.residual_factor


def _norms(name: str, context: ModelContext) -> tuple[nn.Module, nn.Module]:
    """Return the norms of a block's input and output; one of them may change nothing."""
    norm = make_norm(f"{name}.norm", context)
    if context.config.norm_position == "both":
        return norm, make_norm(f"{name}.output_norm", context)
    is_before = context.config.norm_position == "before"
    return (norm, nn.Identity()) if is_before else (nn.Identity(), norm)


def _shared_expert(name: str, context: ModelContext) -> nn.Module | None:
    moe = context.moe
    if moe.shared_ffn_hidden_size == 0:
        return None
    mlp = MLP(f"{name}.shared", context, width=moe.shared_ffn_hidden_size)
    return GatedExpert(f"{name}.shared_gate", mlp, context) if moe.shared_gate else mlp
