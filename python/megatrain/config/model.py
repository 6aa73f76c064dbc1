"""The ``[model]`` section: the shape of the GPT."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megacore.errors import ConfigError
from megatrain.config.base import (
    Section,
    check_pattern,
    divisors,
    letter_of_layer,
    nearest_divisors,
    nearest_multiples,
    nearest_of,
)
from megatrain.config.model_tables import MLAConfig, QueryScalingConfig, RopeScalingConfig
from megatrain.config.user_objects import check_object_name


class ModelConfig(Section):
    """``[model]``: the shape of the GPT."""

    factory: str | None = Field(
        default=None,
        description="Function that builds the stages of a model of your own, as "
        "`package.module:name`, see own-model.md. Default: megacore's GPT.",
    )
    options: dict[str, Any] = Field(
        default={},
        description="Settings of `factory`, a table of any names with numbers, text or switches.",
    )
    hidden_size: int = Field(default=128, ge=1, description="Width of the residual stream.")
    num_layers: int = Field(default=4, ge=1, le=16384, description="Number of transformer layers.")
    num_heads: int = Field(
        default=4,
        ge=1,
        description="Attention heads; must divide `hidden_size` unless `head_dim` is set.",
    )
    head_dim: int | None = Field(
        default=None,
        ge=2,
        multiple_of=2,
        description="Width of one attention head, even. Default: `hidden_size` / `num_heads`.",
    )
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        description="Heads of keys and values (grouped-query attention); must divide `num_heads`. "
        "Default: `num_heads`.",
    )
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of the MLP. "
        "Default: 8/3 of `hidden_size`, rounded up to a multiple of 64.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens in the vocabulary. Default: that of the tokenizer.",
    )
    vocab_pad_multiple: int = Field(
        default=128,
        ge=1,
        description="Embedding rows are padded to a multiple of this number; "
        "`parallel.tp` must divide it.",
    )
    seq_length: int = Field(default=128, ge=1, description="Tokens per sequence.")
    num_mtp_layers: int = Field(
        default=0,
        ge=0,
        description="Layers for multi-token prediction: the k-th predicts the token k places after "
        "the next one. They are used in training only; generation omits them.",
    )
    mtp_loss_coef: float = Field(
        default=0.1, ge=0.0, description="Weight of the mean loss of multi-token prediction."
    )
    tie_embeddings: bool = Field(
        default=True, description="Use one matrix for the token embedding and the output layer."
    )
    padding_idx: int | None = Field(
        default=None,
        ge=0,
        description="Token whose row of the embedding gets no gradient, as `padding_idx` of torch; "
        "with tied embeddings, the row gets the gradient of the output layer only. Default: none.",
    )
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="Dropout probability.")
    rope_base: float = Field(default=10000.0, gt=0.0, description="Base of the rotary embedding.")
    rotary_fraction: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Share of a head's elements, from the first, that are rotated.",
    )
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    query_scaling: QueryScalingConfig = QueryScalingConfig()
    mla: MLAConfig = MLAConfig()
    window_rope_base: float | None = Field(
        default=None,
        gt=0.0,
        description="Base of the rotary embedding, without scaling, in layers with the window. "
        "Default: none, all layers have the same.",
    )
    rotation_pattern: str = Field(
        default="r",
        description="Layers whose queries and keys are rotated (`r`) and not (`n`), repeated over "
        "the layers as in `moe.layer_pattern`.",
    )
    learned_positions: int = Field(
        default=0,
        ge=0,
        description="Rows of a table of learned positions, added to the embedding in place of "
        "rotation; at least `seq_length`. 0: none.",
    )
    qkv_bias: bool = Field(default=False, description="Biases of queries, keys and values.")
    output_bias: bool = Field(default=False, description="Bias of the attention output.")
    mlp_bias: bool = Field(
        default=False, description="Biases of both layers of dense MLPs and shared experts."
    )
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that a token attends to, with itself. Default: all before it.",
    )
    window_pattern: str = Field(
        default="w",
        description="Layers with the window (`w`) and with full attention (`f`), repeated over "
        "the layers as in `moe.layer_pattern`: `wwf` for two with, one without.",
    )
    window_type: Literal["sliding", "chunk"] = Field(
        default="sliding",
        description="Tokens in the window: the last ones, or those in the same `chunk` of the "
        "sequence, all of which have `sliding_window` tokens, from the first of a document.",
    )
    attention_sinks: bool = Field(
        default=False,
        description="A learnt score per head that takes part in the softmax and has no value. "
        "Needs memory for all scores.",
    )
    attention_scale: float | None = Field(
        default=None,
        gt=0.0,
        description="Factor on products of queries and keys. Default: the width of a head to the "
        "power of -1/2.",
    )
    attention_softcap: float | None = Field(
        default=None,
        gt=0.0,
        description="Limit c of attention scores, by `c tanh(score / c)`. Needs memory for all "
        "scores. Default: no limit.",
    )
    logit_softcap: float | None = Field(
        default=None,
        gt=0.0,
        description="Limit c of logits, by `c tanh(logit / c)`. Default: no limit.",
    )
    embedding_factor: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor on embeddings, rounded to their number format; not on a tied output "
        "layer.",
    )
    residual_factor: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor on what a block adds to the residual stream.",
    )
    logit_factor: float = Field(
        default=1.0, gt=0.0, description="Factor on logits, before their limit."
    )
    activation: Literal["swiglu", "geglu", "gelu", "relu2"] = Field(
        default="swiglu",
        description="Activation of dense layers and shared experts; `geglu` has the tanh form of "
        "GELU as its gate. Without a gate, with two matrices in place of three: `gelu` (tanh form) "
        "and `relu2`, the square of ReLU.",
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(
        default="rmsnorm",
        description="Norm before blocks and the output layer.",
    )
    norm_bias: bool = Field(default=True, description="Bias of `layernorm`.")
    norm_plus_one: bool = Field(
        default=False,
        description="Scale by one plus the weight in `rmsnorm`, also of queries and keys.",
    )
    norm_eps: float = Field(default=1e-5, gt=0.0, description="Epsilon of norms.")
    norm_position: Literal["before", "after", "both"] = Field(
        default="before",
        description="Place of the norm of attention and MLP: on the block's input, or on its "
        "output, before that is added to the residual stream, or `both`.",
    )
    parallel_blocks: bool = Field(
        default=False,
        description="Attention and MLP read the same norm of the layer's input, and both results "
        "are added.",
    )
    qk_norm: Literal["none", "head", "head_after", "full", "unit"] = Field(
        default="none",
        description="RMSNorm of queries and keys, before rotation: of each `head`, with one weight "
        "for all heads, or, with `full`, of all heads together; with `head_after`, of each head "
        "after rotation; with `unit`, of each head without a weight, in rotated layers only.",
    )
    init_std: float = Field(
        default=0.02, gt=0.0, description="Standard deviation of initial weights."
    )

    _check_factory = field_validator("factory")(check_object_name)

    @field_validator("rotation_pattern")
    @classmethod
    def _check_rotation(cls, pattern: str) -> str:
        return check_pattern(pattern, "rn")

    @field_validator("window_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        return check_pattern(pattern, "wf")

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{name} must be a number, text, true or false")
        return options

    def window_of(self, layer: int) -> int | None:
        """Return the attention window of a layer.

        Example:
            >>> config = ModelConfig(sliding_window=8, window_pattern="wwf")
            >>> [config.window_of(layer) for layer in range(4)]
            [8, 8, None, 8]
        """
        is_full = letter_of_layer(self.window_pattern, layer) == "f"
        return None if is_full else self.sliding_window

    def rotation_of(self, layer: int) -> Literal["main", "window", "none"]:
        """Return the rotation of a layer: that of all, that of layers with the window, or none.

        Example:
            >>> config = ModelConfig(sliding_window=8, window_pattern="wf", window_rope_base=1e4,
            ...                      rotation_pattern="rrrn")
            >>> [config.rotation_of(layer) for layer in range(4)]
            ['window', 'main', 'window', 'none']
        """
        if self.learned_positions or letter_of_layer(self.rotation_pattern, layer) == "n":
            return "none"
        has_own = self.window_rope_base is not None and self.window_of(layer) is not None
        return "window" if has_own else "main"

    def scales_queries(self, layer: int) -> bool:
        """Return whether a layer has the factor of ``query_scaling``."""
        scaling = self.query_scaling
        is_one = scaling.layers == "all" or self.rotation_of(layer) == "none"
        return scaling.beta > 0 and is_one

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate, and so three matrices instead of two."""
        return self.activation in ("swiglu", "geglu")

    @property
    def num_rotated(self) -> int:
        """Rotated elements of a head: the first `rotary_fraction`, rounded down."""
        if self.mla.kv_rank:
            return self.mla.rope_head_dim
        return int((self.head_dim or self.hidden_size // self.num_heads) * self.rotary_fraction)

    @property
    def mtp_layers(self) -> range:
        """Global indices of the layers for multi-token prediction, after all others.

        Example:
            >>> ModelConfig(num_layers=4, num_mtp_layers=2).mtp_layers
            range(4, 6)
        """
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the full embedding: ``vocab_size`` rounded up to ``vocab_pad_multiple``.

        The number does not depend on ``parallel.tp``, so a checkpoint fits every layout.

        Raises:
            ConfigError: If ``vocab_size`` is not set.

        Example:
            >>> ModelConfig(vocab_size=300).padded_vocab_size
            384
        """
        unit = self.vocab_pad_multiple
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size must be set if no tokenizer is loaded, got none")
        return -(-self.vocab_size // unit) * unit

    @property
    def default_ffn_hidden_size(self) -> int:
        """8/3 of ``hidden_size``, rounded up to a multiple of 64."""
        return -(-8 * self.hidden_size // 192) * 64

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.mla.kv_rank:
            self._check_mla()
        elif self.head_dim is None:
            self._check_derived_head_dim()
        if self.num_rotated < 2 or self.num_rotated % 2:
            raise ValueError(
                f"rotary_fraction must rotate an even number of elements of a head, at least 2, "
                f"got {self.rotary_fraction}, which rotates {self.num_rotated}"
            )
        if 0 < self.learned_positions < self.seq_length:
            raise ValueError(
                f"learned_positions must be at least seq_length = {self.seq_length}, got "
                f"{self.learned_positions}; 0 rotates instead"
            )
        if self.parallel_blocks and self.norm_position != "before":
            raise ValueError(
                f'parallel_blocks needs norm_position = "before", got "{self.norm_position}"'
            )
        if self.num_mtp_layers and (
            self.window_rope_base or self.learned_positions or "n" in self.rotation_pattern
        ):
            raise ValueError(
                f"num_mtp_layers = {self.num_mtp_layers} needs the same rotation in all layers; "
                "leave window_rope_base, learned_positions and rotation_pattern out"
            )
        self._check_factors()
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}; "
                f"nearest: {nearest_divisors(self.num_kv_heads, self.num_heads)}"
            )
        return self

    def _check_factors(self) -> None:
        """Check that ``longrope`` has a divisor for each frequency."""
        scaling, pairs = self.rope_scaling, self.num_rotated // 2
        for name in ("short_factors", "long_factors"):
            count = len(getattr(scaling, name))
            if scaling.type == "longrope" and count != pairs:
                raise ValueError(
                    f"rope_scaling.{name} must have {pairs} numbers, one per pair of rotated "
                    f"elements of a head, got {count}"
                )

    def _check_mla(self) -> None:
        """Check that no setting of grouped queries is set, and the length of sparse attention."""
        if self.mla.index_heads and self.seq_length > self.mla.index_top_k:
            raise ValueError(
                f"seq_length must be at most mla.index_top_k = {self.mla.index_top_k}, up to which "
                f"sparse attention is dense, got {self.seq_length}"
            )
        defaults = {name: info.default for name, info in type(self).model_fields.items()}
        names = (
            "qk_norm",
            "qkv_bias",
            "output_bias",
            "rotary_fraction",
            "attention_sinks",
            "attention_scale",
            "learned_positions",
            "window_type",
        )
        found = [name for name in names if getattr(self, name) != defaults[name]]
        if self.query_scaling.beta:
            found.append("query_scaling.beta")
        if self.head_dim not in (None, self.mla.nope_head_dim + self.mla.rope_head_dim):
            found.append("head_dim")
        if self.num_kv_heads not in (None, self.num_heads):
            found.append("num_kv_heads")
        if found:
            raise ValueError(
                f"{found[0]} = {attrgetter(found[0])(self)} has no meaning with mla.kv_rank = "
                f"{self.mla.kv_rank}; leave it out"
            )

    def _check_derived_head_dim(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_heads = "
                f"{self.num_heads}; nearest {self._nearest_heads()}"
            )
        head_dim = self.hidden_size // self.num_heads
        if head_dim % 2:
            raise ValueError(
                f"hidden_size = {self.hidden_size} / num_heads = {self.num_heads} = {head_dim} is "
                f"odd, but rotary embedding turns pairs; nearest {self._nearest_heads()}"
            )

    def _nearest_heads(self) -> str:
        """Return the nearest sizes with an even head width, changing one setting."""
        sizes = nearest_multiples(self.hidden_size, 2 * self.num_heads)
        unit = self.num_kv_heads or 1
        halves = divisors(self.hidden_size // 2) if self.hidden_size % 2 == 0 else []
        heads = nearest_of([number for number in halves if number % unit == 0], self.num_heads)
        of_heads = f", or num_heads: {heads}" if heads else ""
        return f"hidden_size: {sizes}{of_heads}, or set head_dim"
