"""The ``[data]`` section: sources, their tokenizer, the order of samples, validation sets."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megacore.errors import ConfigError
from megatrain.config.base import Section
from megatrain.config.user_objects import check_object_name

SourceKind = Literal["auto", "indexed", "text", "jsonl", "json", "parquet", "arrow", "factory"]


class SourceConfig(Section):
    """``[[data.sources]]`` or ``[[data.validation]]``: one of several sources of documents."""

    path: str = Field(
        min_length=1, description="As `data.source`; for a factory, `module:function`."
    )
    weight: float | None = Field(default=None, gt=0, description="Share of the tokens.")
    name: str | None = Field(default=None, min_length=1, description="Name in metrics.")
    kind: SourceKind = Field(
        default="auto", description="Kind of the files; `auto` decides by contents and name."
    )

    @property
    def label(self) -> str:
        """Name in metrics and messages: ``name``, or the last part of the path."""
        return self.name or self.path.rstrip("/").rpartition("/")[2]


class DataConfig(Section):
    """``[data]``: the documents, their tokenizer, the order of samples, validation sets."""

    source: str = Field(
        default="python-docs",
        description="`python-docs` or `stdlib` (text that comes with Python), a file of text, "
        "JSON, parquet or arrow, a folder of them, or the prefix of a `.bin`/`.idx` pair. Empty: "
        "to be set before training, as in the configuration of an imported model.",
    )
    sources: list[SourceConfig] = Field(
        default=[],
        description="Several sources instead of `source`, each a table `[[data.sources]]` with "
        "`path`, `weight` (share of the tokens; left out everywhere: by size), `name` and `kind` "
        "(`auto`, `indexed`, `text`, `jsonl`, `json`, `parquet`, `arrow`, `factory`).",
    )
    factory: str | None = Field(
        default=None,
        description="Function that makes datasets of your own, as `package.module:name`, see "
        "own-model.md. Default: those of `source` or `sources`.",
    )
    validation: list[SourceConfig] = Field(
        default=[],
        description="Validation sets instead of a split, each a table `[[data.validation]]` with "
        "the keys of `[[data.sources]]`; every set has its own loss.",
    )
    tokenizer: str = Field(
        default="bytes", min_length=1, description="`bytes`, or the path of a `tokenizer.json`."
    )
    bos: str | None = Field(
        default=None,
        description="Token before every document of text, e.g. `<s>`; an empty string: none. "
        "Default: as the tokenizer itself has it.",
    )
    eod: str | None = Field(
        default=None,
        description="Token after every document of text, e.g. `</s>`; an empty string: none. "
        "Default: that of the tokenizer, or an empty line.",
    )
    field: str = Field(
        default="text",
        min_length=1,
        description="Field of JSON objects, or column of tables, with the text, or with the "
        "messages of a conversation, of which only answers are learned; several, joined by commas, "
        "for prompts and, last, answers: `prompt,completion`, `instruction,input,output`. A name "
        "with dots leads through nested objects: `meta.text`.",
    )
    separator: str | None = Field(
        default=None,
        description="Text after each field of a prompt. Default: an empty line; for "
        "`prompt,completion` nothing.",
    )
    split: str = Field(
        default="95,5",
        description="Shares of training and validation data, as weights: `95,5`. Unused with "
        "`[[data.validation]]`.",
    )
    order: Literal["megacore", "megatron"] = Field(
        default="megacore",
        description="Order of samples: a function of seed and position without an index, or that "
        "of Megatron-Core for the same seed, files, split, steps and sequence length.",
    )
    packing: Literal["stream", "best_fit"] = Field(
        default="stream",
        description="Samples of the order `megacore`: windows of all documents joined to one "
        "stream; or whole documents, fitted into samples with little padding, where only longer "
        "documents are cut.",
    )
    document_mask: bool = Field(
        default=False,
        description="Attention stays inside of documents, positions start at 0 in each, and no "
        "document predicts the first token of the next.",
    )
    cache: str | None = Field(
        default=None,
        description="Folder of tokenized sources and of indices. "
        "Default: `~/.cache/megacore/data`, or below `XDG_CACHE_HOME`.",
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

    @property
    def training_sources(self) -> list[SourceConfig]:
        """``sources``, or ``source`` as the only one.

        Raises:
            ConfigError: If both are empty.
        """
        if not self.sources and not self.source:
            raise ConfigError(
                "data.source must be text or tokens to train on, got none; set it with "
                "--data.source=PATH"
            )
        return self.sources or [SourceConfig(path=self.source)]

    _check_factory = field_validator("factory")(check_object_name)

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: str) -> str:
        rule = 'expected two or three weights like "95,5", none negative, the first above 0'
        try:
            weights = [float(part) for part in split.split(",")]
        except ValueError:
            raise ValueError(rule) from None
        in_range = all(weight >= 0.0 for weight in weights) and sum(weights) < float("inf")
        if len(weights) not in (2, 3) or not in_range or weights[0] == 0.0:
            raise ValueError(rule)
        return split

    @model_validator(mode="after")
    def _check_packing(self) -> Self:
        if self.packing != "stream" and self.order == "megatron":
            raise ValueError(
                f'packing = "{self.packing}" makes other samples than order = "megatron"; leave '
                "one out"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for key, group in (("sources", self.sources), ("validation", self.validation)):
            missing = [source.label for source in group if source.weight is None]
            if missing and len(missing) < len(group):
                raise ValueError(
                    f"{key} need a weight each or none at all; {', '.join(missing)} have none"
                )
            total = sum(source.weight or 0.0 for source in group)
            if not total < float("inf"):
                raise ValueError(
                    f"weights of {key} must have a finite sum, got {total}; divide each by a number"
                )
            labels = [source.label for source in group]
            twice = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
            if twice:
                raise ValueError(f'{key} must have different names, but "{twice[0]}" occurs twice')
        return self
