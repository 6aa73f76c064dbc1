"""Multi-token prediction: layers after the last one, each predicting one token further.

The model predicts token ``i + 1`` from its hidden state at ``i``. The layer of depth k takes the
hidden state of depth ``k - 1`` at ``i`` and the embedding of token ``i + k``, and predicts token
``i + k + 1``. Embedding and output layer are those of the model. The last k positions of a sequence
have no target.

Source:
    DeepSeek-V3, arXiv:2412.19437, section 2.2.

Shapes: S sequence, B batch, H hidden, D depths.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.ops.linear import linear
from megacore.parallel.batch import Microbatch
from megatrain.models.layers import ModelContext, VocabEmbedding, make_norm
from megatrain.models.transformer import TransformerLayer

# Label of an ignored token.
NO_LABEL = -1


class PredictionLayer(nn.Module):
    """One depth: joins hidden state and embedding, then applies a transformer layer and a norm.

    Args:
        index: Global index of its transformer layer, after those of the model.
        context: Construction context.
    """

    def __init__(self, index: int, context: ModelContext) -> None:
        super().__init__()
        name = f"layers.{index}.mtp"
        self.hidden_norm = make_norm(f"{name}.hidden_norm", context)
        self.embedding_norm = make_norm(f"{name}.embedding_norm", context)
        info = context.infos.prediction_layer(index)[f"{name}.projection"]
        self.projection = context.params.normal(info, std=context.config.init_std)
        self.layer = TransformerLayer(index, context)
        self.final_norm = make_norm(f"{name}.final_norm", context)

    def forward(
        self,
        hidden_SBH: Tensor,
        embedded_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        *,
        keep_activations: bool,
    ) -> Tensor:
        """Join two tensors ``(S[/tp], B, H)`` to one, normalized."""
        joined = torch.cat(
            (self.hidden_norm(hidden_SBH), self.embedding_norm(embedded_SBH)), dim=-1
        )
        x_SBH = linear(joined, self.projection)
        x_SBH = self.layer(x_SBH, rotary, batch, keep_activations=keep_activations)
        output: Tensor = self.final_norm(x_SBH)
        return output


class MultiTokenPrediction(nn.Module):
    """All prediction depths.

    Args:
        layers: Global indices of their transformer layers.
        context: Construction context.
        embedding: The embedding, or its copy on this rank.
    """

    def __init__(self, layers: range, context: ModelContext, *, embedding: nn.Parameter) -> None:
        super().__init__()
        self.words = VocabEmbedding(embedding, context=context)
        self.layers = nn.ModuleList(PredictionLayer(index, context) for index in layers)

    def forward(
        self,
        hidden_SBH: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: Microbatch,
        *,
        keep_activations: bool,
    ) -> Tensor:
        """Concatenate the normalized model output and the outputs of all depths.

        ``(S[/tp], B, H)`` to ``((1 + D) * S[/tp], B, H)``. In eval mode, where multi-token
        prediction is not needed, the input is repeated.
        """
        if not self.training:
            return hidden_SBH.repeat(1 + len(self.layers), 1, 1)
        outputs = [hidden_SBH]
        for depth, layer in enumerate(self.layers, start=1):
            tokens_BS = ahead(batch.tokens, depth, fill=0)
            embedded_SBH = self.words(self.words.region.share(tokens_BS))
            outputs.append(
                layer(outputs[-1], embedded_SBH, rotary, batch, keep_activations=keep_activations)
            )
        return torch.cat(outputs)


def ahead(x_BS: Tensor, depth: int, *, fill: int) -> Tensor:
    """Shift whole sequences left by ``depth`` positions; ``fill`` after their end.

    Example:
        >>> ahead(torch.tensor([[1, 2, 3]]), 1, fill=0).tolist()
        [[2, 3, 0]]
    """
    missing = torch.full_like(x_BS[:, :depth], fill)
    return torch.cat((x_BS[:, depth:], missing), dim=1)
