"""Entries of ``config.json`` that describe the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.errors import MegacoreError
from megatrain.config import RopeScalingConfig
from megatrain.hf.family import Family
from megatrain.hf.keys import Values, checked

ROPE_NAMES = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "rope_local_base_freq",
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
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
# Rotations of which `transformers` moves the original length to the rotation's entries.
_MOVED = ("llama3", "yarn", "longrope")
# Lists of numbers, which have other names in our settings.
_LISTS = {"short_factor": "short_factors", "long_factor": "long_factors"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_QUERY_SCALE = "llama_4_scaling_beta"
# The last is a note of some publishers.
_ALWAYS = {"rope_type", "type", "rope_theta", _SHARE, "finetuned"}


def rope_from_hf(config: Mapping[str, Any], family: Family) -> Values:
    """Return the settings of the rotation.

    Args:
        config: Content of ``config.json``.
        family: The family, which has what no entry states.

    Raises:
        MegacoreError: If the rotation is not supported.
    """
    if not family.rotates:
        return {}
    if family.window_rope_base is not None:
        config, window_base = _of_kinds(config, family)
        values = _rope_from_hf(config, family)
        return values | {"model.window_rope_base": window_base}
    return _rope_from_hf(config, family)


def _rope_from_hf(config: Mapping[str, Any], family: Family) -> Values:
    fraction = family.rotary_fraction
    rope = _rotation(config, family.rope)
    # The entry was `type` before it was `rope_type`; `transformers` reads both.
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = family.rope_names.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _OF_KIND:
        raise MegacoreError(
            f"rope_type in config.json must be one of {', '.join(_OF_KIND)}, got {kind!r}"
        )
    stretch = 1.0
    if kind == "dynamic" and family.stretches and rope.get("alpha"):
        # The base is raised once, whatever the length; the other entries have no effect.
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        stretch = checked("alpha", rope["alpha"], float) ** (width / (width - 2))
        rope = {name: rope[name] for name in rope if name in _ALWAYS}
        kind = "default"
    known = {*_ALWAYS, *_OF_KIND[kind], "original_max_position_embeddings"}
    if family.rope_scales_queries:
        known |= {_QUERY_SCALE, "max_position_embeddings"}
    unknown = [name for name in rope if name not in known and rope[name] is not None]
    if unknown:
        raise MegacoreError(
            f"the rotary embedding in config.json has {unknown[0]} = {rope[unknown[0]]!r}, which "
            f"is not known for rope_type {kind!r}"
        )
    stated = (rope.get("rope_theta"), config.get("rope_theta"))
    found = next((value for value in stated if value is not None), family.rope_base)
    share = rope.get(_SHARE, config.get(_SHARE, fraction))
    share = 1.0 if share is None else checked(_SHARE, share, float)
    if fraction is None and share != 1.0:
        raise MegacoreError(
            f"partial_rotary_factor in config.json of a {config['model_type']} model must be 1, "
            f"got {share}"
        )
    scaling = _scaling(config, rope, kind, family.rope_original)
    values = {
        "model.rope_base": checked("rope_theta", found, float) * stretch,
        "model.rotary_fraction": share,
        "model.rope_scaling": scaling,
    }
    if family.rope_scales_queries:
        beta = checked(_QUERY_SCALE, rope.get(_QUERY_SCALE), float)
        length = scaling["original_seq_length"] if kind in _MOVED else rope.get(_ORIGINAL)
        values["model.query_scaling.beta"] = beta
        values["model.query_scaling.length"] = checked(_ORIGINAL, length, int)
    return values


def _of_kinds(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], float]:
    """Return entries with the rotation of full attention alone, and the base of the other kind.

    As in `transformers`: an older ``rope_scaling`` belongs to full attention.
    """
    kinds, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(kinds, Mapping) or not isinstance(scaling, Mapping):
        raise MegacoreError("rope_parameters and rope_scaling in config.json must be objects")
    if set(kinds) - {_FULL, _SLIDING} or not all(
        value is None or isinstance(value, Mapping) for value in kinds.values()
    ):
        raise MegacoreError(
            f"rope_parameters in config.json of a {family.model_type} model must describe "
            f"{_FULL} and {_SLIDING}, got {dict(kinds)!r}"
        )
    full, sliding = {**(kinds.get(_FULL) or {}), **scaling}, dict(kinds.get(_SLIDING) or {})
    plain = {"rope_theta", "partial_rotary_factor"}
    kind = sliding.get("rope_type", sliding.get("type", "default"))
    others = [name for name in sliding if name not in {"rope_type", "type", *plain}]
    if kind != "default" or others or sliding.get("partial_rotary_factor") not in (None, 1.0):
        raise MegacoreError(
            f"rope_parameters of {_SLIDING} in config.json must be of rope_type 'default', got "
            f"{sliding!r}"
        )
    base = sliding.get("rope_theta", config.get(family.window_rope_name))
    if "rope_theta" not in full and "rope_theta" in config:
        full["rope_theta"] = config["rope_theta"]
    base = family.window_rope_base if base is None else base
    rest = {name: value for name, value in config.items() if name != "rope_scaling"}
    return {**rest, "rope_parameters": full}, checked("rope_theta", base, float)


def rope_to_hf(values: Values, family: Family) -> dict[str, Any]:
    """Return the entries for settings, in the spellings of both `transformers` 4 and 5.

    Args:
        values: The settings.
        family: As in `rope_from_hf`.
    """
    if not family.rotates:
        return {}
    entries = _rope_to_hf(values, family.rotary_fraction)
    if family.rope_scales_queries:
        rope = entries["rope_parameters"]  # with a scaling, also the older entry
        rope[_QUERY_SCALE] = values["model.query_scaling.beta"]
        rope.setdefault(_ORIGINAL, values["model.query_scaling.length"])
    if family.window_rope_base is not None:
        own = values["model.window_rope_base"] or family.window_rope_base
        sliding = {"rope_type": "default", "rope_theta": own}
        entries["rope_parameters"] = {_FULL: entries["rope_parameters"], _SLIDING: sliding}
        entries |= {family.window_rope_name: own} if family.window_rope_name else {}
    return entries


def _rope_to_hf(values: Values, fraction: float | None) -> dict[str, Any]:
    scaling: RopeScalingConfig = values["model.rope_scaling"]
    base, share = values["model.rope_base"], values["model.rotary_fraction"]
    kind = "default" if scaling.type == "none" else scaling.type
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    rope |= {name: getattr(scaling, _LISTS.get(name, name)) for name in _OF_KIND[kind]}
    rope = {name: value for name, value in rope.items() if value is not None}
    for name in _MAGNITUDES:
        if not rope.get(name):
            rope.pop(name, None)
    config: dict[str, Any] = {"rope_theta": base}
    if kind in _MOVED:
        rope["original_max_position_embeddings"] = scaling.original_seq_length
    if kind == "longrope":  # where `transformers` looks first
        config["original_max_position_embeddings"] = scaling.original_seq_length
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


def _scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any], kind: str, default: int | None
) -> dict[str, Any]:
    if kind == "default":
        return {}
    longest = config.get("max_position_embeddings")
    original = next(
        (
            value
            for value in (config.get(_ORIGINAL, default), rope.get(_ORIGINAL))
            if value is not None
        ),
        longest,
    )
    scaling: dict[str, Any] = {"type": kind}
    if kind != "linear":
        found = longest if kind == "dynamic" else original
        scaling["original_seq_length"] = checked(_ORIGINAL, found, int)
    for name in _OF_KIND[kind]:
        if name in _LISTS:
            scaling[_LISTS[name]] = _numbers(name, rope.get(name))
        elif rope.get(name) is not None:
            scaling[name] = checked(name, rope[name], bool if name == "truncate" else float)
    if kind in ("yarn", "longrope") and "factor" not in scaling:
        scaling["factor"] = checked("max_position_embeddings", longest, int) / original
    if "factor" not in scaling:
        raise MegacoreError(f"the rotary embedding in config.json of type {kind!r} has no factor")
    return scaling


def _numbers(name: str, value: Any) -> list[float]:
    """Return a list of positive numbers."""
    if not isinstance(value, list) or not value:
        raise MegacoreError(f"{name} in config.json must be a list of numbers, got {value!r}")
    return [checked(name, number, float) for number in value]
