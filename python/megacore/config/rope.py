"""The ``[model.rope_scaling]`` section: rotary embedding for sequences longer than in training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from megacore.config.base import Section


class RopeScalingConfig(Section):
    """``[model.rope_scaling]``: change of the rotary frequencies for longer sequences."""

    type: Literal["none", "linear", "dynamic", "llama3", "yarn"] = Field(
        default="none",
        description="Rule: divide all frequencies (`linear`); raise the base with the length of "
        "the sequence (`dynamic`); divide low frequencies only (`llama3`, `yarn`).",
    )
    factor: float = Field(
        default=1.0, ge=1.0, description="Longest sequence over that of the original training."
    )
    original_seq_length: int | None = Field(
        default=None,
        ge=1,
        description="`dynamic`, `llama3`, `yarn`: tokens per sequence of the original training. "
        "Default: none, for the other rules.",
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
        description="`yarn`: factor on rotated queries and keys. Default: 0.1 ln(`factor`) + 1, or "
        "the quotient of `mscale` and `mscale_all_dim` of that form.",
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type in ("dynamic", "llama3", "yarn") and self.original_seq_length is None:
            raise ValueError(
                f'rope_scaling.type = "{self.type}" needs rope_scaling.original_seq_length; set it '
                "to the tokens per sequence of the original training"
            )
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor must be above low_freq_factor = "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )
        return self
