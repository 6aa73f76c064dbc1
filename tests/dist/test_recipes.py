"""Every recipe's small twin, by the command in its header, trains on four processes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatrain.cli import main
from tests.support.campaigns import representatives
from tests.support.jobs import start_function

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.toml"))}
# One for each model.
KEPT = ["deepseek-v3-2048", "llama3.1-8b-64", "llama3.1-70b-512", "mixtral-8x7b-64"]
KEPT.append("qwen3-30b-a3b-16")


@pytest.mark.parametrize("name", representatives(RECIPES, KEPT))
def test_a_small_twin_trains(name: str, tmp_path: Path) -> None:
    text = RECIPES[name].read_text()
    [command] = re.findall(r"^#   (megacore train (?:.*\\\n#)*.*)", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n#", " "))
    assert words[2:5] == [f"examples/recipes/{name}.toml", "--nproc", "4"]
    words[2] = str(RECIPES[name])
    words += [f"--run.dir={tmp_path / 'run'}", f"--data.cache={tmp_path / 'cache'}"]
    words += ["--train.steps=4", "--train.eval_interval=0", "--checkpoint.interval=-1"]
    ended = start_function(lambda: main([*words[1:], "--run.plain"]), tmp_path).finish(timeout_s=90)
    assert ended.code == 0, ended.err
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in records]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
