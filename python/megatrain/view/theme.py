"""Dark counterparts of the colours of a drawing."""

from __future__ import annotations

import colorsys
import re

_COLOUR = re.compile(r'(fill|stroke)="(#[0-9a-fA-F]{6})"')


def dark_rules(svg: str, css_class: str) -> str:
    """Return a style sheet that recolours a drawing for light pages where pages are dark.

    Lightness is inverted and hues are kept, which preserves contrast. The attributes of the drawing
    stay as they are, for viewers without style sheets.

    Args:
        svg: Elements with ``fill`` and ``stroke`` as six hexadecimal digits.
        css_class: Class of the drawing.

    Example:
        >>> dark_rules('<rect fill="#ffffff"/>', "a")
        '@media (prefers-color-scheme:dark){.a [fill="#ffffff"]{fill:#11161d}}'
    """
    pairs = sorted({match.groups() for match in _COLOUR.finditer(svg)})
    rules = "".join(
        f'.{css_class} [{name}="{colour}"]{{{name}:{_dark_counterpart(colour)}}}'
        for name, colour in pairs
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"


def _dark_counterpart(colour: str) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if max(red, green, blue) - min(red, green, blue) < 0.14:
        # Greys get the blue tint of the page.
        hue, saturation = 0.59, 0.25
    turned = 0.09 + (1 - lightness) * 0.84
    channels = colorsys.hls_to_rgb(hue, turned, min(saturation, 0.6))
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in channels)
