"""Stages of one's own: mistakes of a factory are one sentence each, a good one is registered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ConfigError, MegacoreError
from megacore.parallel import ProcessGroups
from megatrain.api import (
    Callback,
    Head,
    LossContext,
    Microbatch,
    ParamInfo,
    ResolvedConfig,
    StageContext,
    TransformerLayer,
    token_loss,
)
from megatrain.config import Config, config_to_toml, load_config, resolve
from megatrain.models.build import build_chunks, build_stages
from megatrain.train.callbacks import make_callbacks
from megatrain.train.trainer import build_trainer
from tests.support.configs import FOUR_LAYERS
from tests.support.models import random_batch


class Stage(nn.Module):
    """A stage without an embedding, of any module."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, _hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """Zeros of a hidden size that does not fit."""
        return torch.zeros(*batch.shape, 3)


def stage(_config: ResolvedConfig, _layers: range, _context: StageContext) -> nn.Module:
    return Stage()


def text(_config: ResolvedConfig, _layers: range, _context: StageContext) -> str:
    return "no module"


def failing(_config: ResolvedConfig, _layers: range, _context: StageContext) -> nn.Module:
    raise KeyError("heads")


def one_argument(_config: ResolvedConfig) -> nn.Module:
    return Stage()


def unregistered(_config: ResolvedConfig, _layers: range, _context: StageContext) -> nn.Module:
    return Stage(nn.Linear(2, 2))


def forgotten(_config: ResolvedConfig, _layers: range, context: StageContext) -> nn.Module:
    context.replicated("left", lambda: nn.LayerNorm(2))
    return Stage()


def with_buffer(_config: ResolvedConfig, _layers: range, context: StageContext) -> nn.Module:
    return Stage(context.replicated("norm", lambda: nn.BatchNorm1d(2)))


def split(_config: ResolvedConfig, _layers: range, context: StageContext) -> nn.Module:
    module = Stage(context.replicated("norm", lambda: nn.Linear(4, 2)))
    info = ParamInfo(name="matrix", full_shape=(4, 2), tp_dim=0)
    module.matrix = context.parameter(info, torch.arange(8.0).view(4, 2))
    return module


def same_names(_config: ResolvedConfig, _layers: range, context: StageContext) -> nn.Module:
    module = Stage(context.replicated("norm", lambda: nn.LayerNorm(2)))
    module.again = context.replicated("norm", lambda: nn.LayerNorm(2))
    return module


number = 3


def make_config(name: str, **sections: dict[str, Any]) -> ResolvedConfig:
    factory = name if ":" in name else f"{__name__}:{name}"
    model = {**FOUR_LAYERS, "factory": factory, **sections.pop("model", {})}
    return resolve(Config(model=model, **sections), 1, vocab_size=256, cuda=False)


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        ("no_such_module_here.x:f", {}, "there is no module no_such_module_here in Python's path"),
        ("nothing", {}, r"module .*test_own .* has no nothing"),
        ("number", {}, r"has int, no function, number"),
        ("text", {}, "must return a torch.nn.Module, got str"),
        ("failing", {}, r"failed: KeyError: 'heads' \(line \d+ of .*test_own.py\)"),
        ("one_argument", {}, r"failed: TypeError: one_argument\(\) takes 1 positional argument"),
        ("unregistered", {}, "the parameter inner.weight is not registered"),
        ("forgotten", {}, "the parameter left.weight was made but is not part of the returned"),
        ("with_buffer", {}, "the buffer inner.running_mean would not be in checkpoints"),
        ("stage", {"moe": {"num_experts": 4}}, r"gives experts to the layers \[0, 1, 2, 3\] of"),
    ],
)
def test_a_bad_factory_is_one_sentence(
    name: str, sections: dict[str, dict[str, Any]], message: str
) -> None:
    config = make_config(name, **sections)
    with pytest.raises(ConfigError, match=message) as error:
        build_chunks(config, ProcessGroups.single())
    assert str(error.value).startswith("model.factory = ")
    assert "\n" not in str(error.value)


def test_outputs_of_another_shape_are_refused() -> None:
    config = make_config("stage")
    batch = random_batch(config.model, batch=2)
    (last,) = build_chunks(config, ProcessGroups.single())
    with pytest.raises(ConfigError, match=r"scalar loss on the last stage, got a tensor \(2, 16, "):
        last(None, batch)
    two = config.model_copy(update={"parallel": config.parallel.model_copy(update={"pp": 2})})
    (first,) = build_stages(two, [0], ProcessGroups.single(), device="cpu")
    expected = "the stage of layers 0 to 1 must return (sequence, batch, model.hidden_size) = (16, "
    with pytest.raises(ConfigError, match=re.escape(expected)):
        first(None, batch)


def test_two_parameters_of_one_name_are_refused() -> None:
    config = make_config("same_names", train={"eval_interval": 0})
    with pytest.raises(MegacoreError, match=r"two parameters are called norm\.weight"):
        build_trainer(config, world_size=1, device=torch.device("cpu"))


def test_own_parameters_depend_on_seed_and_name_and_carry_their_split() -> None:
    made = [build_chunks(make_config("split"), ProcessGroups.single())[0] for _ in range(2)]
    for (info, one), (_, other) in zip(made[0].param_infos(), made[1].param_infos(), strict=True):
        assert torch.equal(one, other), info.name
    infos = {info.name: info for info, _ in made[0].param_infos()}
    assert list(infos) == ["norm.weight", "norm.bias", "matrix"]
    assert (infos["norm.weight"].weight_decay, infos["norm.bias"].weight_decay) == (True, False)
    assert infos["matrix"].tp_dim == 0


def test_the_whole_of_a_model_of_megacore_layers_is_megacores_model() -> None:
    """The public layers alone rebuild the GPT, weight for weight and bit for bit."""
    plain = resolve(Config(model=dict(FOUR_LAYERS)), 1, vocab_size=256, cuda=False)
    (gpt,) = build_chunks(plain, ProcessGroups.single())
    (own,) = build_chunks(make_config("rebuilt"), ProcessGroups.single())
    batch = random_batch(plain.model, batch=2)
    assert torch.equal(gpt(None, batch), own(None, batch))


class Rebuilt(nn.Module):
    """GPTChunk from public parts."""

    def __init__(self, layers: range, context: StageContext) -> None:
        from megatrain.api import Embedding, RMSNorm, RotaryTables

        super().__init__()
        self.words = Embedding(context)
        self.layers = nn.ModuleList(TransformerLayer(layer, context) for layer in layers)
        self.norm = RMSNorm("final_norm", context)
        self.head = Head(context, tied_weight=self.words.words.weight)
        device = context.params.device
        self.tables = RotaryTables(context.config, context.config.num_rotated, device=device)

    def forward(self, _hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """The loss."""
        x_SBH, rotary = self.words(batch), self.tables(batch.shape[1])
        for layer in self.layers:
            x_SBH = layer(x_SBH, rotary, batch)
        return self.head(self.norm(x_SBH), batch)  # type: ignore[no-any-return]


def rebuilt(_config: ResolvedConfig, layers: range, context: StageContext) -> nn.Module:
    return Rebuilt(layers, context)


def double_loss(logits: Tensor, batch: Microbatch, context: LossContext) -> Tensor:
    return 2 * token_loss(logits, batch, context)


def test_a_loss_of_ones_own_is_that_of_megacores_model_too() -> None:
    plain = resolve(Config(model=dict(FOUR_LAYERS)), 1, vocab_size=256, cuda=False)
    doubled = Config(model=dict(FOUR_LAYERS), train={"loss": f"{__name__}:double_loss"})
    doubled = resolve(doubled, 1, vocab_size=256, cuda=False)
    batch = random_batch(plain.model, batch=2)
    one, two = (build_chunks(c, ProcessGroups.single())[0](None, batch) for c in (plain, doubled))
    assert two.item() == pytest.approx(2 * one.item(), rel=1e-6)
    missing = Config(model=dict(FOUR_LAYERS), train={"loss": f"{__name__}:missing"})
    missing = resolve(missing, 1, vocab_size=256, cuda=False)
    with pytest.raises(ConfigError, match=r'train.loss = ".*:missing": module .* has no missing'):
        build_chunks(missing, ProcessGroups.single())


class NoMethods:
    """Not a callback."""

    def __init__(self, config: ResolvedConfig) -> None:
        del config


class Quiet(Callback):
    """A callback that does nothing."""


def test_callbacks_are_constructed_and_checked() -> None:
    config = Config(train={"callbacks": [f"{__name__}:Quiet"]})
    (callback,) = make_callbacks(config)
    assert isinstance(callback, Quiet)
    wrong = Config(train={"callbacks": [f"{__name__}:NoMethods"]})
    with pytest.raises(ConfigError, match="it lacks on_start, on_step, on_end; derive it from"):
        make_callbacks(wrong)


def test_a_module_beside_the_configuration_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def build(): ...\n")
    file = tmp_path / "run.toml"
    file.write_text('[model]\nfactory = "beside:build"\n[train]\ncallbacks = ["beside:A", "x:B"]\n')
    config = load_config(file)
    assert config.model.factory == f"{tmp_path}/beside:build"
    assert config.train.callbacks == [f"{tmp_path}/beside:A", "x:B"]
    again = tmp_path / "again" / "config.toml"
    again.parent.mkdir()
    again.write_text(config_to_toml(config))
    assert load_config(again).model == config.model
    assert load_config(again).train == config.train
    changed = load_config(file, [("model.options.depth", "3"), ("model.options.kind", "a b")])
    assert changed.model.options == {"depth": 3, "kind": "a b"}
    again.write_text(config_to_toml(changed))
    assert load_config(again).model == changed.model
    with pytest.raises(ConfigError, match="sizes must be a number, text, true or"):
        load_config(file, [("model.options.sizes", "[1, 2]")])
    with pytest.raises(ConfigError, match=r"model\.options = .* are settings of model\.factory"):
        resolve(load_config(None, [("model.options.depth", "3")]), 1, vocab_size=256, cuda=False)
    overridden = load_config(file, [("train.callbacks", "a:B,c:D"), ("model.factory", "none")])
    assert (overridden.train.callbacks, overridden.model.factory) == (["a:B", "c:D"], None)


@pytest.mark.parametrize("name", ["build", "a.b", "a:b:c", "a b:c", ":c", "a:", "a:1"])
def test_a_name_of_another_form_is_refused_when_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match="must name a function or class as"):
        load_config(None, [("model.factory", name)])
    with pytest.raises(ConfigError, match="must name a function or class"):
        load_config(None, [("train.callbacks", f'["a:b", "{name}"]')])
