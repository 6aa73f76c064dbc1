"""Colours of schedule pictures: a hue per kind of action, a shade per model chunk."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass

from megacore._core import ActionKind


@dataclass(frozen=True, kw_only=True)
class KindColour:
    """Colour of one kind of action.

    Attributes:
        name: Display name.
        hue: Hue, degrees.
        saturation: Saturation, in [0, 1].
    """

    name: str
    hue: float
    saturation: float

    def rgb(self, chunk: int, num_chunks: int) -> tuple[int, int, int]:
        """Return the shade of a chunk: deep for the first, pale for the last; each in 0..255."""
        lightness = 0.50 if num_chunks == 1 else 0.44 + 0.34 * chunk / (num_chunks - 1)
        channels = colorsys.hls_to_rgb(self.hue / 360, lightness, self.saturation)
        red, green, blue = (round(channel * 255) for channel in channels)
        return red, green, blue

    def is_deep(self, chunk: int, num_chunks: int) -> bool:
        """Check if white text is more readable than black on the shade of a chunk."""
        red, green, blue = self.rgb(chunk, num_chunks)
        return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def kind_colours() -> dict[ActionKind, KindColour]:
    """Return the colours of the compute kinds, in the order of a legend."""
    return {
        ActionKind.FORWARD: KindColour(name="Forward", hue=217, saturation=0.78),
        ActionKind.BACKWARD: KindColour(name="Backward", hue=27, saturation=0.86),
        ActionKind.BACKWARD_INPUT: KindColour(name="Backward, input", hue=46, saturation=0.86),
        ActionKind.BACKWARD_WEIGHT: KindColour(name="Backward, weights", hue=152, saturation=0.60),
    }
