"""The public names of the package, and what its doors say to wrong arguments."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import megacore
import megatrain
from megacore.buffers import make_buffers
from megacore.errors import ConfigError, MegacoreError
from megacore.moe import TopKRouter
from megacore.optim import DistributedOptimizer, StepResult
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo
from megacore.pipeline import (
    ActivationSpec,
    PipelineExecutor,
    build_schedule,
    get_forward_backward_func,
)
from megatrain.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    load_config,
    resolve,
)
from megatrain.models.shape import GPTShape

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "public_api.txt"


def test_the_public_names_and_signatures_are_those_of_the_list() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "public_api.py")]
    found = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    changes = list(difflib.unified_diff(GOLDEN.read_text().splitlines(), found.splitlines(), n=0))
    assert not changes, (
        "the public API has changed: name it in CHANGELOG.md and run "
        "scripts/public_api.py > tests/golden/public_api.txt\n" + "\n".join(changes)
    )


@pytest.mark.parametrize(
    ("package", "modules"),
    [(megacore, {"errors"}), (megatrain, {"api"})],
    ids=["engine", "trainer"],
)
def test_every_package_is_reachable_and_on_the_map(package: ModuleType, modules: set[str]) -> None:
    root = Path(package.__file__ or "").parent
    rooms = {path.parent.name for path in root.glob("*/__init__.py")}
    assert rooms | modules == set(package.__all__) - {"__version__"}
    for name in rooms:
        assert getattr(package, name).__name__ == f"{package.__name__}.{name}"
        assert f"\n    {name} " in (package.__doc__ or "")
    assert {name for name in dir(package) if not name.startswith("_")} == rooms | modules


@pytest.mark.parametrize("package", ["generation", "models", "plan", "train"])
def test_names_that_load_late_exist(package: str) -> None:
    module = getattr(megatrain, package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: OptimizerConfig(lr="high"), "OptimizerConfig: lr must be a valid number, got"),  # type: ignore[arg-type]
        (lambda: OptimizerConfig(lrr=1.0), "OptimizerConfig has no setting lrr; did you mean lr?"),  # type: ignore[call-arg]
        (
            lambda: ModelConfig(hidden_size=-1),
            "ModelConfig: hidden_size must be greater than or equal to 1, got -1",
        ),
        (lambda: Config(train={"steps": 0}), "Config: train.steps must be greater than or"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_setting_in_python_is_one_sentence(make: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_number_formats_have_short_names(short: str, name: str) -> None:
    assert load_config(None, [("train.dtype", short)]).train.dtype == name
    assert load_config(None, [("train.dtype", name)]).train.dtype == name


def _pairs(model: nn.Module) -> list[tuple[ParamInfo, nn.Parameter]]:
    return [
        (ParamInfo(name=name, full_shape=tuple(param.shape), tp_dim=None), param)
        for name, param in model.named_parameters()
    ]


def test_make_buffers_says_what_it_takes() -> None:
    model, groups = nn.Linear(2, 2), ProcessGroups.single()
    with pytest.raises(TypeError, match="must be pairs of ParamInfo and Parameter, got Parameter"):
        make_buffers(list(model.parameters()), groups=groups)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got str, Parameter at position 0; for a parameter"):
        make_buffers(list(model.named_parameters()), groups=groups)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a megacore\.buffers\.BufferOptions, got Adam"):
        make_buffers(_pairs(model), groups=groups, options=torch.optim.Adam)  # type: ignore[arg-type]
    # What the messages propose works.
    assert make_buffers(_pairs(model), groups=groups)


ACTIVATION = ActivationSpec(shape=(1, 1, 2), dtype=torch.float32, device="cpu")


def test_the_executor_says_that_it_takes_a_list() -> None:
    program = build_schedule("1f1b", num_ranks=1, num_microbatches=1).program(0)
    group = ProcessGroups.single().pp
    with pytest.raises(TypeError, match=r"one per stage, got a Linear; give \[module\]"):
        PipelineExecutor(program, nn.Linear(1, 1), group=group, activation=ACTIVATION)  # type: ignore[arg-type]
    PipelineExecutor(program, [nn.Linear(1, 1)], group=group, activation=ACTIVATION)


def test_a_wrong_number_of_chunks_is_told_in_words_of_the_caller() -> None:
    run = get_forward_backward_func("zb_v", group=ProcessGroups.single().pp, activation=ACTIVATION)
    with pytest.raises(ValueError, match=r"model must be a list of 2 modules for schedule 'zb_v'"):
        run(
            forward_step_func=lambda *_: None,  # type: ignore[arg-type, return-value]
            data_iterator=iter(()),
            model=nn.Linear(1, 1),
            num_microbatches=2,
        )


def test_values_have_readable_texts() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert repr(schedule.simulate()) == "<Timeline: 2 ranks, makespan 9, bubble 33.3%>"
    assert repr(schedule.program(1)) == "<Program of rank 1 of 2: 8 actions, 2 microbatches>"
    groups = ProcessGroups.single()
    buffers = make_buffers(_pairs(nn.Linear(2, 2)), groups=groups)
    text = repr(DistributedOptimizer(buffers, groups=groups))
    assert text.startswith("<DistributedOptimizer: ")
    assert "in 1 buffers, sharded state of" in text
    result = StepResult(torch.tensor([5.0, 0.0, 2.0], dtype=torch.float64))
    assert repr(result) == "<StepResult: not read from the device>"
    assert result.grad_norm == 5.0
    assert repr(result) == "<StepResult: grad_norm 5, 2 skipped in all>"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve({"model": {}}, 1), "config must be a megatrain.config.Config, got dict"),
        (lambda: resolve(Config(), 0), "world_size must be at least 1, got 0"),
        (
            lambda: TopKRouter({}, nn.Parameter(torch.eye(2))),
            "options must be a megacore.moe.RouterOptions, got dict",
        ),
        (
            lambda: GPTShape.from_config({}),
            "config must be a megatrain.config.ModelConfig, got dict",
        ),
        (lambda: Config(model={"x": 1}), "ModelConfig has no setting x; it has factory"),
        (
            lambda: Config(moe={"echo": {"domain": 2}}),
            "EchoConfig has no setting domain; did you mean domain_size?",
        ),
        (lambda: MoEConfig(layer_pattern="d(e"), r'layer_pattern = .* as in "de" or "dd\(e\)"'),
        (lambda: CheckpointConfig(interval=2.5), "interval must be a valid integer"),
        (
            lambda: build_schedule("1f1b", num_ranks="2", num_microbatches=2),
            "num_ranks must be a whole number, got '2'",
        ),
    ],
)
def test_a_wrong_argument_at_a_public_door_is_one_sentence(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError, MegacoreError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
