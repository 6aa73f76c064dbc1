"""The ``[preference]`` section: training on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import Section

PairLoss = Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "simpo"]


class PreferenceConfig(Section):
    """``[preference]``: DPO and its kin, on pairs of answers."""

    loss: PairLoss | None = Field(
        default=None,
        description="Loss of pairs: `sigmoid` is DPO; the others are in preferences.md. Then the "
        "data are pairs. Default: none, the loss of next tokens.",
    )
    beta: float = Field(
        default=0.1,
        gt=0.0,
        description="Factor on the differences of log-probs to those of the reference; of `ipo` "
        "half its inverse is the target.",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0.0,
        lt=0.5,
        description="Share of pairs that are taken to be labelled the wrong way round, of "
        "`sigmoid` only.",
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of a prompt with its answer; what is behind is cut, and a pair "
        "whose prompt fills it is left out. Default: half of `model.seq_length`.",
    )
    reference_dir: str | None = Field(
        default=None,
        description="Folder of the log-probs of the reference, which `megacore eval --reference` "
        "writes. Default: beside the pairs.",
    )
    any_reference: bool = Field(
        default=False,
        description="Also take log-probs of another model than that which the run starts from "
        "(`checkpoint.load_weights`).",
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss not in (None, "simpo")

    def limit(self, seq_length: int) -> int:
        """Return the most tokens of a prompt with its answer: two fit into a sample.

        Example:
            >>> PreferenceConfig().limit(8), PreferenceConfig(max_length=3).limit(8)
            (4, 3)
        """
        return self.max_length or seq_length // 2

    @field_validator("loss", mode="before")
    @classmethod
    def _check_dpo(cls, value: Any) -> Any:
        if value == "dpo":  # else the nearest name would be "ipo", another loss
            raise ValueError('must be "sigmoid", which is the loss of DPO')
        return value

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        if self.label_smoothing > 0.0 and self.loss not in (None, "sigmoid"):
            raise ValueError(
                f'label_smoothing = {self.label_smoothing:g} is for loss = "sigmoid", got '
                f'"{self.loss}"; set it to 0'
            )
        return self
