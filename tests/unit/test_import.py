"""What importing costs, measured in modules: times would depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def modules_after(code: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after ``code``."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded: list[str] = json.loads(result.stdout)
    return set(loaded)


@pytest.fixture(scope="module")
def bare() -> set[str]:
    return modules_after("pass")


def test_importing_the_package_loads_next_to_nothing(bare: set[str]) -> None:
    added = modules_after("import megacore") - bare
    ours = {name for name in added if name.split(".")[0] == "megacore"}
    assert ours == {"megacore"}
    assert not {"torch", "numpy", "pydantic", "rich"} & added
    assert len(added) < 20


def test_help_and_mistakes_of_the_command_line_do_not_load_torch() -> None:
    code = "from megatrain.cli import main; main(['train', 'nowhere.toml'])"
    assert not {"torch", "numpy", "rich"} & modules_after(code)


def test_training_does_not_load_the_compiler_of_torch() -> None:
    code = """
import torch
from megatrain.config import Config, resolve
from megatrain.train.trainer import build_trainer
config = resolve(Config(train={"steps": 1, "eval_interval": 0}), 1, vocab_size=256)
build_trainer(config, world_size=1, device=torch.device("cpu")).train_step(0)
"""
    assert "torch._dynamo" not in modules_after(code)


def test_submodules_load_on_first_use(bare: set[str]) -> None:
    added = modules_after("import megatrain; megatrain.config.Config") - bare
    assert {"megatrain.config", "pydantic"} <= added
    assert "torch" not in added


def test_unknown_attribute_is_an_attribute_error() -> None:
    import megacore

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        megacore.nothing  # noqa: B018


def test_a_prediction_of_a_plan_does_not_load_torch(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[train]\nglobal_batch_size = 2048\nmicrobatch_size = 1\ndtype = "bfloat16"\n')
    code = f"from megatrain.cli import main; main(['plan', {str(path)!r}, '--gpus', '2048'])"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
