"""Entries of ``config.json`` that select layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config import MoEConfig
from megacore.errors import MegacoreError
from megacore.models.hf.keys import Values, checked


@dataclass(frozen=True, kw_only=True)
class SparseStep:
    """Layers with experts: every ``decoder_sparse_step``-th, except ``mlp_only_layers``."""

    names: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the settings that select the same layers.

        Raises:
            MegacoreError: If there are none.
        """
        step = checked("decoder_sparse_step", config.get("decoder_sparse_step") or 1, int)
        dense = config.get("mlp_only_layers") or []
        num_layers = values["model.num_layers"]
        return moe_layer_settings(
            [i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense], num_layers
        )

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries that select the same layers."""
        moe_layers = _moe_layers(values)
        dense = [i for i in range(values["model.num_layers"]) if i not in moe_layers]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def moe_layer_settings(wanted: Sequence[int], num_layers: int) -> Values:
    """Return the settings that select these layers for experts.

    Raises:
        MegacoreError: If there are none.

    Example:
        >>> moe_layer_settings([2, 4], 6)
        {'moe.first_dense_layers': 1, 'moe.layer_interval': 2}
    """
    for interval in range(1, num_layers + 1):
        for first in range(num_layers):
            section = MoEConfig(
                num_experts=1, top_k=1, first_dense_layers=first, layer_interval=interval
            )
            if section.moe_layers(num_layers) == list(wanted):
                return {"moe.first_dense_layers": first, "moe.layer_interval": interval}
    raise MegacoreError(
        f"layers {list(wanted)} have experts; megacore has every n-th layer after the first dense "
        "ones"
    )


def _moe_layers(values: Values) -> list[int]:
    section = MoEConfig(
        num_experts=1,
        top_k=1,
        first_dense_layers=values["moe.first_dense_layers"],
        layer_interval=values["moe.layer_interval"],
    )
    return section.moe_layers(values["model.num_layers"])


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Layers whose attention is limited to a window.

    Attributes:
        default: Window if the entry is missing.
        switch: Whether ``use_sliding_window`` must be true for a window.
    """

    default: int | None = None
    switch: bool = False
    names: tuple[str, ...] = ("sliding_window", "use_sliding_window", "layer_types")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Check that all layers have full attention.

        Raises:
            MegacoreError: If a layer has a window.
        """
        window = config.get("sliding_window", self.default)
        if self.switch and not config.get("use_sliding_window"):
            window = None
        kinds = set(config.get("layer_types") or ["full_attention"])
        if window is not None or kinds != {"full_attention"}:
            raise MegacoreError(
                f"sliding_window in config.json must be null, got {window} (layers: "
                f"{', '.join(sorted(kinds))})"
            )
        return {}

    def write(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """Return the entries for full attention in all layers."""
        return {"sliding_window": None}
