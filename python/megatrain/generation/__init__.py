"""Text from a trained model; names are imported on first use, since they need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.generation.decoding import Sampling, generate, stream

__all__ = ["Sampling", "generate", "stream"]

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "decoding"))
