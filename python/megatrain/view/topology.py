"""SVG picture of a topology: a box per node, a cell per rank, a panel per axis, coloured groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megacore.errors import ConfigError
from megacore.parallel.topology import RankGenerator, Topology, groups_text
from megatrain.view.svg import INK, MUTED, document, element, hex_colour, label, rect

_MEANINGS = MappingProxyType(
    {
        "tp": "tensor parallel: one layer, split",
        "cp": "context parallel: one sequence, split",
        "dp": "data parallel: same weights, other data",
        "pp": "pipeline: successive layers",
        "etp": "expert tensor parallel: one expert, split",
        "ep": "expert parallel: different experts",
        "edp": "expert data parallel: same experts, other data",
    }
)

# Lengths in pixels.
_CELL_W, _CELL_H, _CELL_GAP = 36, 34, 4
_NODE_PAD, _NODE_LABEL, _NODE_GAP = 8, 20, 12
_PANEL_PAD, _PANEL_HEAD, _PANEL_GAP, _PANEL_MIN_W = 18, 78, 18, 372
_CHIP_H, _MARGIN, _TITLE_H, _SECTION_H, _BADGE_W = 22, 32, 112, 52, 116
_MAX_NODES, _LEGEND_ROWS, _LEGEND_TEXT = 8, 4, 38

_GROUP, _LINE = "#3c4856", "#d8dfe8"
_PAGE, _CARD, _NODE = "#f3f5f8", "#ffffff", "#eef1f5"
_NEAR, _FAR = ("#e2f4e6", "#1e6b36"), ("#fdeed7", "#8a5200")
_COLOURS = (
    *("#8fc4fb", "#ffbb80", "#96dba4", "#f7a3bb", "#cbb8f6", "#f3dd75", "#84dcd6", "#dcbd9f"),
    *("#b9c6d6", "#f4ab95", "#c5e486", "#e5b0e3"),
)


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Groups of one axis, and the nodes to draw."""

    axis: str
    groups: npt.NDArray[np.int32]  # (num_groups, group_size)
    nodes: tuple[int, ...]
    num_nodes: int
    gpus_per_node: int
    stays_in_node: bool

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """Ranks to draw, increasing."""
        nodes = np.asarray(self.nodes, dtype=np.int64)[:, None]
        ranks = (nodes * self.gpus_per_node + np.arange(self.gpus_per_node)).ravel()
        return ranks[ranks < self.groups.size]


def topology_svg(topology: Topology, *, gpus_per_node: int = 8) -> str:
    """Return a picture of the groups of every axis larger than 1, as one SVG document.

    Each panel shows the nodes as boxes and their ranks as cells; cells of one colour and one group
    number form a group. Of a large world, a panel shows the nodes that the groups of node 0 reach.
    The picture follows the light or dark setting of its viewer.

    Args:
        topology: The topology to draw.
        gpus_per_node: Ranks that share a node; rank ``r`` is on node ``r // gpus_per_node``.

    Raises:
        ConfigError: If ``gpus_per_node`` is below 1 or above 128.
    """
    if not 1 <= gpus_per_node <= 128:
        raise ConfigError(f"gpus_per_node must be between 1 and 128, got {gpus_per_node}")
    gpus_per_node = min(gpus_per_node, topology.world_size)
    panel_w = _panel_width(topology.world_size, gpus_per_node)
    columns = 2  # the title needs as much
    elements: list[str] = []
    y = float(_MARGIN + _TITLE_H)
    for name, view in _sections(topology):
        panels = _panels(view, gpus_per_node)
        columns = max(columns, len(panels))
        elements += _section_head(y, name, view, empty=not panels)
        y += _SECTION_H
        height = max(map(_panel_height, panels), default=0.0)
        for column, panel in enumerate(panels):
            x = _MARGIN + column * (panel_w + _PANEL_GAP)
            elements += _draw_panel(panel, x, y, panel_w, height)
        y += height + _PANEL_GAP
    width = 2 * _MARGIN + columns * (panel_w + _PANEL_GAP) - _PANEL_GAP
    return _document(width, y + _MARGIN - _PANEL_GAP, topology, gpus_per_node, elements)


def _sections(topology: Topology) -> list[tuple[str, RankGenerator]]:
    if topology.ep == 1 and topology.etp == topology.tp:
        return [("All layers", topology.dense)]
    return [("Dense layers", topology.dense), ("Expert layers", topology.expert)]


def _document(
    width: float, height: float, topology: Topology, gpus_per_node: int, elements: Sequence[str]
) -> str:
    num_nodes = -(-topology.world_size // gpus_per_node)
    nodes = f"{_count(num_nodes, 'node')} of {_count(gpus_per_node, 'rank')}"
    title = f"{_count(topology.world_size, 'rank')} on {nodes}"
    near, far = topology.order.split("-")[0], topology.order.split("-")[-1]
    how = (
        f"Order {topology.order}: {near} ranks are neighbours, {far} ranks are farthest apart.",
        "A box is a node, a cell a rank with its number. A thick frame marks the group of rank 0.",
        "Cells of one colour and one group number (g0, g1, ...) talk to each other on that axis.",
    )
    lines = [label(_MARGIN, 50, title, 24, weight=700)]
    lines += [label(_MARGIN, 74 + 20 * i, line, 14, fill=MUTED) for i, line in enumerate(how)]
    return document(width, height, title, (*lines, *elements), page=_PAGE)


def _section_head(y: float, name: str, view: RankGenerator, *, empty: bool) -> list[str]:
    product = " \u00d7 ".join(f"{axis} {size:,}" for axis, size in view.sizes.items())
    note = "  (every axis has size 1: no rank talks to another)" if empty else ""
    return [
        label(_MARGIN, y + 26, name, 19, weight=700),
        label(_MARGIN + 150, y + 26, f"{product} = {view.world_size:,}{note}", 15, fill=MUTED),
    ]


def _panels(view: RankGenerator, gpus_per_node: int) -> list[_Panel]:
    num_nodes = -(-view.world_size // gpus_per_node)
    panels = []
    for axis, size in view.sizes.items():
        if size == 1:
            continue
        groups = view.groups(axis)
        homes = groups // gpus_per_node
        panels.append(
            _Panel(
                axis=axis,
                groups=groups,
                nodes=_nodes_to_draw(homes, num_nodes),
                num_nodes=num_nodes,
                gpus_per_node=gpus_per_node,
                stays_in_node=bool((homes.min(axis=1) == homes.max(axis=1)).all()),
            )
        )
    return panels


def _nodes_to_draw(homes: npt.NDArray[np.int32], num_nodes: int) -> tuple[int, ...]:
    """Choose all nodes of a small world, else those the groups of node 0 reach, then the first.

    Args:
        homes: Node of every group member, ``(num_groups, group_size)``, int32.
        num_nodes: Nodes in the world.
    """
    if num_nodes <= _MAX_NODES:
        return tuple(range(num_nodes))
    reached = np.unique(homes[homes[:, 0] == 0])[:_MAX_NODES].tolist()
    others = [node for node in range(_MAX_NODES) if node not in reached]
    return tuple(sorted(reached + others[: _MAX_NODES - len(reached)]))


def _gpu_columns(gpus_per_node: int) -> int:
    if gpus_per_node <= 4:
        return gpus_per_node
    return 4 if gpus_per_node <= 8 else 8


def _nodes_per_row(num_nodes: int, gpus_per_node: int) -> int:
    return min(num_nodes, 2 if gpus_per_node <= 8 else 1)


def _node_size(gpus_per_node: int) -> tuple[float, float]:
    columns = _gpu_columns(gpus_per_node)
    rows = -(-gpus_per_node // columns)
    width = columns * (_CELL_W + _CELL_GAP) - _CELL_GAP + 2 * _NODE_PAD
    return width, rows * (_CELL_H + _CELL_GAP) - _CELL_GAP + _NODE_PAD + _NODE_LABEL


def _panel_width(world_size: int, gpus_per_node: int) -> float:
    across = _nodes_per_row(-(-world_size // gpus_per_node), gpus_per_node)
    width, _ = _node_size(gpus_per_node)
    return max(across * (width + _NODE_GAP) - _NODE_GAP + 2 * _PANEL_PAD, _PANEL_MIN_W)


def _panel_height(panel: _Panel) -> float:
    rows = -(-len(panel.nodes) // _nodes_per_row(panel.num_nodes, panel.gpus_per_node))
    _, node_h = _node_size(panel.gpus_per_node)
    nodes_h = rows * (node_h + _NODE_GAP)
    return _PANEL_HEAD + nodes_h + _CHIP_H * len(_legend(panel)) + _PANEL_PAD - 4


def _draw_panel(panel: _Panel, x: float, y: float, width: float, height: float) -> list[str]:
    num_groups, group_size = panel.groups.shape
    elements = [rect(x, y, width, height, fill=_CARD, rx=12, stroke=_LINE)]
    left = x + _PANEL_PAD
    heading = f"{panel.axis} {group_size:,}"
    elements.append(label(left, y + 34, heading, 20, weight=700))
    elements.append(
        label(left + 20 + 12 * len(heading), y + 34, _count(num_groups, "group"), 13, fill=MUTED)
    )
    elements.append(label(left, y + 58, _MEANINGS[panel.axis], 13, fill=MUTED))
    elements += _badge(x + width - _PANEL_PAD, y + 17, near=panel.stays_in_node)
    per_row = _nodes_per_row(panel.num_nodes, panel.gpus_per_node)
    node_w, node_h = _node_size(panel.gpus_per_node)
    group_of = _group_numbers(panel)
    colours = _colours(sorted(set(group_of.values())))
    for i, node in enumerate(panel.nodes):
        node_x = left + i % per_row * (node_w + _NODE_GAP)
        node_y = y + _PANEL_HEAD + i // per_row * (node_h + _NODE_GAP)
        elements += _draw_node(panel, node, node_x, node_y, group_of, colours)
    rows = -(-len(panel.nodes) // per_row)
    legend_y = y + _PANEL_HEAD + rows * (node_h + _NODE_GAP)
    for i, line in enumerate(_legend(panel)):
        step = (width - 2 * _PANEL_PAD) / max(2, len(line))
        for k, (group, text) in enumerate(line):
            elements += _chip(left + k * step, legend_y + i * _CHIP_H, group, text, colours)
    return elements


def _draw_node(
    panel: _Panel,
    node: int,
    x: float,
    y: float,
    group_of: dict[int, int],
    colours: dict[int, str],
) -> list[str]:
    width, height = _node_size(panel.gpus_per_node)
    elements = [rect(x, y, width, height, fill=_NODE, rx=8, stroke=_LINE)]
    elements.append(label(x + _NODE_PAD, y + 15, f"node {node:,}", 11, fill=MUTED, weight=600))
    first = node * panel.gpus_per_node
    columns = _gpu_columns(panel.gpus_per_node)
    for i in range(panel.gpus_per_node):
        rank = first + i
        if rank not in group_of:  # the last node may be partly used
            break
        cell_x = x + _NODE_PAD + i % columns * (_CELL_W + _CELL_GAP)
        cell_y = y + _NODE_LABEL + i // columns * (_CELL_H + _CELL_GAP)
        group = group_of[rank]
        is_own = group == group_of.get(0)
        frame, thickness = (INK, 2.5) if is_own else (None, None)
        middle = cell_x + _CELL_W / 2
        size, small = min(14, 54 / len(str(rank))), min(9.5, 54 / len(f"g{group}"))
        cell = (
            element("title", f"rank {rank}, {panel.axis} group {group}, node {node}"),
            rect(
                *(cell_x, cell_y, _CELL_W, _CELL_H),
                fill=colours[group],
                rx=6,
                stroke=frame,
                stroke_width=thickness,
            ),
            label(middle, cell_y + 16, rank, size, weight=600, anchor="middle"),
            label(middle, cell_y + 29, f"g{group}", small, fill=_GROUP, anchor="middle"),
        )
        elements.append(element("g", "".join(cell)))
    return elements


def _group_numbers(panel: _Panel) -> dict[int, int]:
    """Return the group number of each rank that is drawn."""
    number = np.empty(panel.groups.size, dtype=np.int32)
    number[panel.groups.ravel()] = np.repeat(
        np.arange(panel.groups.shape[0], dtype=np.int32), panel.groups.shape[1]
    )
    ranks = panel.ranks
    return dict(zip(ranks.tolist(), number[ranks].tolist(), strict=True))


def _colours(groups: Sequence[int]) -> dict[int, str]:
    """Give each group a colour; beyond the fixed ones come lighter and darker shades of them."""
    colours = {}
    for i, group in enumerate(groups):
        towards, share = ((255, 0.0), (255, 0.5), (60, 0.22))[i // len(_COLOURS) % 3]
        base = _COLOURS[i % len(_COLOURS)]
        channels = (int(base[k : k + 2], 16) for k in (1, 3, 5))
        colours[group] = hex_colour(*(value + (towards - value) * share for value in channels))
    return colours


def _legend(panel: _Panel) -> list[list[tuple[int | None, str]]]:
    """Return the lines below the nodes; an entry is a group number and its ranks, or a remark."""
    drawn = sorted(set(_group_numbers(panel).values()))
    width = len(groups_text(panel.groups[drawn[-1]][None])[0]) + len(str(drawn[-1]))
    per_line = 2 if 2 * width <= _LEGEND_TEXT else 1
    entries = [(group, _ranks_text(panel, group)) for group in drawn[: per_line * _LEGEND_ROWS]]
    lines: list[list[tuple[int | None, str]]] = [
        [*entries[start : start + per_line]] for start in range(0, len(entries), per_line)
    ]
    more = len(panel.groups) - len(entries)
    if more:
        lines.append([(None, f"... {_count(more, 'more group')}")])
    if len(panel.nodes) < panel.num_nodes:
        shown = f"{len(panel.nodes)} of {panel.num_nodes:,} nodes drawn"
        lines.append([(None, f"{shown}: where the groups of node 0 are")])
    return lines


def _ranks_text(panel: _Panel, group: int) -> str:
    """Return as many ranks of a group as fit one line."""
    row = panel.groups[group : group + 1]
    texts = [groups_text(row, max_ranks=count)[0] for count in range(16, 0, -1)]
    return next((text for text in texts if len(text) <= _LEGEND_TEXT), texts[-1])


def _chip(x: float, y: float, group: int | None, text: str, colours: dict[int, str]) -> list[str]:
    if group is None:
        return [label(x, y + 14, text, 12, fill=MUTED)]
    return [
        rect(x, y + 3, 14, 14, fill=colours[group], rx=3),
        label(x + 22, y + 14, f"g{group}", 12, fill=MUTED, weight=600),
        label(x + 22 + 9 * max(3, len(str(group)) + 1), y + 14, text, 12),
    ]


def _badge(right: float, y: float, *, near: bool) -> list[str]:
    text = "inside a node" if near else "between nodes"
    back, ink = _NEAR if near else _FAR
    return [
        rect(right - _BADGE_W, y, _BADGE_W, 22, fill=back, rx=11),
        label(right - _BADGE_W / 2, y + 15, text, 12, fill=ink, weight=600, anchor="middle"),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
