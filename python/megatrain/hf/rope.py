"""Entries of ``config.json`` that describe the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.errors import MegacoreError
from megatrain.config import RopeScalingConfig
from megatrain.hf.keys import Values, checked

ROPE_NAMES = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
)
_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_MAGNITUDES = ("mscale", "mscale_all_dim")
_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", *_NUMBERS[:2]),
    "yarn": ("factor", *_NUMBERS[2:], *_MAGNITUDES, "truncate"),
}
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# The last is a note of some publishers.
_ALWAYS = {"rope_type", "type", "rope_theta", _SHARE, "finetuned"}


def rope_from_hf(
    config: Mapping[str, Any],
    *,
    base: float,
    fraction: float | None,
    default: Mapping[str, Any],
) -> Values:
    """Return the settings of the rotation.

    Args:
        config: Content of ``config.json``.
        base: Base if no entry states it.
        fraction: Rotated share of a head if no entry states it; ``None`` if the family always
            rotates whole heads.
        default: The rotation if no entry describes it.

    Raises:
        MegacoreError: If the rotation is not supported.
    """
    rope = _rotation(config, default)
    # The entry was `type` before it was `rope_type`; `transformers` reads both.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _OF_KIND:
        raise MegacoreError(
            f"rope_type in config.json must be one of {', '.join(_OF_KIND)}, got {kind!r}"
        )
    known = {*_ALWAYS, *_OF_KIND[kind], "original_max_position_embeddings"}
    unknown = [name for name in rope if name not in known and rope[name] is not None]
    if unknown:
        raise MegacoreError(
            f"the rotary embedding in config.json has {unknown[0]} = {rope[unknown[0]]!r}, which "
            f"is not known for rope_type {kind!r}"
        )
    stated = (rope.get("rope_theta"), config.get("rope_theta"))
    found = next((value for value in stated if value is not None), base)
    share = rope.get(_SHARE, config.get(_SHARE, fraction))
    share = 1.0 if share is None else checked(_SHARE, share, float)
    if fraction is None and share != 1.0:
        raise MegacoreError(
            f"partial_rotary_factor in config.json of a {config['model_type']} model must be 1, "
            f"got {share}"
        )
    return {
        "model.rope_base": checked("rope_theta", found, float),
        "model.rotary_fraction": share,
        "model.rope_scaling": _scaling(config, rope, kind),
    }


def rope_to_hf(values: Values, *, fraction: float | None) -> dict[str, Any]:
    """Return the entries for settings, in the spellings of both `transformers` 4 and 5.

    Args:
        values: The settings.
        fraction: As in `rope_from_hf`.
    """
    scaling: RopeScalingConfig = values["model.rope_scaling"]
    base, share = values["model.rope_base"], values["model.rotary_fraction"]
    kind = "default" if scaling.type == "none" else scaling.type
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    rope |= {name: getattr(scaling, name) for name in _OF_KIND[kind]}
    rope = {name: value for name, value in rope.items() if value is not None}
    for name in _MAGNITUDES:
        if not rope.get(name):
            rope.pop(name, None)
    config: dict[str, Any] = {"rope_theta": base}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_seq_length
    elif kind == "dynamic":
        config["max_position_embeddings"] = scaling.original_seq_length
    if share != 1.0 or fraction is not None:
        rope[_SHARE] = config[_SHARE] = share
    if kind != "default":
        config["rope_scaling"] = rope
    return {**config, "rope_parameters": rope}


def _rotation(config: Mapping[str, Any], default: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry that describes the rotation: the older one, if there are both."""
    # As in `transformers`, an empty object is the plain rotation.
    found: Mapping[str, Any] = {} if config.get("rope_parameters") == {} else default
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise MegacoreError(f"{name} in config.json must be an object or null, got {value!r}")
        if any(isinstance(inner, Mapping) for inner in value.values()):
            raise MegacoreError(
                f"{name} in config.json must describe one rotation for all layers, got {value!r}"
            )
        found = value or found
    return found


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if kind == "default":
        return {}
    longest = config.get("max_position_embeddings")
    original = next(
        (value for value in (config.get(_ORIGINAL), rope.get(_ORIGINAL)) if value is not None),
        longest,
    )
    scaling: dict[str, Any] = {"type": kind}
    if kind != "linear":
        found = longest if kind == "dynamic" else original
        scaling["original_seq_length"] = checked(_ORIGINAL, found, int)
    for name in _OF_KIND[kind]:
        if rope.get(name) is not None:
            scaling[name] = checked(name, rope[name], bool if name == "truncate" else float)
    if kind == "yarn" and "factor" not in scaling:
        scaling["factor"] = checked("max_position_embeddings", longest, int) / original
    if "factor" not in scaling:
        raise MegacoreError(f"the rotary embedding in config.json of type {kind!r} has no factor")
    return scaling
