from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megacore.config import config_to_toml, load_config, resolve
from megacore.errors import MegacoreError
from megacore.report import (
    GeneratedText,
    RankMemory,
    RunInfo,
    RunStart,
    RunTimeline,
    TimelineEvent,
    collect_environment,
    read_run,
    write_comparison,
    write_info,
    write_report,
    write_timeline,
)
from megacore.report.charts import ChartSpec, Mark, Reference, Series, line_chart
from megacore.report.events import events_of

CONFIG = resolve(
    load_config(
        None,
        [
            *(("parallel.tp", "2"), ("parallel.pp", "2"), ("model.vocab_size", "256")),
            *(("optimizer.lr", "0.002"), ("model.num_kv_heads", "2"), ("model.logit_softcap", "9")),
        ],
    ),
    4,
    vocab_size=256,
    cuda=False,
)
INFO = RunInfo(
    name="demo <script>alert(1)</script> & co",
    started_at="2026-01-02 03:04",
    wall_time_s=108.4,
    layout={"world_size": 4, "tp": 2, "pp": 2},
    model="GPT, 4 layers",
    num_parameters=885_376,
    data="79 topics",
    num_tokens=442_960,
    unigram_entropy=3.25,
    schedule="1f1b, 8 microbatches",
    environment={"torch": "2.13.0", "host": "box"},
    config=CONFIG.model_dump(mode="json", exclude_none=True),
    derived=sorted(CONFIG.derived),
)
EVENTS = [
    TimelineEvent(rank=0, action="0F0", start_us=0.0, end_us=10.0),
    TimelineEvent(rank=1, action="1F0", start_us=10.0, end_us=20.0),
    TimelineEvent(rank=1, action="1B0", start_us=20.0, end_us=40.0),
    TimelineEvent(rank=0, action="0B0", start_us=40.0, end_us=60.0),
]


class Page(HTMLParser):
    """Checks that tags nest, and collects what a reader sees."""

    VOID = frozenset({"meta", "br", "hr", "link", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.stack):
            self.text.append(data.strip())

    @property
    def visible(self) -> str:
        return " ".join(part for part in self.text if part)


def _record(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step + 1,
        "loss": 2.0 + 3.0 * math.exp(-step / 10),
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_s": 12_345.0,
        "step_time_s": 0.25,
        "num_skipped": 0,
        "samples": 8 * (step + 1),
    }
    return values | changes


def _run_dir(path: Path, records: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics.jsonl").write_text(lines)
    (path / "config.toml").write_text(config_to_toml(CONFIG))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = [_record(step) for step in range(100)]
    records[49]["validation_loss"] = 2.5
    records[99]["validation_loss"] = 2.125
    return _run_dir(tmp_path / "run", records)


def _page(run_dir: Path, info: RunInfo = INFO) -> Page:
    return Page(write_report(run_dir, info=info).read_text(encoding="utf-8"))


def test_the_page_is_one_file_that_asks_for_nothing_else(run_dir: Path) -> None:
    write_timeline(run_dir, RunTimeline(step=3, predicted=EVENTS, measured=EVENTS))
    path = write_report(run_dir, info=INFO)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    loading = {"src", "srcset", "poster", "background"}
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not loading & set(attributes)
        href = attributes.get("href")
        assert href is None or "://" not in href
    assert "@import" not in html
    assert "url(" not in html
    assert "fetch(" not in html
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not list(run_dir.glob("*.partial"))


def test_the_headline_numbers_are_those_of_the_run(run_dir: Path) -> None:
    visible = _page(run_dir).visible
    assert "Loss, last 10 steps 2.000 nats 1.25 below unigram entropy" in visible
    assert "Validation loss 2.125 nats perplexity 8.37, step 100" in visible
    assert "Speed 12.3k tokens/s median; 250 ms per step" in visible
    assert "Wall time 1 min 48 s" in visible
    assert "World 4 ranks tp 2 x pp 2" in visible
    assert "Samples 800 no step was skipped" in visible


def test_a_single_process_needs_no_layout_picture(run_dir: Path) -> None:
    visible = _page(run_dir, replace(INFO, layout={"world_size": 1})).visible
    assert "World 1 rank one process" in visible
    assert "Rank layout" not in visible
    assert "Rank layout" in _page(run_dir).visible


def test_names_of_the_user_cannot_become_markup(run_dir: Path) -> None:
    page = _page(run_dir)
    assert "demo <script>alert(1)</script> & co" in page.visible
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_settings_that_differ_from_the_default_are_marked(run_dir: Path) -> None:
    html = write_report(run_dir, info=INFO).read_text(encoding="utf-8")
    changed = re.findall(r'<tr class="changed"><td>(\w+)</td><td><span>([^<]*)<', html)
    assert ("tp", "2") in changed
    assert ("pp", "2") in changed
    assert ("lr", "0.002") in changed
    assert "default: 0.003" in html
    assert ("num_kv_heads", "2") in changed  # set, although its default is derived
    assert "default: derived from others" in html
    assert ("logit_softcap", "9") in changed
    assert "default: not set" in html
    derived = re.findall(r'<tr class="derived"><td>(\w+)</td>', html)
    assert {"min_lr", "etp", "ffn_hidden_size", "trace_step"} <= set(derived)
    assert not {"num_kv_heads", "vocab_size"} & set(derived)
    assert "seed" not in derived + [name for name, _ in changed]


@pytest.mark.parametrize("num_spare_slots", ["0", "2"])
def test_settings_of_an_inner_section_have_rows_of_their_own(
    run_dir: Path, num_spare_slots: str
) -> None:
    settings = [("moe.num_experts", "4"), ("moe.echo.num_spare_slots", num_spare_slots)]
    config = resolve(load_config(None, settings), 1, vocab_size=256, cuda=False)
    info = replace(INFO, config=config.model_dump(mode="json", exclude_none=True))
    html = write_report(run_dir, info=info).read_text(encoding="utf-8")
    [kind, value] = re.findall(
        r'<tr class="(\w*)"><td>echo\.num_spare_slots</td><td><span>(\d+)<', html
    )[0]
    assert (kind, value) == ("changed" if num_spare_slots == "2" else "", num_spare_slots)
    assert '<tr class=""><td>echo.planner</td><td><span>balanced<' in html
    assert "<td>echo</td>" not in html


def test_every_drawing_is_well_formed(run_dir: Path) -> None:
    write_timeline(run_dir, RunTimeline(step=3, predicted=EVENTS, measured=EVENTS))
    html = write_report(run_dir, info=INFO).read_text(encoding="utf-8")
    drawings = re.findall(r"<svg.*?</svg>", html, re.S)
    assert (
        len(drawings) >= 4 + 3 + 1 + 2
    )  # loss for two widths and scales, small charts, layout, timelines
    for drawing in drawings:
        ET.fromstring(drawing)


def test_the_timeline_shows_prediction_and_measurement(run_dir: Path) -> None:
    write_timeline(run_dir, RunTimeline(step=3, predicted=EVENTS, measured=EVENTS))
    visible = _page(run_dir).visible
    assert "Pipeline schedule" in visible
    assert "Predicted" in visible
    assert "Measured in step 3" in visible
    assert visible.count("bubble 50.0% of all ranks' time, from 0 to 0.06 ms") == 2


def test_the_timeline_is_told_in_numbers(run_dir: Path) -> None:
    slow = [
        replace(event, start_us=2 * event.start_us, end_us=2 * event.end_us) for event in EVENTS
    ]
    wait = TimelineEvent(rank=0, action="0RECV_B0", start_us=20.0, end_us=3020.0)
    halves = [
        TimelineEvent(rank=0, action="0I0", start_us=80.0, end_us=1080.0),
        TimelineEvent(rank=0, action="0W0", start_us=1080.0, end_us=4080.0),
    ]
    timeline = RunTimeline(step=3, predicted=EVENTS, measured=[*slow[:3], wait, *halves])
    write_timeline(run_dir, timeline)
    visible = _page(run_dir).visible
    assert "The step took 4.1 ms, 6700.0% more than the 0.1 ms" in visible
    assert "Bubble: 50.0% predicted, 50.0% measured" in visible
    head = "Stage Ranks Forward Backward Backward, input Backward, weights Waiting"
    assert f"{head} 0 0 0.02 1.00 3.00 3.00 1 1 0.02 0.04 0.00" in visible


def test_wide_pictures_scroll_inside_their_card(run_dir: Path) -> None:
    write_timeline(run_dir, RunTimeline(step=3, predicted=EVENTS, measured=EVENTS))
    html = write_report(run_dir, info=INFO).read_text(encoding="utf-8")
    boxes = re.findall(r'<div class="scroll (\w+)" tabindex="0">(.*?)</div>', html, re.S)
    assert [(kind, body.count("<svg")) for kind, body in boxes] == [
        ("drawing", 1),
        ("timelines", 2),
    ]
    assert html.count("Scroll the picture sideways") == 2


def test_without_a_traced_step_there_is_no_timeline(run_dir: Path) -> None:
    assert "Pipeline schedule" not in _page(run_dir).visible


def test_a_page_can_be_made_again_from_the_folder(run_dir: Path) -> None:
    first = write_report(run_dir, info=INFO).read_text(encoding="utf-8")
    assert write_report(run_dir).read_text(encoding="utf-8") == first
    assert read_run(run_dir).info == INFO


def test_links_point_to_files_that_exist(run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    page = _page(run_dir)
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links == {"metrics.jsonl", "config.toml", "run.json", "checkpoints"}
    for link in links:
        assert link is not None
        assert (run_dir / link).exists()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_that_ended_early_still_has_a_page(tmp_path: Path, num_steps: int) -> None:
    run_dir = _run_dir(tmp_path / "run", [_record(step) for step in range(num_steps)])
    visible = _page(run_dir).visible
    assert ("no step was recorded" in visible) == (num_steps == 0)


def _resumed(**changes: Any) -> RunInfo:
    """A run of 100 steps that went on with a pipeline after step 60."""
    first = RunStart(
        first_step=1, started_at="a", layout={"world_size": 4, "tp": 4}, schedule="gpipe"
    )
    second = RunStart(
        first_step=61,
        started_at="b",
        layout=INFO.layout,
        schedule="1f1b",
        resumed_from="runs/a/checkpoints/step_00000060",
    )
    return replace(INFO, starts=[first, second], **changes)


def test_changes_of_the_layout_and_skipped_steps_are_marked(tmp_path: Path) -> None:
    records = [_record(step, num_skipped=(step >= 9) + (step >= 79)) for step in range(100)]
    run_dir = _run_dir(tmp_path / "run", records)
    html = write_report(run_dir, info=_resumed()).read_text(encoding="utf-8")
    visible = Page(html).visible
    text = "continued from step_00000060 with 4 ranks = tp 2 x pp 2, previously 4 ranks = tp 4"
    assert f"1 step 61: {text}" in visible
    assert [event.step for event in events_of(read_run(run_dir))] == [10, 61, 80]
    # Four charts of the loss and three small ones.
    assert html.count('class="mark start"') == 7
    assert html.count('class="mark skip"') == 14


def test_a_mark_lies_between_its_steps() -> None:
    points = [(1.0, 1.0), (51.0, 3.0), (101.0, 2.0)]
    mark = Mark(step=51.5, kind="start", label="1")
    spec = ChartSpec(label="x", series=[Series(name="loss", points=points)], marks=[mark])
    svg = line_chart(spec, width=400, height=200)
    (middle,) = re.findall(r'<line class="mark start" x1="([\d.]+)"', svg)
    assert float(middle) == pytest.approx(_coordinates(svg)[1][0])


def test_a_logarithmic_axis_makes_equal_ratios_equally_long() -> None:
    points = [(1.0, 1.0), (2.0, 10.0), (3.0, 100.0)]
    spec = ChartSpec(label="x", series=[Series(name="loss", points=points)], log=True)
    svg = line_chart(spec, width=400, height=400)
    heights = [y for _, y in _coordinates(svg)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert ">100<" in svg


def test_the_tokens_axis_follows_the_samples(run_dir: Path) -> None:
    html = write_report(run_dir, info=INFO).read_text(encoding="utf-8")
    chart = re.findall(r'<svg class="chart".*?</svg>', html, re.S)[0]
    length = CONFIG.model.seq_length
    ticks = re.findall(r'class="axis" x1="([\d.]+)".{0,40}?y1="31".*?>(\d+)k<', chart)
    left, right = (min(map(float, xs := re.findall(r'grid" x1="([\d.]+)"', chart))), 1108.0)
    assert xs
    assert len(ticks) > 2
    for x, thousands in ticks:
        step = int(thousands) * 1000 / (8 * length)
        assert float(x) == pytest.approx(left + (step - 1) / 99 * (right - left), abs=1)


def test_waits_are_shown_by_cause_for_each_start(tmp_path: Path) -> None:
    times = {
        "step_time_s": 1.0,
        "time_forward_backward_s": 0.5,
        "time_all_to_all_s": 0.125,
        "time_grad_reduce_s": 0.25,
    }
    records = [
        _record(step, **times, time_pipeline_wait_s=0.0 if step < 60 else 0.2)
        for step in range(100)
    ]
    visible = _page(_run_dir(tmp_path / "run", records), _resumed()).visible
    first, _, second = visible.partition("steps 61 to 100, 4 ranks = tp 2 x pp 2")
    assert "steps 1 to 60, 4 ranks = tp 4 1,000 ms per step" in first
    assert "forward and backward 375 ms 37.5%" in first
    assert "wait for all-to-all 125 ms 12.5%" in first
    assert "gradient reduction 250 ms 25.0%" in first
    assert "wait for the pipeline" not in first
    assert "wait for the pipeline 200 ms 20.0%" in second


def test_memory_text_and_hardware_are_shown(run_dir: Path) -> None:
    memory = [RankMemory(pp_rank=0, predicted={"weights": 3 << 20}, measured=5 << 20)]
    sample = GeneratedText(prompt="The <b>", text=" end & more")
    environment = {"processor": "EPYC", "cores": "2"}
    info = replace(
        INFO, memory=memory, sample=sample, environment=environment, command="megacore train x"
    )
    visible = _page(run_dir, info).visible
    assert "Pipeline rank Weights Predicted Measured 0 3.0 MiB 3.0 MiB 5.0 MiB" in visible
    html = (run_dir / "report.html").read_text()
    assert '<td data-name="Weights">3.0 MiB</td>' in html  # for narrow pages, without the head
    assert "<span>megacore</span> <span>train</span>" in html  # words that do not break
    assert "The <b> end & more" in visible
    assert "EPYC, 2 cores" in visible
    assert "megacore train x" in visible


def test_without_a_pipeline_nothing_is_called_a_bubble(run_dir: Path) -> None:
    events = [replace(event, rank=0) for event in EVENTS]
    write_timeline(run_dir, RunTimeline(step=3, predicted=events[:1], measured=EVENTS))
    visible = _page(run_dir).visible
    assert "There is no pipeline" in visible
    assert "ubble" not in visible
    assert "Waiting" not in visible
    assert "Predicted" not in visible


def test_two_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    write_info(run_dir, INFO)
    other = _run_dir(tmp_path / "other", [_record(step, loss=3.0) for step in range(50)])
    config = json.loads(json.dumps(INFO.config))
    config["optimizer"]["lr"] = 0.5
    write_info(other, replace(INFO, name="other", config=config))
    html = write_comparison(run_dir, other, tmp_path / "compare.html").read_text(encoding="utf-8")
    visible = Page(html).visible
    assert "steps 100 50 -50.0%" in visible
    assert "loss, last 10 steps 2.0002 3.0000 +50.0%" in visible
    assert "optimizer.lr 0.002 0.5" in visible
    assert "within noise" not in visible
    assert "optimizer.eps" not in visible
    for drawing in re.findall(r"<svg.*?</svg>", html, re.S):
        ET.fromstring(drawing)


def _noisy(base: float, spread: float, step: int) -> float:
    return base + spread * (step * 7 % 10 - 4.5)


def test_differences_within_noise_and_other_batches_are_marked(tmp_path: Path) -> None:
    folders = []
    for number, (loss, speed) in enumerate(((2.0, 100.0), (2.004, 103.0), (2.5, 300.0))):
        records = [
            _record(
                step,
                loss=_noisy(loss, 0.01, step),
                tokens_per_s=_noisy(speed, 2.0, step),
                step_time_s=1 / _noisy(speed, 2.0, step),
            )
            for step in range(60)
        ]
        folders.append(_run_dir(tmp_path / str(number), records))
        config = json.loads(json.dumps(INFO.config))
        config["train"]["global_batch_size"] = 32 if number < 2 else 64
        write_info(folders[-1], replace(INFO, name=f"run {number}", config=config))
    near, far = (
        Page(write_comparison(folders[0], other, tmp_path / "x.html").read_text()).visible
        for other in folders[1:]
    )
    assert re.search(r"loss, last 10 steps [\d.]+ [\d.]+ \+0.2% within noise", near)
    assert re.search(r"tokens/s, median \S+ \S+ \+\S+ within noise", near)
    assert re.search(r"time of a step, median, ms \S+ \S+ -\S+ within noise", near)
    assert "global batch, sequences 32 32 +0.0%" in near
    assert "The global batches differ" not in near
    assert "within noise" not in far
    assert "global batch, sequences 32 64 +100.0%" in far
    assert "The global batches differ" in far


def test_a_comparison_of_a_damaged_run_is_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    write_info(run_dir, INFO)
    with pytest.raises(MegacoreError, match=r"is not the folder of a run"):
        write_comparison(run_dir, tmp_path, tmp_path / "compare.html")


def test_a_diverged_run_says_since_when(tmp_path: Path) -> None:
    records = [_record(step, loss=None if step in (3, 7, 8, 9) else 2.0) for step in range(10)]
    records[4]["validation_loss"] = 2.5
    records[9]["validation_loss"] = None
    visible = _page(_run_dir(tmp_path / "run", records)).visible
    assert "Loss not finite since step 8" in visible
    assert "Validation loss not finite since step 10" in visible
    assert "The training loss was not finite in 4 steps, first in step 4" in visible
    assert "unigram entropy" in visible
    assert "below unigram" not in visible


def test_steps_without_labels_are_not_a_divergence(tmp_path: Path) -> None:
    records = [_record(step) for step in range(10)]
    for record in records[1::2]:
        del record["loss"], record["grad_norm"]
    visible = _page(_run_dir(tmp_path / "run", records)).visible
    assert "not finite" not in visible
    assert "Loss, last 5 steps" in visible


def test_a_resumed_run_does_not_mix_its_time_with_the_steps_before(run_dir: Path) -> None:
    visible = _page(run_dir).visible
    assert "Wall time 1 min 48 s this run, 100 steps" in visible
    info = replace(INFO, resumed_from="runs/a/checkpoints/step_00000060")
    visible = _page(run_dir, info).visible
    assert "Wall time 1 min 48 s this run, continued from step_00000060" in visible


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    records = [_record(step, loss=None if step == 3 else 2.0) for step in range(6)]
    records[-1]["num_skipped"] = 1
    page = _page(_run_dir(tmp_path / "run", records))
    assert "1 skipped: gradient not finite" in page.visible


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    records = [_record(step, loss=2.0 + (step * 7919 % 100) / 100) for step in range(20_000)]
    run_dir = _run_dir(tmp_path / "run", records)
    assert write_report(run_dir, info=INFO).stat().st_size < 800_000


def test_a_run_that_was_stopped_has_a_page_without_a_time(run_dir: Path) -> None:
    write_info(run_dir, replace(INFO, wall_time_s=None))
    visible = Page(write_report(run_dir).read_text(encoding="utf-8")).visible
    assert "Wall time none the run has not ended" in visible
    assert "Speed 12.3k tokens/s" in visible


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MegacoreError, match=r"is not the folder of a run: it has no run\.json"):
        write_report(tmp_path)


def test_a_run_without_a_step_is_told_from_a_folder_that_is_none(run_dir: Path) -> None:
    with pytest.raises(MegacoreError, match=r"the run in .* writes with its first step; train"):
        write_report(run_dir)


def test_a_damaged_file_is_named(run_dir: Path) -> None:
    write_report(run_dir, info=INFO)
    (run_dir / "run.json").write_text('{"name": ')
    with pytest.raises(MegacoreError, match=r"cannot read .*run\.json"):
        write_report(run_dir)


STRANGE = (None, True, -1, 1 << 80, 1e308, -1e999, "x", "\0", [], [[]], {}, {"x": 1}, [None], 0)


@pytest.mark.parametrize("name", ["run.json", "timeline.json", "metrics.jsonl"])
def test_malformed_files_of_a_run_are_one_sentence(run_dir: Path, name: str) -> None:
    """Every value of a file is replaced by every strange one: there is a page or one sentence."""
    _page(run_dir)
    write_timeline(run_dir, RunTimeline(step=3, predicted=EVENTS, measured=EVENTS))
    original = (run_dir / name).read_text()
    lines = original.splitlines() if name.endswith("l") else [original]
    random = Random(8)
    refusals: list[str] = []
    for value in STRANGE:
        for path in _paths(json.loads(lines[0])):
            damaged = _replaced(json.loads(lines[0]), path, value)
            (run_dir / name).write_text("\n".join([json.dumps(damaged), *lines[1:]]))
            if len(path) > 1 and random.random() < 0.95:
                continue  # values deep inside are alike
            try:
                write_report(run_dir)
            except MegacoreError as error:
                refusals.append(str(error))
    assert refusals
    assert all(str(run_dir) in text and "\n" not in text for text in refusals)
    (run_dir / name).write_text(original)
    write_report(run_dir)


def _paths(data: Any) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data[:2])
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        found.append((key,))
        if isinstance(value, dict | list):
            found += [(key, *rest) for rest in _paths(value)]
    return found


def _replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if path:
        data[path[0]] = _replaced(data[path[0]], path[1:], value)
        return data
    return value


def test_the_environment_names_versions_and_machine() -> None:
    found = collect_environment()
    assert {"Python", "torch", "host", "cores", "memory"} <= set(found)
    assert all(found.values())


# ---- charts --------------------------------------------------------------------------------------


def _coordinates(svg: str) -> list[tuple[float, float]]:
    data = re.findall(r'<path class="main" d="M([^"]+)"', svg)[0]
    return [(float(x), float(y)) for x, y in (pair.split() for pair in data.split("L"))]


def test_a_curve_lies_where_its_axis_says() -> None:
    points = [(1.0, 1.0), (51.0, 3.0), (101.0, 2.0)]
    spec = ChartSpec(label="x", series=[Series(name="loss", points=points)])
    svg = line_chart(spec, width=400, height=200)
    (x0, y0), (x1, y1), (x2, y2) = _coordinates(svg)
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 > y2 > y1  # larger values are higher
    assert (y0 - y2) == pytest.approx((y2 - y1), abs=0.2)
    ticks = dict(
        re.findall(r'<text class="tick" x="[^"]+" y="([^"]+)" text-anchor="end">([^<]+)', svg)
    )
    places = {float(text): float(y) for y, text in ticks.items()}
    assert places[1.0] == pytest.approx(y0 + 12 * 0.35, abs=0.2)
    assert places[3.0] == pytest.approx(y1 + 12 * 0.35, abs=0.2)


def test_values_above_the_limit_end_at_the_top_edge() -> None:
    points = [(0.0, 1.0), (1.0, 500.0), (2.0, 2.0)]
    spec = ChartSpec(label="x", series=[Series(name="v", points=points)], from_zero=True, upper=4.0)
    coordinates = _coordinates(line_chart(spec, width=400, height=200))
    assert coordinates[1][1] == pytest.approx(12.0)  # the top of the plot
    assert coordinates[2][1] > 60


def test_a_reference_line_is_drawn_inside_the_plot() -> None:
    spec = ChartSpec(
        label="x",
        series=[Series(name="v", points=[(0.0, 2.0), (1.0, 1.0)])],
        references=[Reference(value=5.0, label="limit & more")],
    )
    svg = line_chart(spec, width=400, height=200)
    assert "limit &amp; more" in svg
    y = float(re.findall(r'<line class="reference"[^>]* y1="([^"]+)"', svg)[0])
    assert 0 < y < 40


def test_the_tooltip_knows_every_step() -> None:
    points = [(float(step), step / 10) for step in range(1, 21)]
    spec = ChartSpec(label="x", series=[Series(name="v", points=points)])
    svg = ET.fromstring(line_chart(spec, width=400, height=200))
    rows = json.loads(svg.attrib["data-hover"])
    assert [row[1] for row in rows] == list(range(1, 21))
    assert rows[4][2] == [["v", "0.5"]]


def test_the_tooltip_of_a_long_curve_names_all_series_at_each_step() -> None:
    points = [(float(step), step * 7919 % 100 / 10) for step in range(5000)]
    mean = [(x, 5.0) for x, _ in points]
    drawn = Series(name="v", points=points), Series(name="mean", points=mean)
    unnamed = Series(name="hidden", points=points[:10], in_legend=False)
    svg = line_chart(ChartSpec(label="x", series=[*drawn, unnamed]), width=400, height=200)
    rows = json.loads(ET.fromstring(svg).attrib["data-hover"])
    assert len(rows) < 2000
    assert all([name for name, _ in row[2]] == ["v", "mean"] for row in rows)
