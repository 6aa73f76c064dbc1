"""Entries of ``config.json`` that describe the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megacore.errors import MegacoreError
from megacore.models.hf.keys import Values, checked

ROPE_NAMES = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})


def rope_from_hf(config: Mapping[str, Any], *, base: float) -> Values:
    """Return the settings of the rotation.

    Args:
        config: Content of ``config.json``.
        base: Base if no entry states it.

    Raises:
        MegacoreError: If the rotation is not supported.
    """
    for rope in _rotations(config):
        # The entry was `type` before it was `rope_type`; `transformers` reads both.
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise MegacoreError(f"rope_type in config.json must be 'default', got {kind!r}")
    bases = [source.get("rope_theta") for source in (*_rotations(config), config)]
    found = next(filter(None, bases), base)
    return {"model.rope_base": checked("rope_theta", found, float)}


def rope_to_hf(values: Values) -> dict[str, Any]:
    """Return the entries for settings, in the spellings of both `transformers` 4 and 5."""
    base = values["model.rope_base"]
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def _rotations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries that describe the rotation: the older one first, then the newer one."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        if not isinstance(value, Mapping):
            raise MegacoreError(f"{name} in config.json must be an object or null, got {value!r}")
        yield value
