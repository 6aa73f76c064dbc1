"""A slice of a GPT: some of its layers, perhaps with the embedding or the head.

Shapes: S sequence, B batch, H hidden, V vocabulary. Activations are ``(S, B, H)``, or slices
``(S/tp, B, H)`` with sequence parallelism; S is a cp rank's share with context parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megacore.config import ModelConfig, MoEConfig
from megacore.models.dropout import Site
from megacore.models.functional import rotary_tables
from megacore.models.init import ParamFactory
from megacore.models.layers import ModelContext, ResidualDropout, RMSNorm, VocabEmbedding
from megacore.models.loss import cross_entropy
from megacore.models.mappings import Region
from megacore.models.moe_block import MoEBlock
from megacore.models.shape import GPTShape
from megacore.models.transformer import TransformerLayer
from megacore.moe.clone_weights import SlotBuffers
from megacore.moe.dispatchers import StaticBudget
from megacore.moe.layer import MoELayer
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_gather
from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


class GPTChunk(nn.Module):
    """One rank's part of the layers ``layers`` of a GPT.

    The whole model is ``GPTChunk(config, layers=range(num_layers), has_embedding=True,
    has_head=True, groups=ProcessGroups.single())``. Chunks that follow each other compute exactly
    what the whole model computes. A chunk may have no layers.

    Args:
        config: A resolved ``[model]`` section.
        layers: Global indices of the layers in this chunk.
        has_embedding: The chunk starts the model: it takes tokens.
        has_head: The chunk ends the model: it returns the loss.
        groups: Process groups; the tp group splits the layers.
        sequence_parallel: Split activations between tensor-parallel regions along the sequence.
        dtype: Number format of parameters and activations. Norms and the loss are computed in
            float32 at least.
        device: Where the parameters live.
        seed: Seed of initial weights and dropout.
        moe: A resolved ``[moe]`` section. Default: every layer is dense.
        tied_weight: With tied embeddings: the embedding of another chunk on this rank, used by this
            chunk's head in place of a copy.
        slots: Memory for clones of experts; chunks of a rank may share it. Default: its own.
        recompute: What the backward pass makes again instead of it being kept: ``{"layer"}``, each
            layer from its input, or parts of it as in ``train.recompute_modules``.

    Raises:
        ConfigError: If the tp size does not divide what it splits.

    Example:
        >>> config = ModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, ffn_hidden_size=16,
        ...                      num_layers=1, vocab_size=10, seq_length=4)
        >>> model = GPTChunk(config, layers=range(1), has_embedding=True, has_head=True,
        ...                  groups=ProcessGroups.single())
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> batch = Microbatch(tokens=tokens, labels=tokens + 1,
        ...                    sample_ids=torch.tensor([0]), step=0)
        >>> model(None, batch).shape, model.logits(None, batch).shape
        (torch.Size([]), torch.Size([1, 4, 10]))
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range,
        has_embedding: bool,
        has_head: bool,
        groups: ProcessGroups,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 1234,
        moe: MoEConfig | None = None,
        tied_weight: nn.Parameter | None = None,
        slots: SlotBuffers | None = None,
        recompute: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        moe = MoEConfig() if moe is None else moe
        self.shape = GPTShape.from_config(config)
        self.shape.check_layout(tp=groups.tp.size, sequence_parallel=sequence_parallel)
        self.region = Region(group=groups.tp, sequence_parallel=sequence_parallel, cp=groups.cp)
        params = ParamFactory(
            seed=seed,
            tp=groups.tp,
            etp=groups.etp,
            ep=groups.ep,
            dtype=dtype,
            device=torch.device(device),
        )
        self.moe_budget = StaticBudget(moe.static_budget)
        context = ModelContext(
            config=config,
            shape=self.shape,
            region=self.region,
            params=params,
            moe=moe,
            groups=groups,
            budget=self.moe_budget,
            slots=SlotBuffers(moe.echo.spare_slots) if slots is None else slots,
            recompute=recompute,
        )
        self.embedding = Embedding(context, with_head=has_head) if has_embedding else None
        self.layers = nn.ModuleList(TransformerLayer(index, context) for index in layers)
        if has_head and self.embedding is not None and self.shape.tie_embeddings:
            tied_weight = self.embedding.words.weight
        self.head = Head(context, tied_weight=tied_weight) if has_head else None
        cos, sin = rotary_tables(
            self.shape.seq_length, self.shape.head_dim, base=config.rope_base, device=params.device
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._param_infos = tuple(params.made)

    def forward(
        self, hidden_SBH: Tensor | None, batch: Microbatch, *, keep_activations: bool = False
    ) -> Tensor:
        """Run the chunk.

        Args:
            hidden_SBH: Output of the chunk before, ``(S[/tp], B, H)``; ``None`` with the embedding.
            batch: The microbatch, the same on every chunk.
            keep_activations: Keep all activations this time, whatever ``recompute`` says.

        Returns:
            ``(S[/tp], B, H)``; with the head the scalar mean loss over the microbatch's tokens, or
            over those of this cp rank's share, float32.

        Raises:
            ValueError: If the input does not belong to this chunk, the sequence is too long or has
                no even slices, or a head gets no labels.
        """
        hidden_SBH = self._hidden(hidden_SBH, batch, keep_activations=keep_activations)
        if self.head is None:
            return hidden_SBH
        if batch.labels is None:
            raise ValueError("the chunk with the head computes a loss, but the batch has no labels")
        return self.head(hidden_SBH, batch.labels)  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(
        self, hidden_SBH: Tensor | None, batch: Microbatch, *, last_only: bool = False
    ) -> Tensor:
        """Scores of the next token, for generation; only on a chunk with the head.

        Args:
            hidden_SBH: As for `forward`.
            batch: As for `forward`; labels are not needed.
            last_only: Only the scores after the last token.

        Returns:
            ``(B, S, vocab_size)``, float32, without padding, the same on every tp rank;
            ``(B, 1, vocab_size)`` with ``last_only``.

        Raises:
            ValueError: As `forward`, or if the chunk has no head or context parallelism splits the
                sequence.
        """
        if self.head is None:
            raise ValueError("only the chunk with the head has logits")
        if self.region.cp.size > 1:
            raise ValueError(
                f"logits are made for generation, which needs whole sequences on each rank; build "
                f"the model with cp = 1, not {self.region.cp.size}"
            )
        return self.head.logits(self._hidden(hidden_SBH, batch), last_only=last_only)

    def param_infos(self) -> list[tuple[ParamInfo, nn.Parameter]]:
        """Every parameter this chunk owns with its description, in order of creation."""
        return list(self._param_infos)

    def moe_layers(self) -> dict[int, MoELayer]:
        """The MoE layers of this chunk by their global index."""
        return {
            layer.index: layer.mlp.moe
            for layer in self.layers
            if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoEBlock)
        }

    def buffer_infos(self) -> list[tuple[ParamInfo, Tensor]]:
        """State that no optimizer updates but a checkpoint keeps: the biases of experts."""
        return [
            (
                ParamInfo(
                    name=f"layers.{index}.moe.expert_bias",
                    full_shape=tuple(layer.router.expert_bias.shape),
                    tp_dim=None,
                    weight_decay=False,
                ),
                layer.router.expert_bias,
            )
            for index, layer in self.moe_layers().items()
            if layer.router.expert_bias is not None
        ]

    def _hidden(
        self, hidden_SBH: Tensor | None, batch: Microbatch, *, keep_activations: bool = False
    ) -> Tensor:
        sequence = batch.shape[1]
        if sequence > self.shape.seq_length:
            raise ValueError(
                f"the batch has {sequence} tokens per sample, but the model was made for "
                f"seq_length = {self.shape.seq_length}"
            )
        if sequence % self.region.sequence_unit:
            raise ValueError(
                f"the sequence has {sequence} tokens, but with context parallelism "
                f"{self.region.cp.size} and sequence parallelism {self.region.num_slices} it must "
                f"be a multiple of {self.region.sequence_unit}"
            )
        if self.embedding is not None:
            if hidden_SBH is not None:
                raise ValueError("the chunk with the embedding takes tokens only, no activations")
            x_SBH: Tensor = self.embedding(batch)
        elif hidden_SBH is not None:
            x_SBH = hidden_SBH
        else:
            raise ValueError("a chunk without the embedding takes the output of the chunk before")
        rotary = self._rotary(sequence)
        for layer in self.layers:
            x_SBH = layer(x_SBH, rotary, batch, keep_activations=keep_activations)
        return x_SBH

    def _rotary(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Tables at the positions of this rank's tokens."""
        if self.region.cp.size == 1:
            return self.cos, self.sin
        positions = self.region.share_positions(sequence, device=self.cos.device)
        return self.cos[positions], self.sin[positions]


class Embedding(nn.Module):
    """Token embedding and its dropout."""

    def __init__(self, context: ModelContext, *, with_head: bool) -> None:
        super().__init__()
        shared = "embedding" if context.shape.tie_embeddings and not with_head else None
        weight = _vocab_matrix("embedding", context, shared=shared)
        self.words = VocabEmbedding(weight, context=context)
        self.dropout = ResidualDropout(layer=0, site=Site.EMBEDDING, context=context)

    def forward(self, batch: Microbatch) -> Tensor:
        """Tokens ``(B, S)`` to ``(S[/tp], B, H)``."""
        tokens_BS = self.dropout.region.share(batch.tokens)
        output: Tensor = self.dropout(self.words(tokens_BS), batch)
        return output


class Head(nn.Module):
    """Final norm, output layer split over the vocabulary, and loss.

    Columns of the padded vocabulary are never computed, so the loss does not depend on padding.
    """

    def __init__(self, context: ModelContext, *, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        self.region = context.region
        self.norm = RMSNorm("final_norm", context)
        if not context.shape.tie_embeddings:
            self.weight = _vocab_matrix("head", context)
        elif tied_weight is not None:
            self.weight = tied_weight
        else:
            self.weight = _vocab_matrix(
                "embedding", context, shared="embedding", is_shared_copy=True
            )
        self.vocab = context.shape.vocab
        num_rows = self.weight.shape[0]
        self.first_column = context.region.group.position * num_rows
        self.num_columns = min(max(self.vocab - self.first_column, 0), num_rows)

    def forward(self, x_SBH: Tensor, labels_BS: Tensor) -> Tensor:
        """``(S[/tp], B, H)``, labels of whole sequences: the mean loss of this cp rank's share."""
        # A slice of everything would still cost a copy of the gradient.
        padded = self.num_columns < self.weight.shape[0]
        weight_VH = self.weight[: self.num_columns] if padded else self.weight
        return cross_entropy(
            linear(self.region.enter(self.norm(x_SBH)), weight_VH),
            self.region.share(labels_BS).t(),
            first_column=self.first_column,
            group=self.region.group,
        )

    def logits(self, x_SBH: Tensor, *, last_only: bool) -> Tensor:
        """``(S[/tp], B, H)`` to float32 scores ``(B, S, vocab)``, or of the last token only."""
        x_SBH = self.region.enter(self.norm(x_SBH))
        # All rows, with padding: every rank must bring equally many. The vocabulary comes first,
        # because all_gather joins along dimension 0.
        local_VSB = linear(x_SBH[-1:] if last_only else x_SBH, self.weight).movedim(-1, 0)
        group = self.region.group
        full_VSB = local_VSB.new_empty(group.size * local_VSB.shape[0], *local_VSB.shape[1:])
        all_gather(full_VSB, local_VSB.contiguous(), group)
        return full_VSB[: self.vocab].permute(2, 1, 0).float()


def _vocab_matrix(
    name: str, context: ModelContext, *, shared: str | None = None, is_shared_copy: bool = False
) -> nn.Parameter:
    shape = context.shape
    info = ParamInfo(
        name=name,
        full_shape=(shape.padded_vocab, shape.hidden),
        tp_dim=0,
        shared=shared,
        is_shared_copy=is_shared_copy,
    )
    return context.params.normal(info, std=context.config.init_std, drawn_rows=shape.vocab)
