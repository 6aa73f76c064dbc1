"""Building blocks of pages as HTML: cards, tables, wide drawings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def card(title: str, body: str, hint: str = "") -> str:
    """Return a section with a heading; empty for an empty body.

    Args:
        title: Heading, text.
        body: Content, HTML.
        hint: Sentences below the heading, text.
    """
    note = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{note}{body}</section>' if body else ""


def table(kind: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; empty without rows.

    Cells repeat the name of their column, for narrow pages where each row of a ``stacked`` table is
    a list.

    Args:
        kind: CSS classes.
        head: Names of the columns, text.
        rows: Cells, HTML.
    """
    stacked = "stacked" in kind
    names = [f' data-name="{escape(name)}"' if stacked else "" for name in head]
    body = "".join(
        f"<tr>{''.join(f'<td{n}>{cell}</td>' for n, cell in zip(names, row, strict=True))}</tr>"
        for row in rows
    )
    heading = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<table class="{kind}"><thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table>'
        if body
        else ""
    )


def scrolling(kind: str, drawing: str) -> str:
    """Return a drawing that keeps its full size on narrow pages, with a scroll bar."""
    note = '<p class="hint narrow">Scroll the picture sideways to see all of it.</p>'
    return f'{note}<div class="scroll {kind}" tabindex="0">{drawing}</div>'
