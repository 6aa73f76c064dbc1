"""SVG elements, and drawings that follow the light or dark setting of their viewer.

Colours are attributes of the elements, so that viewers without style sheets show the light drawing.
Charts inside of pages have CSS classes instead, and the colours of the page.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable
from html import escape

INK, MUTED, PAGE, TRACK = "#18222e", "#5b6878", "#ffffff", "#e8ecf2"
_FONT = "Inter, system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
_CLASS = "megacore"
_COLOUR = re.compile(r'(fill|stroke)="(#[0-9a-fA-F]{6})"')

Value = str | float | None


def element(name: str, content: str = "", *, css: str = "", **attributes: Value) -> str:
    """Return an element.

    Args:
        name: Tag.
        content: What is inside, as SVG.
        css: CSS classes, the first attribute.
        attributes: Further attributes, with ``_`` for ``-``; ``None`` omits one. Numbers have two
            decimals.

    Example:
        >>> element("circle", css="dot", cx=1.5, cy=2 / 3, fill=None, stroke_width=2)
        '<circle class="dot" cx="1.5" cy="0.67" stroke-width="2"/>'
    """
    shown: dict[str, Value] = {"class": css or None, **attributes}
    text = "".join(
        f' {key.replace("_", "-")}="{_value_text(value)}"'
        for key, value in shown.items()
        if value is not None
    )
    return f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>"


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    tip: str = "",
    css: str = "",
    **attributes: Value,
) -> str:
    """Return a rectangle; ``tip`` is the text of its tooltip."""
    content = element("title", escape(tip)) if tip else ""
    return element("rect", content, css=css, x=x, y=y, width=width, height=height, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, *, css: str = "", **attributes: Value) -> str:
    """Return a straight line."""
    return element("line", "", css=css, x1=x1, x2=x2, y1=y1, y2=y2, **attributes)


def text(x: float, y: float, words: object, *, css: str = "", **attributes: Value) -> str:
    """Return one line of text, which starts at ``x`` unless ``text_anchor`` is set."""
    return element("text", escape(str(words)), css=css, x=x, y=y, **attributes)


def label(
    x: float,
    y: float,
    words: object,
    size: float,
    *,
    fill: str = INK,
    weight: int | None = None,
    anchor: str | None = None,
) -> str:
    """Return one line of text of a drawing, with its font size in pixels."""
    return text(x, y, words, font_size=size, font_weight=weight, fill=fill, text_anchor=anchor)


def document(
    width: float, height: float, title: str, elements: Iterable[str], *, page: str | None = PAGE
) -> str:
    """Return a drawing as an SVG document.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        title: Description for screen readers.
        elements: SVG elements, back to front.
        page: Colour of the background; ``None`` leaves it transparent.
    """
    background = [] if page is None else [rect(0, 0, width, height, fill=page)]
    drawing = "\n".join((*background, *elements))
    content = f"\n{element('style', dark_rules(drawing, _CLASS))}\n{drawing}\n"
    root = element(
        "svg",
        content,
        css=_CLASS,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {_value_text(width)} {_value_text(height)}",
        role="img",
        aria_label=title,
        font_family=_FONT,
    )
    return root + "\n"


def hex_colour(red: float, green: float, blue: float) -> str:
    """Return a colour of channels in 0..255.

    Example:
        >>> hex_colour(255, 128, 0)
        '#ff8000'
    """
    return "#" + "".join(f"{round(channel):02x}" for channel in (red, green, blue))


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
    return hex_colour(*(255 * channel for channel in channels))


def _value_text(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"
