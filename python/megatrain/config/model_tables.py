"""Tables of the ``[model]`` section: latent attention, scaled rotation, scaled queries."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import Section, check_pattern


class MLAConfig(Section):
    """``[model.mla]``: multi-head latent attention, in place of grouped queries."""

    kv_rank: int = Field(
        default=0,
        ge=0,
        description="Width of the latent that keys and values are computed from; 0 turns MLA off.",
    )
    q_rank: int = Field(
        default=0,
        ge=0,
        description="Width of the latent that queries are computed from; 0: from the residual "
        "stream.",
    )
    nope_head_dim: int = Field(
        default=128, ge=1, description="Elements of a query or key head that are not rotated."
    )
    rope_head_dim: int = Field(
        default=64,
        ge=2,
        multiple_of=2,
        description="Elements that are rotated; of keys, they are the same for all heads.",
    )
    v_head_dim: int = Field(default=128, ge=1, description="Elements of a value head.")
    index_heads: int = Field(
        default=0,
        ge=0,
        description="Heads of the indexer of sparse attention (DeepSeek-V3.2), whose weights are "
        "kept but not used: up to `index_top_k` tokens, attention is dense. 0: none.",
    )
    index_head_dim: int = Field(default=128, ge=1, description="Elements of an indexer's head.")
    index_top_k: int = Field(
        default=2048,
        ge=1,
        description="Keys that sparse attention chooses for a query; with `index_heads`, the "
        "longest `seq_length`.",
    )
    index_pattern: str = Field(
        default="f",
        description="Layers with an indexer (`f`) and without (`s`), repeated over the layers as "
        "in `moe.layer_pattern`.",
    )

    @field_validator("index_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        return check_pattern(pattern, "fs")


class RopeScalingConfig(Section):
    """``[model.rope_scaling]``: change of the rotary frequencies for longer sequences."""

    type: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        default="none",
        description="Rule: divide all frequencies (`linear`); raise the base with the length of "
        "the sequence (`dynamic`); divide low frequencies only (`llama3`, `yarn`); divide each by "
        "a number of its own (`longrope`).",
    )
    factor: float = Field(
        default=1.0, ge=1.0, description="Longest sequence over that of the original training."
    )
    original_seq_length: int | None = Field(
        default=None,
        ge=1,
        description="All rules but `linear`: tokens per sequence of the original training. "
        "Default: none.",
    )
    low_freq_factor: float = Field(
        default=1.0,
        gt=0.0,
        description="`llama3`: frequencies of fewer turns than this in the original length are "
        "divided.",
    )
    high_freq_factor: float = Field(
        default=4.0,
        gt=0.0,
        description="`llama3`: frequencies of more turns than this in the original length are "
        "kept.",
    )
    beta_fast: float = Field(
        default=32.0,
        gt=0.0,
        description="`yarn`: frequencies of more turns than this in the original length are kept.",
    )
    beta_slow: float = Field(
        default=1.0,
        gt=0.0,
        description="`yarn`: frequencies of fewer turns than this in the original length are "
        "divided.",
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0.0,
        description="`yarn`, `longrope`: factor on rotated queries and keys. Default: 0.1 "
        "ln(`factor`) + 1, or the quotient of `mscale` and `mscale_all_dim` of that form; of "
        "`longrope` sqrt(1 + ln(`factor`) / ln(`original_seq_length`)).",
    )
    mscale: float = Field(
        default=0.0, ge=0.0, description="`yarn`: replaces 0.1 by 0.1 times this, if both are set."
    )
    mscale_all_dim: float = Field(
        default=0.0, ge=0.0, description="`yarn`: the same in the divisor, if both are set."
    )
    truncate: bool = Field(
        default=True, description="`yarn`: round the borders between frequencies to whole pairs."
    )
    short_factors: list[float] = Field(
        default=[],
        description="`longrope`: divisor of each frequency in sequences of up to "
        "`original_seq_length` tokens, one per pair of rotated elements.",
    )
    long_factors: list[float] = Field(
        default=[], description="`longrope`: the same for longer sequences."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        needs_length = self.type not in ("none", "linear")
        if needs_length and self.original_seq_length is None:
            raise ValueError(
                f'rope_scaling.type = "{self.type}" needs rope_scaling.original_seq_length; set it '
                "to the tokens per sequence of the original training"
            )
        if self.type == "longrope" and self.original_seq_length == 1:
            raise ValueError("rope_scaling.original_seq_length must be at least 2, got 1")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor must be above low_freq_factor = "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )
        return self


class QueryScalingConfig(Section):
    """``[model.query_scaling]``: factor on queries that grows with their position."""

    beta: float = Field(
        default=0.0,
        ge=0.0,
        description="Factor 1 + `beta` ln(1 + floor((p + `shift`) / `length`)) on the query at "
        "position p; 0: none.",
    )
    length: int = Field(
        default=8192, ge=1, description="Positions after which the factor grows again."
    )
    shift: int = Field(
        default=0, ge=0, description="Addition to positions, 1 in Llama 4: the first one is 1."
    )
    layers: Literal["all", "unrotated"] = Field(
        default="all",
        description="Layers with the factor: all, or those without rotation, see "
        "`rotation_pattern`.",
    )
