"""The picture of a topology: what is drawn, checked through the document's structure."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.parallel import Topology
from megacore.pipeline import Schedule, build_schedule
from megatrain.view import schedule_svg, topology_svg
from megatrain.view.notebook import show_in_notebook
from megatrain.view.svg import dark_rules

NAMESPACE = "{http://www.w3.org/2000/svg}"


def cells(svg: str) -> list[tuple[int, str, int, str]]:
    """Rank, axis, group number and colour of every GPU cell, in drawing order."""
    found = []
    for cell in ElementTree.fromstring(svg).iter(f"{NAMESPACE}g"):
        match = re.match(r"rank (\d+), (\w+) group (\d+),", cell[0].text or "")
        assert match is not None
        rank, axis, group = match.groups()
        found.append((int(rank), axis, int(group), cell[1].attrib["fill"]))
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def test_every_rank_is_in_every_panel_once() -> None:
    drawn = cells(topology_svg(Topology(world_size=16, tp=4, pp=2)))
    for axis in ("tp", "dp", "pp"):
        assert [rank for rank, of, _, _ in drawn if of == axis] == list(range(16))
    assert "cp" not in {axis for _, axis, _, _ in drawn}


def test_equal_colours_in_a_panel_mean_one_group() -> None:
    topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    drawn = cells(topology_svg(topology))
    for axis in ("ep", "edp"):
        panel = [(rank, group, colour) for rank, of, group, colour in drawn if of == axis]
        assert [group for _, group, _ in sorted(panel)] == [
            next(i for i, row in enumerate(topology.expert.get_ranks(axis)) if rank in row)
            for rank in range(16)
        ]
        colours = {(group, colour) for _, group, colour in panel}
        assert len({group for group, _ in colours}) == len({colour for _, colour in colours})


def test_panels_say_whether_traffic_leaves_a_node() -> None:
    found = texts(topology_svg(Topology(world_size=16, tp=4, pp=2)))
    assert found.count("inside a node") == 2
    assert found.count("between nodes") == 1


def test_equal_views_are_drawn_once() -> None:
    assert "All layers" in texts(topology_svg(Topology(world_size=8, tp=2)))
    assert "Expert layers" in texts(topology_svg(Topology(world_size=8, tp=2, ep=2)))


def test_a_large_world_shows_the_nodes_of_node_0s_groups() -> None:
    svg = topology_svg(Topology(world_size=1 << 20, tp=8, pp=16))
    stages = [rank for rank, axis, group, _ in cells(svg) if axis == "pp" and group == 0]
    assert stages == [65536 * stage for stage in range(8)]
    assert len(svg) < 1_000_000


def test_a_world_of_one_says_that_nobody_talks() -> None:
    svg = topology_svg(Topology(world_size=1))
    assert cells(svg) == []
    assert any("no rank talks to another" in text for text in texts(svg))


def test_a_partly_used_last_node_has_only_its_ranks() -> None:
    drawn = cells(topology_svg(Topology(world_size=12, tp=4), gpus_per_node=8))
    assert [rank for rank, axis, _, _ in drawn if axis == "tp"] == list(range(12))


def test_a_node_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpus_per_node must be between 1 and 128, got 0"):
        topology_svg(Topology(world_size=4), gpus_per_node=0)


def test_dark_pages_turn_lightness_around() -> None:
    rules = dark_rules('<rect fill="#ffffff" stroke="#111111"/><a href="#ffffff"/>', "x")
    dark = {(name, int(value[:2], 16)) for name, value in re.findall(r"\{(\w+):#(\w{6})\}", rules)}
    assert len(dark) == 2
    assert all(value < 0x30 if name == "fill" else value > 0xC0 for name, value in dark)


def test_a_notebook_shows_the_picture_that_follows_dark_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: dict[type, Callable[[Any], str]] = {}
    formatter = SimpleNamespace(for_type=shown.__setitem__)
    display = SimpleNamespace(formatters={"image/svg+xml": formatter})
    shell = SimpleNamespace(display_formatter=display)
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    show_in_notebook()
    topology = Topology(world_size=4, tp=2)
    svg = shown[Topology](topology)
    assert svg == topology_svg(topology)
    drawn = set(re.findall(r' fill="(#\w{6})"', svg))
    _, _, rules = svg.partition("prefers-color-scheme:dark")
    assert drawn
    assert all(f'[fill="{colour}"]{{' in rules for colour in drawn)
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert shown[Schedule](schedule) == schedule_svg(schedule)


def test_nothing_is_registered_outside_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = SimpleNamespace(get_ipython=lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    show_in_notebook()
