"""Weights in 8 bits that stay for a step: the same bits as rounding in each pass."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.ops.fp8 import fp8_linear, fp8_products
from megacore.ops.quantize import quantize_blocks
from megacore.ops.rounded_weight import rounded_of
from megacore.optim import RoundedWeights
from megatrain.models.param_infos import takes_fp8
from megatrain.plan.state import rounded_bytes, state_bytes
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.graphed_training import EXPERTS, FULL, PARTIAL, STATIC, WITH_STEP, make_trainer
from tests.support.quantize import assert_same

MICROBATCHES, STEPS = 4, 3
FP8 = {"fp8": "blockwise", "eval_interval": 1}


class _Counting(TorchDispatchMode):
    """Counts the operations that round weights."""

    def __init__(self) -> None:
        super().__init__()
        self.by_layout: Counter[bool] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.megacore.quantize_blocks_.default:
            self.by_layout[args[1]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[bool]]:
    with _Counting() as mode:
        yield mode.by_layout


class Layer(nn.Module):
    linear = staticmethod(fp8_linear)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5, 7))
        self.bias = nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias.flatten())


def passes(layer: Layer) -> list[Tensor]:
    x = torch.linspace(-1, 1, 21).view(3, 7).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


def test_passes_round_once_and_have_the_same_bits() -> None:
    layer = Layer()
    expected = passes(layer)
    rounded = RoundedWeights([layer])
    with counted() as rounds:
        for _ in range(3):
            for own, other in zip(passes(layer), expected, strict=True):
                assert torch.equal(own, other)
    assert rounds == {False: 1, True: 1}
    with torch.no_grad():
        layer.weight.mul_(1.7)
    rounded.expire()
    found = passes(layer)
    del rounded
    gc.collect()
    assert rounded_of(layer.weight) is None
    for own, other in zip(found, passes(layer), strict=True):
        assert torch.equal(own, other)


def test_a_bias_of_several_dimensions_is_not_rounded() -> None:
    [product] = fp8_products(Layer())
    assert (product.name, product.sizes) == ("weight", (1, 10, 7))


def test_evaluation_does_not_transpose() -> None:
    layer = Layer().eval()
    rounded = RoundedWeights([layer])
    with counted() as rounds, torch.no_grad():
        layer(torch.ones(3, 7))
    assert rounds == {False: 1}
    rounded.refresh()
    weight = rounded_of(layer.weight)
    assert weight is not None
    for turned in (False, True):
        expected = quantize_blocks(layer.weight.detach().view(1, 10, 7), transposed=turned)
        assert_same(weight.blocks(transposed=turned), expected)


def numbers(trainer: Trainer) -> list[float]:
    """Losses and gradient norms of steps, and a validation after each."""
    found = []
    for step in range(STEPS):
        metrics = trainer.train_step(step)
        found += [metrics.loss, metrics.grad_norm]
        found.append(trainer.mean_validation_loss(trainer.evaluate()))
    return found


@pytest.mark.parametrize("graphs", [{}, PARTIAL, FULL, WITH_STEP], ids=lambda g: g.get("mode", ""))
@pytest.mark.parametrize("moe", [{}, EXPERTS, STATIC], ids=["dense", "experts", "static"])
def test_training_has_the_bits_of_rounding_in_each_microbatch(
    graphs: dict[str, Any], moe: dict[str, Any]
) -> None:
    if graphs.get("mode", "").startswith("full") and moe == EXPERTS:
        pytest.skip("a whole step captures experts of the static dispatcher only")
    changes: dict[str, Any] = {"train": FP8, "moe": moe, "optimizer": {"overlap": "all"}}
    before = make_trainer(None, **changes)
    before.eager.rounded = None
    gc.collect()
    assert all(rounded_of(product.weight) is None for product in fp8_products(before.chunks[0]))
    expected = numbers(before)
    trainer = make_trainer(graphs, **changes)
    assert trainer.eager.rounded is not None
    assert numbers(trainer) == expected
    assert graphs == {} or trainer.graphs is not None
    notes = [] if trainer.graphs is None else trainer.graphs.notes
    assert not any("without graphs" in note for note in notes)


@pytest.mark.parametrize(
    "train", [{}, {"recompute": ["full"]}, {"recompute": ["mlp"]}], ids=["", "layers", "mlp"]
)
def test_a_step_rounds_each_weight_once(train: dict[str, Any]) -> None:
    trainer = make_trainer(None, train={**FP8, **train})
    trainer.train_step(0)
    num_weights = len(list(fp8_products(trainer.chunks[0])))
    with counted() as rounds:
        trainer.train_step(1)
    assert rounds == {False: num_weights, True: num_weights}
    with counted() as rounds:
        trainer.evaluate()
    assert rounds == {False: 2 * num_weights}, "once per global batch of a validation"
    trainer.eager.rounded = None
    gc.collect()
    with counted() as rounds:
        trainer.train_step(2)
    assert rounds[True] == MICROBATCHES * num_weights
    assert rounds[False] >= MICROBATCHES * num_weights


@pytest.mark.parametrize("graphs", [PARTIAL, WITH_STEP], ids=lambda g: g["mode"])
def test_a_replayed_step_rounds_each_weight_once(graphs: dict[str, Any]) -> None:
    trainer = make_trainer(graphs, train=FP8)
    for step in range(2):
        trainer.train_step(step)
    num_weights = len(list(fp8_products(trainer.chunks[0])))
    with counted() as rounds:
        trainer.train_step(2)
    assert rounds == {False: num_weights, True: num_weights}


def test_parts_of_layers_replay_without_rounding() -> None:
    trainer = make_trainer(PARTIAL, train=FP8)
    for step in range(2):
        trainer.train_step(step)
    [chunk] = trainer.chunks
    part = chunk.layers[0].captured
    assert part is not None
    site = next(iter(part.calls.values()))._site
    assert trainer.eager.rounded is not None
    trainer.eager.rounded.refresh()  # as pre-hooks do; a replay compares itself with the capture
    with counted() as rounds:
        site.forward.replay()
        site.backward.replay()
    assert rounds == {}


def test_one_microbatch_keeps_nothing() -> None:
    assert make_trainer(None, train={**FP8, "global_batch_size": 1}).eager.rounded is None
    assert make_trainer(None).eager.rounded is None


MODELS: dict[str, dict[str, Any]] = {
    "experts": {"train.fp8": "blockwise"},
    "dense": {
        "train.fp8": "blockwise",
        "moe.num_experts": 0,
        "model.qkv_bias": True,
        "model.mlp_bias": True,
        "model.output_bias": True,
    },
    "gelu": {"train.fp8": "blockwise", "moe.activation": "gelu", "model.activation": "gelu"},
    "latent attention": {
        "train.fp8": "blockwise",
        "model.num_kv_heads": None,
        "model.mla.kv_rank": 8,
        "model.mla.q_rank": 12,
        "model.mla.nope_head_dim": 8,
        "model.mla.rope_head_dim": 4,
        "model.mla.v_head_dim": 8,
    },
    "several tokens": {"train.fp8": "blockwise", "model.num_mtp_layers": 1},
}


@pytest.mark.parametrize("model", MODELS)
def test_predicted_bytes_are_those_of_the_model(model: str) -> None:
    config = make_config(1, MODELS[model])
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    [chunk] = trainer.chunks
    infos = [info for info, _ in chunk.param_infos()]
    weights = {id(param): info.name for info, param in chunk.param_infos()}
    found = {weights[id(product.weight)] for product in fp8_products(chunk)}
    assert found == {info.name for info in infos if takes_fp8(info)}
    assert trainer.eager.rounded is not None
    num_bytes = trainer.eager.rounded.num_bytes
    assert num_bytes == rounded_bytes(config.parallel, infos)
    assert state_bytes(config, 1)[0]["8-bit weights"] == num_bytes
