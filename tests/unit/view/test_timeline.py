"""The picture: well-formed, complete, and of simulated as of measured events."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from megacore.pipeline import Costs, TimedAction, build_schedule
from megatrain.view import schedule_svg, timeline_svg

NS = "{http://www.w3.org/2000/svg}"


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def boxes(root: ET.Element) -> dict[str, ET.Element]:
    """Boxes by the action their tooltip names."""
    found = {}
    for rect in root.iter(f"{NS}rect"):
        title = rect.find(f"{NS}title")
        if title is not None:
            found[title.text.partition(":")[0]] = rect
    return found


def test_every_action_has_a_box_at_its_time_in_the_row_of_its_rank() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=4)
    timeline = schedule.simulate(Costs(send=0.25))
    root = parse(timeline_svg(timeline.events, title="a < b"))
    found = boxes(root)
    assert len(found) == len(timeline.events)
    left = float(found["0F0"].get("x"))
    scale = float(found["0F1"].get("x")) - left  # one unit of time
    rows = sorted({float(rect.get("y")) for rect in found.values()})
    assert len(rows) == 2
    for rank, action, start, end in timeline.events:
        rect = found[str(action)]
        assert float(rect.get("x")) == pytest.approx(left + start * scale, rel=1e-3)
        assert float(rect.get("width")) == pytest.approx((end - start) * scale, abs=1.6)
        assert float(rect.get("y")) == rows[rank]
    text = " ".join(root.itertext())
    assert f"bubble {timeline.bubble_fraction:.1%}" in text
    assert "rank 0" in text
    assert "rank 1" in text
    assert "a < b" in text


def test_kinds_have_a_hue_and_chunks_a_shade() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=2)
    svg = timeline_svg(schedule.simulate().events)
    found = boxes(parse(svg))
    colours = {found[action].get("fill") for action in ("0F0", "2F0", "0B0", "2B0")}
    assert len(colours) == 4
    assert all(f'.megacore [fill="{colour}"]{{' in svg for colour in colours)  # on dark pages


def test_it_follows_light_and_dark_viewers_and_may_be_transparent() -> None:
    events = build_schedule("gpipe", num_ranks=2, num_microbatches=2).simulate().events
    svg = timeline_svg(events)
    assert "@media (prefers-color-scheme:dark)" in svg
    page = f'width="{parse(svg).get("width")}"'
    assert svg.count(page) == 2
    assert timeline_svg(events, background=False).count(page) == 1


@dataclass(frozen=True)
class Measured:
    rank: int
    action: str
    start_us: float
    end_us: float


@pytest.mark.parametrize("kind", [TimedAction, Measured])
def test_measured_events_start_at_zero_and_are_shown_in_milliseconds(kind: type) -> None:
    events = [
        kind(3, "0F0", 5_000_000.0, 5_002_000.0),
        kind(3, "0RECV_B0", 5_002_000.0, 5_006_000.0),
        kind(3, "0B0", 5_006_000.0, 5_010_000.0),
        kind(5, "1F0", 5_002_000.0, 5_004_000.0),
        kind(5, "1B0", 5_004_000.0, 5_006_000.0),
    ]
    root = parse(timeline_svg(events))
    text = " ".join(root.itertext())
    assert sorted(boxes(root)) == ["0B0", "0F0", "1B0", "1F0"]
    assert "0F0: stage 0, chunk 0, 0 to 2" in text
    assert "from 0 to 10 ms" in text
    assert "bubble 50.0%" in text
    assert "idle 40.0%" in text  # rank 3: 4 of 10 ms
    assert "rank 5" in text


def test_a_common_makespan_makes_two_pictures_comparable() -> None:
    events = build_schedule("1f1b", num_ranks=2, num_microbatches=4).simulate().events
    alone = boxes(parse(timeline_svg(events, width=900)))
    longer = boxes(parse(timeline_svg(events, width=900, makespan=30.0)))
    ratio = float(alone["0F1"].get("width")) / float(longer["0F1"].get("width"))
    assert ratio == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_axis_has_as_many_ticks_in_any_unit_of_time(unit: float) -> None:
    costs = Costs(forward=unit, backward_input=unit, backward_weight=unit)
    events = build_schedule("1f1b", num_ranks=2, num_microbatches=4).simulate(costs).events
    root = parse(timeline_svg(events, width=900))
    ticks = [t.text for t in root.iter(f"{NS}text") if t.get("text-anchor") == "middle"]
    assert [float(tick) / unit for tick in ticks] == pytest.approx([0, 2, 4, 6, 8, 10, 12, 14])


def test_large_pictures_stay_small_and_drop_numbers_that_do_not_fit() -> None:
    schedule = build_schedule("interleaved_1f1b", num_ranks=8, num_chunks=4, num_microbatches=128)
    svg = timeline_svg(schedule.simulate().events)
    assert len(svg) < 600_000
    root = parse(svg)
    assert float(root.get("width")) < 4500
    shapes = "".join(path.get("d") for path in root.iter(f"{NS}path"))
    assert shapes.count("M") == 2 * 8 * 4 * 128
    assert all(len(group) == 1 for group in root.iter(f"{NS}g"))  # only the shades of the legend


def test_no_events_give_a_picture_that_says_so() -> None:
    assert "no compute action to show" in timeline_svg([])
    assert "no compute action to show" in timeline_svg([(0, "0SEND_F0", 0.0, 1.0)])


def test_the_picture_of_a_schedule_names_it() -> None:
    schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
    text = " ".join(parse(schedule_svg(schedule)).itertext())
    assert "1f1b: 4 ranks, 8 microbatches" in text
