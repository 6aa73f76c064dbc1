"""One transformer layer: attention, then SwiGLU or experts, behind norms, on the residual stream.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from megacore.models.attention import Attention
from megacore.models.dropout import Site
from megacore.models.functional import swiglu
from megacore.models.layers import ColumnLinear, ModelContext, ResidualDropout, RMSNorm, RowLinear
from megacore.models.moe_block import GatedExpert, MoEBlock
from megacore.parallel.batch import Microbatch


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``; gate and up are one column-parallel layer."""

    def __init__(self, name: str, context: ModelContext, *, width: int) -> None:
        super().__init__()
        full_shape = (2, width, context.shape.hidden)
        self.gate_up = ColumnLinear(f"{name}.gate_up", full_shape, tp_dim=1, context=context)
        self.down = RowLinear(f"{name}.down", width, context=context)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """``(S[/tp], B, H)`` to the same shape."""
        output: Tensor = self.down(swiglu(self.gate_up(x_SBH)))
        return output


class TransformerLayer(nn.Module):
    """A pre-norm layer; ``index`` counts over the whole model and names the parameters.

    Whether it has an MLP or experts follows from its index and the ``[moe]`` section.
    """

    def __init__(self, index: int, context: ModelContext) -> None:
        super().__init__()
        self.index = index
        name = f"layers.{index}"
        self.attention_norm = RMSNorm(f"{name}.attention.norm", context)
        self.attention = Attention(f"{name}.attention", context)
        self.attention_dropout = ResidualDropout(layer=index, site=Site.ATTENTION, context=context)
        is_moe = context.moe.is_moe_layer(index)
        self.mlp_norm = RMSNorm(f"{name}.{'moe' if is_moe else 'mlp'}.norm", context)
        self.mlp: MLP | MoEBlock
        if is_moe:
            shared = _shared_expert(f"{name}.moe", context)
            self.mlp = MoEBlock(f"{name}.moe", index, context, shared=shared)
        else:
            self.mlp = MLP(f"{name}.mlp", context, width=context.shape.ffn)
        self.mlp_dropout = ResidualDropout(layer=index, site=Site.MLP, context=context)

    def forward(self, x_SBH: Tensor, rotary: tuple[Tensor, Tensor], batch: Microbatch) -> Tensor:
        """``(S[/tp], B, H)`` to the same shape."""
        mixed_SBH = self.attention(self.attention_norm(x_SBH), rotary)
        x_SBH = x_SBH + self.attention_dropout(mixed_SBH, batch)
        normed_SBH = self.mlp_norm(x_SBH)
        if isinstance(self.mlp, MoEBlock):
            inner_SBH: Tensor = self.mlp(normed_SBH, batch)
        else:
            inner_SBH = self.mlp(normed_SBH)
        dropped_SBH: Tensor = self.mlp_dropout(inner_SBH, batch)
        return x_SBH + dropped_SBH


def _shared_expert(name: str, context: ModelContext) -> nn.Module | None:
    moe = context.moe
    if moe.shared_ffn_hidden_size == 0:
        return None
    mlp = MLP(f"{name}.shared", context, width=moe.shared_ffn_hidden_size)
    return GatedExpert(f"{name}.shared_gate", mlp, context) if moe.shared_gate else mlp
