"""The ``[data]`` section: the text, its tokenizer, and the part kept for validation."""

from __future__ import annotations

from pydantic import Field, field_validator

from megacore.config.base import Section


class DataConfig(Section):
    """``[data]``: the text, its tokenizer, and the part kept for validation."""

    source: str = Field(
        default="python-docs",
        min_length=1,
        description="`python-docs` or `stdlib` (text that comes with Python), a text file, a "
        "folder, or the prefix of a `.bin`/`.idx` pair.",
    )
    tokenizer: str = Field(
        default="bytes", min_length=1, description="`bytes`, or the path of a `tokenizer.json`."
    )
    split: str = Field(
        default="95,5", description="Shares of training and validation data, as weights: `95,5`."
    )

    @property
    def split_fractions(self) -> tuple[float, ...]:
        """Shares that sum to 1: training, validation and, if a third weight is given, a rest.

        Example:
            >>> DataConfig(split="3,1").split_fractions
            (0.75, 0.25)
        """
        weights = [float(part) for part in self.split.split(",")]
        return tuple(weight / sum(weights) for weight in weights)

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: str) -> str:
        rule = 'expected two or three weights like "95,5", none negative, the first above 0'
        try:
            weights = [float(part) for part in split.split(",")]
        except ValueError:
            raise ValueError(rule) from None
        in_range = all(0.0 <= weight < float("inf") for weight in weights)
        if len(weights) not in (2, 3) or not in_range or weights[0] == 0.0:
            raise ValueError(rule)
        return split
