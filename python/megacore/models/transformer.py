"""One transformer layer: attention and SwiGLU, each behind a norm and added to the residual stream.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from megacore.models.attention import Attention
from megacore.models.dropout import Site
from megacore.models.functional import swiglu
from megacore.models.layers import ColumnLinear, ModelContext, ResidualDropout, RMSNorm, RowLinear
from megacore.parallel.batch import Microbatch


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``; gate and up are one column-parallel layer."""

    def __init__(self, name: str, context: ModelContext) -> None:
        super().__init__()
        shape = context.shape
        full_shape = (2, shape.ffn, shape.hidden)
        self.gate_up = ColumnLinear(f"{name}.gate_up", full_shape, tp_dim=1, context=context)
        self.down = RowLinear(f"{name}.down", shape.ffn, context=context)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """``(S[/tp], B, H)`` to the same shape."""
        output: Tensor = self.down(swiglu(self.gate_up(x_SBH)))
        return output


class TransformerLayer(nn.Module):
    """A pre-norm layer; ``index`` counts over the whole model and names the parameters."""

    def __init__(self, index: int, context: ModelContext) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = RMSNorm(f"{name}.attention.norm", context)
        self.attention = Attention(f"{name}.attention", context)
        self.attention_dropout = ResidualDropout(layer=index, site=Site.ATTENTION, context=context)
        self.mlp_norm = RMSNorm(f"{name}.mlp.norm", context)
        self.mlp = MLP(f"{name}.mlp", context)
        self.mlp_dropout = ResidualDropout(layer=index, site=Site.MLP, context=context)

    def forward(self, x_SBH: Tensor, rotary: tuple[Tensor, Tensor], batch: Microbatch) -> Tensor:
        """``(S[/tp], B, H)`` to the same shape."""
        mixed_SBH = self.attention(self.attention_norm(x_SBH), rotary)
        x_SBH = x_SBH + self.attention_dropout(mixed_SBH, batch)
        inner_SBH: Tensor = self.mlp_dropout(self.mlp(self.mlp_norm(x_SBH)), batch)
        return x_SBH + inner_SBH
