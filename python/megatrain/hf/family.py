"""Description of a model family, see `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain.hf.keys import Key, LayerRule
from megatrain.hf.rows import Table


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        model_type: The entry of this name in ``config.json``.
        people: Names of published models, for the page of families.
        special: Differences from Llama, for that page.
        architecture: Class of ``transformers`` that loads the model.
        table: Rows by parameter name; layer parameters without ``layers.N.``.
        keys: Entries that correspond to settings.
        fixed: Entries with their only supported value, which is also the default.
        stated: Entries that other programs write, with the only value that is true of the family.
        implied: Settings of every model of the family, which no entry states.
        rules: Entries that select layers, and those for training only.
        ignored: Entries that follow from others.
        copies: Names of tensors of each layer for multi-token prediction that repeat a parameter,
            and the parameter.
        rope_base: Base of the rotary embedding if no entry states it.
        rope: The rotation if no entry describes it.
        rope_names: Older names of rotations.
        rope_original: Tokens per sequence of the original training if no entry states them.
        rope_scales_queries: Whether the rotation's entries have a factor on queries by position.
        stretches: Whether ``alpha`` of a dynamic rotation raises the base, as in Hunyuan.
        rotates: Whether there is a rotation at all.
        window_rope_base: Base of the plain rotation of layers with the window if no entry states
            it; ``None`` if all layers have the same.
        window_rope_name: Older entry of that base.
        rotary_fraction: Rotated share of a head if no entry states it; ``None`` if always whole.
    """

    model_type: str
    people: str
    special: str
    architecture: str
    table: Table
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[LayerRule, ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    rope_base: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rope_original: int | None = None
    rope_scales_queries: bool = False
    stretches: bool = False
    rotates: bool = True
    window_rope_base: float | None = None
    window_rope_name: str = ""
    rotary_fraction: float | None = None
