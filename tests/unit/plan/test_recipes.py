"""Recipes of known models: complete, of the published size, predicted to fit, near the best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.cli.plan_forecast import resolve_for_plan
from megatrain.config import load_config
from megatrain.plan.device import load_device
from megatrain.plan.search import search
from megatrain.plan.spec_from_config import model_spec, run_spec

FOLDER = Path(__file__).parents[3] / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))

# Sums over the tensors of the checkpoints on huggingface.co; DeepSeek-V3 without its layer for
# multi-token prediction and without the biases of its router, which are no parameters here.
PUBLISHED = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


def gpus_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def test_there_are_recipes_for_every_model() -> None:
    assert {path.stem.rpartition("-")[0] for path in RECIPES} == set(PUBLISHED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_published_size(path: Path) -> None:
    config = resolve_for_plan(load_config(path, []), gpus_of(path))
    model = model_spec(config.model, config.moe)
    without_mtp = replace(model, num_mtp_layers=0, moe_layers=model.moe_layers[: model.num_layers])
    assert without_mtp.num_params == PUBLISHED[path.stem.rpartition("-")[0]]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_as_its_table_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), "--gpus", str(gpus_of(path)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fits"
    [row] = [
        line
        for line in (FOLDER / "README.md").read_text().splitlines()
        if f"]({path.name})" in line
    ]
    gib = max(rank["total_bytes"] for rank in found["ranks"]) / 2**30
    cells = f"| {gib:.0f} GiB | {found['step_s']:.2f} s | {found['mfu']:.0%} | "
    assert row.endswith(f"{cells}{found['tokens_per_s_per_gpu']:,.0f} |")


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if gpus_of(path) <= 128], ids=lambda path: path.stem
)
def test_a_recipe_is_near_the_best_of_the_search(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve_for_plan(load_config(path, []), gpus_of(path))
    given = run_spec(config, gpus_of(path))
    base = replace(given, stages=(), overlap=frozenset(), group_size=None)
    best = search(
        model_spec(config.model, config.moe), base, load_device("h100"), simulate=50
    ).best[0]
    assert main(["plan", str(path), "--gpus", str(gpus_of(path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] < 1.03 * best.step.seconds


@pytest.mark.parametrize("name", ["llama3.1-70b-512", "mixtral-8x7b-64", "qwen3-30b-a3b-128"])
def test_the_search_finds_layouts_as_fast_as_a_recipe(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / f"{name}.toml"
    command = ["plan", str(path), "--gpus", str(gpus_of(path)), "--json"]
    assert main(command) == 0
    own = json.loads(capsys.readouterr().out)["step_s"]
    assert main([*command, "--search", "--top", "1"]) == 0
    [best] = json.loads(capsys.readouterr().out)
    assert best["step_s"] <= own <= 1.03 * best["step_s"]
