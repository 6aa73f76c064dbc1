"""Model chunk of a GPT: some of its layers, optionally with the embedding or the head.

Shapes: S sequence, B batch, H hidden, V vocabulary. Activations are ``(S, B, H)``, or slices
``(S/tp, B, H)`` with sequence parallelism; S is a cp rank's share with context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from megacore.moe.balance import inject_gradient
from megacore.moe.experts import GroupedExperts
from megacore.ops.activations import softcap
from megacore.ops.linear import linear
from megacore.parallel.batch import Documents, Microbatch
from megacore.parallel.collectives import all_gather
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import use_params
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import ModelConfig, MoEConfig
from megatrain.models.attention.rotary import RotaryTables
from megatrain.models.dropout import Site
from megatrain.models.group_loss import GroupLossSum
from megatrain.models.head_loss import head_token_losses
from megatrain.models.layers import ModelContext, ResidualDropout, VocabEmbedding, make_norm
from megatrain.models.loss import (
    Loss,
    LossContext,
    mean_of_labels,
    token_loss,
    token_losses,
)
from megatrain.models.multi_token import NO_LABEL, MultiTokenPrediction, ahead
from megatrain.models.shape import GPTShape, block_columns
from megatrain.models.stage import ContextOptions, Stage, make_context
from megatrain.models.transformer import TransformerLayer


class GPTChunk(Stage):
    """One rank's part of the layers ``layers`` of a GPT.

    The whole model is ``GPTChunk(config, layers=range(num_layers), has_embedding=True,
    has_head=True, groups=ProcessGroups.single())``. Consecutive chunks compute exactly the same as
    the whole model. A chunk may have no layers.

    Args:
        config: A resolved ``[model]`` section.
        layers: Global indices of the layers in this chunk.
        has_embedding: Whether the chunk starts the model and takes tokens.
        has_head: Whether the chunk ends the model and returns the loss.
        groups: Process groups; the tp group splits the layers.
        moe: A resolved ``[moe]`` section. Default: every layer is dense.
        tied_weight: The embedding, or its copy, of another chunk on this rank. A tied head and
            layers for multi-token prediction use it instead of another copy.
        mtp_layers: Global indices of the layers for multi-token prediction in this chunk. Default:
            all of them with the head, none without.
        loss: Loss of the head's logits, or of groups of answers.
        sequence_parallel: Split activations between tensor-parallel regions along the sequence.
            Default: not.
        cp_comm: Exchange of context parallelism, see ``parallel.cp_comm``. Default: ``allgather``.
        dtype: Number format of parameters and activations. Norms and the loss are computed in
            float32 at least. Default: float32.
        device: Device of the parameters. Default: the CPU.
        seed: Seed of initial weights and dropout. Default: 1234.
        slots: Memory for clones of experts; chunks of a rank may share it. Default: allocated.
        peers: Peer memory of the ``static`` dispatcher; chunks of a rank may share it. Default:
            allocated if needed.
        recompute: Activations to recompute in the backward pass: ``{"layer"}``, each layer from its
            input, or parts of it as in ``train.recompute``. Default: none.
        fp8: Whether the products of linear layers and experts have 8-bit operands. Default: not.
        force_balanced: Give all experts the same number of tokens, regardless of scores. Default:
            not.
        initialize: Draw initial weights, the default; else matrices must be filled before use.
        lora: A ``[lora]`` section. Default: no adapters.

    Raises:
        ConfigError: If the tp size does not divide a split dimension.

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

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range,
        has_embedding: bool,
        has_head: bool,
        groups: ProcessGroups,
        moe: MoEConfig | None = None,
        tied_weight: nn.Parameter | None = None,
        mtp_layers: range | None = None,
        loss: Loss | GroupLossSum = token_loss,
        **options: Unpack[ContextOptions],
    ) -> None:
        shape = GPTShape.from_config(config)
        is_split = options.get("sequence_parallel", False)
        shape.check_layout(tp=groups.tp.size, sequence_parallel=is_split)
        context = make_context(config, MoEConfig() if moe is None else moe, groups, **options)
        super().__init__(context)
        self.shape = shape
        if mtp_layers is None:
            mtp_layers = config.mtp_layers if has_head else range(0)
        infos = context.infos.stage(
            layers,
            has_embedding=has_embedding,
            has_head=has_head,
            mtp_layers=mtp_layers,
            has_words=tied_weight is not None,
        )
        self.embedding = None
        if has_embedding:
            is_shared = infos["embedding"].shared is not None
            self.embedding = Embedding(context, is_shared=is_shared)
            tied_weight = self.embedding.words.weight
        self.layers = nn.ModuleList(TransformerLayer(index, context) for index in layers)
        # MTP outputs are concatenated along the sequence dimension and already normalized.
        self._takes_predictions = has_head and config.num_mtp_layers > 0 and not mtp_layers
        self.final_norm = make_norm("final_norm", context) if "final_norm" in infos else None
        self.predictions = None
        if mtp_layers:
            tied_weight = _embedding_copy(context) if tied_weight is None else tied_weight
            self.predictions = MultiTokenPrediction(mtp_layers, context, embedding=tied_weight)
        self.head = Head(context, tied_weight=tied_weight, loss=loss) if has_head else None
        self._mtp_coef = config.mtp_loss_coef / max(1, config.num_mtp_layers)
        device, num_rotated = context.params.device, config.num_rotated
        self._rotation_of = config.rotation_of
        self.tables = RotaryTables(config, num_rotated, device=device)
        kinds = {config.rotation_of(index) for index in layers} - {"main"}
        self.further_tables = nn.ModuleDict(
            {
                kind: RotaryTables(config, num_rotated, device=device, kind=kind)
                for kind in sorted(kinds)
            }
        )

    def forward(
        self, hidden_SBH: Tensor | None, batch: Microbatch, *, keep_activations: bool = False
    ) -> Tensor:
        """Run the chunk.

        Args:
            hidden_SBH: Output of the previous chunk, ``(S[/tp], B, H)``; ``None`` with the
                embedding. After the chunk with layers for multi-token prediction: the outputs of
                all depths, ``((1 + D) * S[/tp], B, H)``.
            batch: The microbatch, the same on every chunk.
            keep_activations: Keep all activations of this call, regardless of ``recompute``.

        Returns:
            ``(S[/tp], B, H)``; with the head, the scalar mean loss over the microbatch's tokens, or
            over this cp rank's tokens, float32. Losses of multi-token prediction are not included;
            they are added in its backward pass with ``batch.loss_factor``.

        Raises:
            ValueError: If the input does not match this chunk, the sequence is too long or cannot
                be sliced evenly, or the labels of a head are missing.
        """
        hidden_SBH = self._hidden(hidden_SBH, batch, keep_activations=keep_activations)
        if self.head is None:
            return hidden_SBH
        if batch.labels is None:
            raise ValueError("the chunk with the head computes a loss, but the batch has no labels")
        num_outputs = 1 + self.mtp_sums.shape[1]
        if num_outputs == 1:
            return self.head(hidden_SBH, batch)  # type: ignore[no-any-return]
        main_SBH, *further = hidden_SBH.chunk(num_outputs)
        loss: Tensor = self.head(main_SBH, batch)
        adds = self.training and not isinstance(self.head.loss, GroupLossSum)
        return self._add_predictions(loss, further, batch) if adds else loss

    def _add_predictions(
        self, loss: Tensor, outputs: Sequence[Tensor], batch: Microbatch
    ) -> Tensor:
        """Attach the losses of multi-token prediction to the backward pass of the loss.

        As in the paper, each is a sum over the predicted tokens, divided by the number of tokens of
        the sequence. Here this is the number of labels that count in the mean of the loss, which
        may all be those of other ranks.
        """
        assert self.head is not None
        assert batch.labels is not None
        factor = batch.label_factor
        if factor is None:
            num_labels = (self.region.share(batch.labels) >= 0).sum()
            factor = batch.loss_factor / num_labels.clamp(min=1)
        for depth, output_SBH in enumerate(outputs):
            labels_BS = ahead(batch.labels, depth + 1, fill=NO_LABEL)
            if batch.documents is not None:
                # The tokens from here to the input of the prediction are in one document.
                positions_BS = batch.documents.positions
                input_BS = ahead(positions_BS, depth + 1, fill=NO_LABEL)
                inside_BS = input_BS == positions_BS + depth + 1
                labels_BS = labels_BS.masked_fill(~inside_BS, NO_LABEL)
            num_predicted = (self.region.share(labels_BS) >= 0).sum()
            mean = self.head(output_SBH, replace(batch, labels=labels_BS))
            loss = inject_gradient(loss, mean * num_predicted * self._mtp_coef, factor)
            with torch.no_grad():
                self.mtp_sums[0, depth] += mean * num_predicted
                self.mtp_sums[1, depth] += num_predicted
        return loss

    @torch.no_grad()
    def logits(
        self,
        hidden_SBH: Tensor | None,
        batch: Microbatch,
        *,
        last_only: bool = False,
        start: int = 0,
    ) -> Tensor:
        """Compute scores of the next token, for generation; only on a chunk with the head.

        Args:
            hidden_SBH: As in `forward`.
            batch: As in `forward`; labels are not needed.
            last_only: Return only the scores after the last token.
            start: Position of the batch's first token; the layers have the tokens before it from
                earlier calls, see `remembering`.

        Returns:
            ``(B, S, vocab_size)``, float32, without padding, the same on every tp rank;
            ``(B, 1, vocab_size)`` with ``last_only``.

        Raises:
            ValueError: As in `forward`, or if the chunk has no head, or the sequence is split by
                context parallelism.
        """
        if self.head is None:
            raise ValueError("only the chunk with the head has logits")
        if self.region.cp.size > 1:
            raise ValueError(
                f"logits are made for generation, which needs whole sequences on each rank; build "
                f"the model with cp = 1, not {self.region.cp.size}"
            )
        outputs_SBH = self._hidden(hidden_SBH, batch, only_next=True, start=start)
        if self._takes_predictions:
            outputs_SBH = outputs_SBH.chunk(1 + self.mtp_sums.shape[1])[0]
        return self.head.logits(outputs_SBH, last_only=last_only)

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding weight of this chunk, or its copy, or ``None``."""
        if self.embedding is not None:
            return self.embedding.words.weight
        if self.predictions is not None:
            return self.predictions.words.weight
        tied = self.head is not None and self.shape.tie_embeddings
        return self.head.weight if tied and self.head is not None else None

    def ordered_modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield the embedding, the whole chunk and the modules of all layers, see `Stage`."""
        if self.embedding is not None:
            yield -1, "the embedding", self.embedding
        yield 1 << 30, "the last layers of this stage", self
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            for name, module in layer.named_modules():
                if isinstance(module, GroupedExperts):
                    continue  # rows that did not arrive have no values
                dot = "." if name else ""
                yield layer.index, f"layers.{layer.index}{dot}{name}", module

    def _hidden(
        self,
        hidden_SBH: Tensor | None,
        batch: Microbatch,
        *,
        keep_activations: bool = False,
        only_next: bool = False,
        start: int = 0,
    ) -> Tensor:
        sequence = batch.shape[1]
        if start + sequence > self.shape.seq_length:
            raise ValueError(
                f"the batch has {start + sequence} tokens per sample, but the model was made for "
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
            x_SBH: Tensor = self.embedding(batch, start=start)
        elif hidden_SBH is not None:
            x_SBH = hidden_SBH
        else:
            raise ValueError("a chunk without the embedding takes the output of the chunk before")
        rotary = {}
        for kind in ("main", *self.further_tables):
            cos, sin = self._tables_of(kind, start + sequence, batch.documents)
            rotary[kind] = (cos[start:], sin[start:]) if start else (cos, sin)
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            turns = rotary[self._rotation_of(layer.index)]
            x_SBH = layer(x_SBH, turns, batch, keep_activations=keep_activations)
        if self.final_norm is not None:
            x_SBH = self.final_norm(x_SBH)
        if self.predictions is not None and not only_next:
            x_SBH = self.predictions(
                x_SBH, rotary["main"], batch, keep_activations=keep_activations
            )
        return x_SBH

    def rotary(self, sequence: int, *, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Return a layer's rotary tables at the positions of this rank's tokens of a sequence."""
        return self._tables_of(self._rotation_of(layer), sequence, None)

    def _tables_of(
        self, kind: str, sequence: int, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        tables = self.tables if kind == "main" else self.further_tables[kind]
        assert isinstance(tables, RotaryTables)
        if documents is not None:
            cos, sin = tables(sequence)
            positions = self.region.share(documents.positions).t()
            return cos[positions], sin[positions]
        return tables.share(sequence, self.region)


class Embedding(nn.Module):
    """Token embedding, with learned positions if the model has them, and its dropout."""

    def __init__(self, context: ModelContext, *, is_shared: bool = False) -> None:
        super().__init__()
        weight = _vocab_matrix(context.infos.embedding(is_shared=is_shared), context)
        self.words = VocabEmbedding(weight, context=context)
        self.positions = None
        if context.config.learned_positions:
            info = context.infos.positions()
            self.positions = context.params.normal(info, std=context.config.init_std)
        self.dropout = ResidualDropout(layer=0, site=Site.EMBEDDING, context=context)

    def forward(self, batch: Microbatch, *, start: int = 0) -> Tensor:
        """Embed tokens: ``(B, S)`` to ``(S[/tp], B, H)``; the first has position ``start``."""
        tokens_BS = self.dropout.region.share(batch.tokens)
        x_SBH = self.words(tokens_BS)
        if self.positions is not None:
            x_SBH = x_SBH + self.positions[self._places(x_SBH, batch, start)]
        output: Tensor = self.dropout(x_SBH, batch)
        return output

    def _places(self, x_SBH: Tensor, batch: Microbatch, start: int) -> Tensor:
        """Return the positions of this rank's tokens, ``(S[/tp], 1)`` or ``(S[/tp], B)``."""
        region, num_tokens = self.dropout.region, x_SBH.shape[0]
        places_S = region.positions(num_tokens, device=x_SBH.device)
        if batch.documents is None:
            return start + places_S[:, None]
        return batch.documents.positions.t()[places_S]


class Head(nn.Module):
    """Output layer split over the vocabulary, and loss.

    Columns of the padded vocabulary are never computed, so the loss does not depend on padding.
    """

    def __init__(
        self,
        context: ModelContext,
        *,
        tied_weight: nn.Parameter | None = None,
        loss: Loss | GroupLossSum = token_loss,
    ) -> None:
        super().__init__()
        self.region = context.region
        self.loss, self.context = loss, LossContext.of(context.region, context.shape)
        # Called with the losses of labels `(S, B)`, and the microbatch, of each pass.
        self.recorder: Callable[[Tensor, Microbatch], None] | None = None
        if not context.shape.tie_embeddings:
            self.weight = _vocab_matrix(context.infos.vocab_matrix("head"), context)
        elif tied_weight is not None:
            self.weight = tied_weight
        else:
            self.weight = _embedding_copy(context)
        self.vocab = context.shape.vocab
        self.softcap, self.factor = context.config.logit_softcap, context.config.logit_factor
        rows = self.weight.shape[0]
        self.num_columns = min(max(self.vocab - self.context.first_column, 0), rows)

    def forward(self, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        """Compute this cp rank's mean loss of normalized ``(S[/tp], B, H)`` and the labels.

        The logits of the default loss are computed in blocks of columns if they are large.
        """
        compares = isinstance(self.loss, GroupLossSum)
        if self.loss is token_loss or compares or self.recorder is not None:
            losses_SB = self.token_losses(x_SBH, batch)
            if self.recorder is not None:
                self.recorder(losses_SB, batch)
            if compares:
                return self.loss(losses_SB, batch, self.context)
            if self.loss is token_loss:
                return mean_of_labels(losses_SB, self.context.labels(batch))
        return self.loss(self.columns(x_SBH), batch, self.context)

    def token_losses(self, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        """Compute the loss of each label of this cp rank, ``(S, B)``, in blocks if it is large."""
        tokens = x_SBH.shape[0] * self.region.num_slices * x_SBH.shape[1]
        columns = block_columns(tokens, self.weight.shape[0])
        if columns is None:
            return token_losses(
                self.columns(x_SBH),
                self.context.labels(batch),
                first_column=self.context.first_column,
                group=self.region.group,
            )
        use_params(self)
        return head_token_losses(
            self.region.enter(self._scaled(x_SBH)),
            self.weight,
            self.context.labels(batch),
            num_columns=self.num_columns,
            columns=columns,
            first_column=self.context.first_column,
            softcap=self.softcap,
            group=self.region.group,
        )

    def columns(self, x_SBH: Tensor) -> Tensor:
        """Compute the logits of this tp rank's columns: ``(S[/tp], B, H)`` to ``(S, B, V/tp)``."""
        use_params(self)
        # Even a full slice would cost a copy of the gradient.
        padded = self.num_columns < self.weight.shape[0]
        weight_VH = self.weight[: self.num_columns] if padded else self.weight
        return softcap(linear(self.region.enter(self._scaled(x_SBH)), weight_VH), self.softcap)

    def logits(self, x_SBH: Tensor, *, last_only: bool) -> Tensor:
        """Compute float32 scores ``(B, S, vocab)`` of normalized ``(S[/tp], B, H)``."""
        x_SBH = self.region.enter(self._scaled(x_SBH))
        x_SBH = x_SBH[-1:] if last_only else x_SBH
        if self.region.group.size == 1:
            local_SBV = linear(x_SBH, self.weight[: self.vocab])
            return softcap(local_SBV.transpose(0, 1).float(), self.softcap)
        # All rows, with padding, as every rank must contribute equally many. The vocabulary is
        # the first dimension, because all_gather concatenates along dimension 0.
        local_VSB = linear(x_SBH, self.weight).movedim(-1, 0)
        group = self.region.group
        full_VSB = local_VSB.new_empty(group.size * local_VSB.shape[0], *local_VSB.shape[1:])
        all_gather(full_VSB, local_VSB.contiguous(), group)
        return softcap(full_VSB[: self.vocab].permute(2, 1, 0).float(), self.softcap)

    def _scaled(self, x_SBH: Tensor) -> Tensor:
        """Apply the factor on logits, to fewer values than these."""
        return x_SBH if self.factor == 1.0 else x_SBH * self.factor


def _embedding_copy(context: ModelContext) -> nn.Parameter:
    return _vocab_matrix(context.infos.embedding_copy(), context)


def _vocab_matrix(info: ParamInfo, context: ModelContext) -> nn.Parameter:
    std, rows = context.config.init_std, context.shape.vocab
    return context.params.normal(info, std=std, drawn_rows=rows)
