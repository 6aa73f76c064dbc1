"""Descriptions of the parameters of a GPT, by block, in the order in which the model makes them.

The constructors of the blocks, the count of parameters and the planner read them. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megacore.parallel.param_info import Matrices, ParamInfo
from megatrain.config import LoraConfig, ModelConfig, MoEConfig
from megatrain.config.lora import NO_ADAPTERS
from megatrain.models.adapter_infos import describe_adapters
from megatrain.models.shape import GPTShape

# By name.
Infos = dict[str, ParamInfo]


@dataclass(frozen=True, kw_only=True)
class GPTInfos:
    """Descriptions of the parameters of each block; ``name`` is the prefix of their names.

    Attributes:
        config: The ``[model]`` section.
        moe: The ``[moe]`` section.
        shape: Derived sizes.
        sequence_parallel: Whether tp ranks have slices of the sequence between their regions.
        lora: The ``[lora]`` section.

    Example:
        >>> infos = GPTInfos.of(ModelConfig(hidden_size=8, ffn_hidden_size=16, vocab_size=10))
        >>> [(name, info.full_shape) for name, info in infos.mlp("layers.0.mlp", 16).items()]
        [('layers.0.mlp.gate_up', (2, 16, 8)), ('layers.0.mlp.down', (8, 16))]
    """

    config: ModelConfig
    moe: MoEConfig
    shape: GPTShape
    sequence_parallel: bool = False
    lora: LoraConfig = NO_ADAPTERS

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        moe: MoEConfig | None = None,
        *,
        sequence_parallel: bool = False,
        lora: LoraConfig | None = None,
    ) -> GPTInfos:
        """Describe the model of these sections."""
        return cls(
            config=config,
            moe=MoEConfig() if moe is None else moe,
            shape=GPTShape.from_config(config),
            sequence_parallel=sequence_parallel,
            lora=NO_ADAPTERS if lora is None else lora,
        )

    # ---- linear layers and norms ----

    def column(
        self,
        name: str,
        full_shape: tuple[int, ...],
        *,
        tp_dim: int,
        bias: bool = False,
        matrices: Matrices | None = None,
    ) -> Infos:
        """Describe a linear layer whose outputs are split over tp; by default one matrix."""
        weight = ParamInfo(
            name=name, full_shape=full_shape, tp_dim=tp_dim, matrices=matrices or Matrices()
        )
        biases = [_bias(weight, tp_dim)] if bias else []
        return _by_name([weight, *biases]) | self.adapters(weight)

    def row(self, name: str, num_inputs: int, *, bias: bool = False) -> Infos:
        """Describe a linear layer to the residual stream whose inputs are split over tp."""
        weight = ParamInfo(
            name=name,
            full_shape=(self.shape.hidden, num_inputs),
            tp_dim=1,
            matrices=Matrices(),
        )
        # Added to the sum over ranks: each rank has its tokens with sequence parallelism.
        biases = [self._vector(f"{name}_bias")] if bias else []
        return _by_name([weight, *biases]) | self.adapters(weight)

    def adapters(self, info: ParamInfo) -> Infos:
        """Describe the adapters of a linear layer's weight; those of predictions have none."""
        layer = info.name.split(".")[1] if info.name.startswith("layers.") else "0"
        is_further = layer.isdecimal() and int(layer) >= self.shape.num_layers
        return {} if is_further else describe_adapters(info, self.lora)

    def norm(self, name: str, *, bias: bool = False) -> Infos:
        """Describe a norm over the residual stream."""
        return _by_name(
            self._vector(part) for part in ((name, f"{name}_bias") if bias else (name,))
        )

    def model_norm(self, name: str) -> Infos:
        """Describe the norm of ``model.norm``."""
        return self.norm(name, bias=self.config.norm == "layernorm" and self.config.norm_bias)

    def block_norms(self, name: str) -> Infos:
        """Describe the norms of a block."""
        infos = self.model_norm(f"{name}.norm")
        if self.config.norm_position == "both":
            infos |= self.model_norm(f"{name}.output_norm")
        return infos

    # ---- attention ----

    def attention(self, name: str) -> Infos:
        """Describe attention."""
        return self.mla(name) if self.config.mla.kv_rank else self.gqa(name)

    def gqa(self, name: str) -> Infos:
        """Describe grouped-query attention."""
        shape, config = self.shape, self.config
        infos = self.column(
            f"{name}.qkv",
            shape.qkv_full_shape,
            tp_dim=0,
            bias=config.qkv_bias,
            matrices=Matrices(
                sections=(shape.q_per_kv * shape.head_dim, shape.head_dim, shape.head_dim)
            ),
        )
        width = shape.num_heads * shape.head_dim
        infos |= self.row(f"{name}.output", width, bias=config.output_bias)
        infos |= self.qk_norm(name)
        if config.attention_sinks:
            sinks = ParamInfo(
                name=f"{name}.sinks",
                full_shape=(shape.num_kv_heads, shape.q_per_kv),
                tp_dim=0,
                weight_decay=False,
            )
            infos |= _by_name([sinks])
        return infos

    def qk_norm(self, name: str) -> Infos:
        """Describe the norms of queries and keys of ``model.qk_norm``."""
        shape, kind = self.shape, self.config.qk_norm
        names = (f"{name}.q_norm", f"{name}.k_norm")
        if kind == "full":  # each rank has the weights of its heads
            widths = (shape.q_per_kv * shape.head_dim, shape.head_dim)
            return _by_name(
                ParamInfo(
                    name=part,
                    full_shape=(shape.num_kv_heads, width),
                    tp_dim=0,
                    weight_decay=False,
                )
                for part, width in zip(names, widths, strict=True)
            )
        return _by_name(
            ParamInfo(
                name=part,
                full_shape=(shape.head_dim,),
                tp_dim=None,
                # Each tp rank has its own heads only, so gradients are always summed.
                sequence_parallel=True,
                weight_decay=False,
            )
            for part in (names if kind.startswith("head") else ())
        )

    def mla(self, name: str) -> Infos:
        """Describe multi-head latent attention."""
        mla, heads, hidden = self.config.mla, self.shape.num_heads, self.shape.hidden
        up_width = mla.nope_head_dim + mla.rope_head_dim

        def down(part: str, *full_shape: int) -> Infos:
            info = ParamInfo(
                name=f"{name}.{part}",
                full_shape=full_shape,
                tp_dim=None,
                # Inside the region, each rank has the gradient of its own heads only.
                sequence_parallel=self.sequence_parallel or not mla.q_rank,
                weight_decay=len(full_shape) > 1,
                matrices=Matrices() if len(full_shape) > 1 else None,
            )
            return _by_name([info]) | (self.adapters(info) if info.matrices else {})

        if mla.q_rank:
            infos = down("q_down", mla.q_rank, hidden) | down("q_latent_norm", mla.q_rank)
        else:
            infos = self.column(f"{name}.q", (heads, up_width, hidden), tp_dim=0)
        infos |= down("kv_down", mla.kv_rank + mla.rope_head_dim, hidden)
        infos |= down("kv_latent_norm", mla.kv_rank)
        if mla.q_rank:
            infos |= self.column(f"{name}.q_up", (heads, up_width, mla.q_rank), tp_dim=0)
        kv_width = mla.nope_head_dim + mla.v_head_dim
        infos |= self.column(
            f"{name}.kv_up",
            (heads, kv_width, mla.kv_rank),
            tp_dim=0,
            matrices=Matrices(sections=(mla.nope_head_dim, mla.v_head_dim)),
        )
        return infos | self.row(f"{name}.output", heads * mla.v_head_dim)

    # ---- MLP and experts ----

    def mlp(self, name: str, width: int) -> Infos:
        """Describe an MLP."""
        hidden, bias = self.shape.hidden, self.config.mlp_bias
        if self.config.gated:
            wide = self.column(
                f"{name}.gate_up",
                (2, width, hidden),
                tp_dim=1,
                bias=bias,
                matrices=Matrices(batch_dims=1),
            )
        else:
            wide = self.column(f"{name}.up", (width, hidden), tp_dim=0, bias=bias)
        return wide | self.row(f"{name}.down", width, bias=bias)

    def shared_expert(self, name: str) -> Infos:
        """Describe the shared expert of a MoE block and its gate, if there are any."""
        moe = self.moe
        if not moe.shared_ffn_hidden_size:
            return {}
        infos = self.mlp(f"{name}.shared", moe.shared_ffn_hidden_size)
        return infos | (self.shared_gate(f"{name}.shared_gate") if moe.shared_gate else {})

    def shared_gate(self, name: str) -> Infos:
        """Describe the gate of a shared expert."""
        return _by_name([self._replicated(name, (1, self.shape.hidden))])

    def moe_block(self, name: str) -> Infos:
        """Describe the router and the experts of a MoE block."""
        moe, hidden = self.moe, self.shape.hidden
        # Each tp rank routes its own tokens, so gradients are always summed.
        router = ParamInfo(
            name=f"{name}.router",
            full_shape=(moe.num_experts, hidden),
            tp_dim=None,
            sequence_parallel=True,
            matrices=Matrices(),
        )
        width = moe.ffn_hidden_size or self.shape.ffn
        inner = (2, width) if moe.gated else (width,)
        fc1 = ParamInfo(
            name=f"{name}.experts.fc1",
            full_shape=(moe.num_experts, *inner, hidden),
            tp_dim=len(inner),
            ep_dim=0,
            expert=True,
            matrices=Matrices(batch_dims=len(inner)),
        )
        fc2 = replace(
            fc1,
            name=f"{name}.experts.fc2",
            full_shape=(moe.num_experts, hidden, width),
            tp_dim=2,
            matrices=Matrices(batch_dims=1),
        )
        adapters = self.adapters(fc1) | self.adapters(fc2)
        if not moe.biases:
            return _by_name([router, fc1, fc2]) | adapters
        biases = (_bias(router, None), fc1, fc2, _bias(fc1, fc1.tp_dim), _bias(fc2, None))
        return _by_name([router, *biases]) | adapters

    # ---- layers and stages ----

    def layer(self, index: int) -> Infos:
        """Describe the transformer layer with this global index."""
        name = f"layers.{index}"
        infos = self.block_norms(f"{name}.attention") | self.attention(f"{name}.attention")
        block = f"{name}.moe" if self.moe.is_moe_layer(index) else f"{name}.mlp"
        if not self.config.parallel_blocks:
            infos |= self.block_norms(block)
        if not self.moe.is_moe_layer(index):
            return infos | self.mlp(block, self.shape.ffn)
        return infos | self.shared_expert(f"{name}.moe") | self.moe_block(f"{name}.moe")

    def prediction_layer(self, index: int) -> Infos:
        """Describe the layer for multi-token prediction with this global index."""
        name, hidden = f"layers.{index}.mtp", self.shape.hidden
        infos = self.model_norm(f"{name}.hidden_norm") | self.model_norm(f"{name}.embedding_norm")
        # Replicated over tp: with sequence parallelism, each rank applies it to its own tokens.
        projection = self._replicated(f"{name}.projection", (hidden, 2 * hidden))
        infos |= _by_name([replace(projection, matrices=Matrices())])
        return infos | self.layer(index) | self.model_norm(f"{name}.final_norm")

    def vocab_matrix(
        self, name: str, *, shared: str | None = None, is_shared_copy: bool = False
    ) -> ParamInfo:
        """Describe the embedding or the output layer."""
        return ParamInfo(
            name=name,
            full_shape=(self.shape.padded_vocab, self.shape.hidden),
            tp_dim=0,
            shared=shared,
            is_shared_copy=is_shared_copy,
        )

    def embedding(self, *, is_shared: bool) -> ParamInfo:
        """Describe the embedding; ``is_shared`` if other stages have copies of it."""
        return self.vocab_matrix("embedding", shared="embedding" if is_shared else None)

    def positions(self) -> ParamInfo:
        """Describe the table of learned positions."""
        return self._replicated("positions", (self.config.learned_positions, self.shape.hidden))

    def embedding_copy(self) -> ParamInfo:
        """Describe the copy of the embedding on another stage."""
        return self.vocab_matrix("embedding", shared="embedding", is_shared_copy=True)

    def stage(
        self,
        layers: Iterable[int],
        *,
        has_embedding: bool,
        has_head: bool,
        mtp_layers: Iterable[int] = (),
        has_words: bool = False,
    ) -> Infos:
        """Describe a pipeline stage.

        Args:
            layers: Global indices of its layers.
            has_embedding: Whether it starts the model.
            has_head: Whether it ends the model.
            mtp_layers: Its layers for multi-token prediction.
            has_words: Whether an earlier stage of the rank has the embedding.
        """
        mtp_layers = tuple(mtp_layers)
        predicts_elsewhere = self.config.num_mtp_layers > 0 and not mtp_layers
        is_tied = self.shape.tie_embeddings
        has_words = has_words or has_embedding
        infos: Infos = {}
        if has_embedding:
            is_shared = predicts_elsewhere or (is_tied and not has_head)
            infos |= _by_name([self.embedding(is_shared=is_shared)])
            infos |= _by_name([self.positions()] if self.config.learned_positions else [])
        for index in layers:
            infos |= self.layer(index)
        if mtp_layers or (has_head and not predicts_elsewhere):
            infos |= self.model_norm("final_norm")
        if mtp_layers and not has_words:
            infos |= _by_name([self.embedding_copy()])
        for index in mtp_layers:
            infos |= self.prediction_layer(index)
        if has_head and not is_tied:
            infos |= _by_name([self.vocab_matrix("head")])
        elif has_head and not has_words and not mtp_layers:
            infos |= _by_name([self.embedding_copy()])
        return infos

    def _vector(self, name: str) -> ParamInfo:
        """Describe a vector over the residual stream."""
        return replace(self._replicated(name, (self.shape.hidden,)), weight_decay=False)

    def _replicated(self, name: str, full_shape: tuple[int, ...]) -> ParamInfo:
        """Describe a parameter that every tp rank applies to its tokens of the residual stream."""
        return ParamInfo(
            name=name,
            full_shape=full_shape,
            tp_dim=None,
            sequence_parallel=self.sequence_parallel,
        )


def takes_fp8(info: ParamInfo) -> bool:
    """Return whether ``train.fp8`` gives the product with this weight 8-bit operands."""
    return info.matrices is not None and not info.name.endswith((".router", ".projection"))


def _by_name(infos: Iterable[ParamInfo]) -> Infos:
    return {info.name: info for info in infos}


def _bias(matrix: ParamInfo, tp_dim: int | None) -> ParamInfo:
    """Describe the bias of a matrix, split along ``tp_dim``."""
    return replace(
        matrix,
        name=f"{matrix.name}_bias",
        full_shape=matrix.full_shape[:-1],
        tp_dim=tp_dim,
        weight_decay=False,
        matrices=None,
    )
