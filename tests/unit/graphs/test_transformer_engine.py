"""What Transformer Engine is asked for, by a stand-in of its function's signature.

The stand-in keeps the sample tensors as static inputs, as the real function does, and runs modules
on them. It refuses what the real one refuses about lengths, and records what it was given.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.graphs import (
    CaptureError,
    PartialGraphs,
    ReplayError,
    TransformerEngineBackend,
    make_graphed_callables,
)
from megacore.graphs.transformer_engine import _expanded
from megacore.pipeline import build_schedule
from megatrain.config import Config, resolve
from tests.unit.graphs.test_callables import LAYERS, Block, Pipeline, make_blocks


class StandIn:
    """Has `make_graphed_callables` with the arguments of version 2.20."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.log: list[str] = []

    def make_graphed_callables(
        self,
        modules: tuple[nn.Module, ...],
        sample_args: tuple[tuple[Tensor, ...], ...],
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
        sample_kwargs: tuple[dict[str, Any], ...] | None = None,
        fp8_enabled: Any = None,
        fp8_calibrating: Any = None,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
        fp8_weight_caching: Any = None,
        enabled: Any = None,
        calibrating: Any = None,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        cache_quantized_params: Any = None,
        _order: list[float] | None = None,
        _num_layers_per_chunk: list[int] | None = None,
        pool: Any = None,
        retain_graph_in_backward: bool = False,
        _reuse_graph_input_output_buffers: bool = False,
        clone_param_grads_on_return: bool = True,
        pre_warmup_hook: Any = None,
        post_warmup_hook: Any = None,
        capture_time_hooks: Any = None,
    ) -> Any:
        values = dict(locals())
        self.given = {name: values[name] for name in values if name != "self"}
        places = list(range(len(modules)))
        if _order is not None:
            assert all(isinstance(entry, int) for entry in _order if entry > 0)
            assert all(isinstance(entry, int) for entry in _order if entry == int(entry))
            assert _num_layers_per_chunk is not None
            whole = [entry for entry in _order if entry == int(entry)]
            num_microbatches = len(whole) // max(whole) // 2
            if len(whole) != len(_order):
                assert set(_num_layers_per_chunk) == {1}
            places, first = [], 0
            for count in _num_layers_per_chunk:
                places += [*range(first, first + count)] * num_microbatches
                first += count
        assert len(places) == len(sample_args) == len(sample_kwargs or ())
        for number, module in enumerate(modules):  # a warmup pass, which must start no hooks
            module(
                *sample_args[places.index(number)], **(sample_kwargs or ())[places.index(number)]
            )
        return tuple(
            self._replay(modules[place], args, kwargs, _order is None, number)
            for number, (place, args, kwargs) in enumerate(
                zip(places, sample_args, sample_kwargs or (), strict=True)
            )
        )

    def _replay(
        self, module: nn.Module, args: Any, kwargs: Any, in_place: bool, number: int
    ) -> Any:
        forward = module.forward

        def replay(*user_args: Tensor, **user_kwargs: Any) -> Any:
            self.log += [f"{number} on {user_kwargs.pop('cuda_graph_stream', None)}"]
            with torch.no_grad():
                for static, given in zip(args, user_args, strict=True):
                    static.copy_(given)
            for name in kwargs:
                assert user_kwargs[name].shape == kwargs[name].shape
            return forward(*user_args, **user_kwargs)

        made: Any = replay
        if in_place:
            module.forward, made = replay, module
        made.backward_dw = lambda: self.log.append(f"{number} dw")
        made.reset = lambda: self.log.append(f"{number} reset")
        return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    package = ModuleType("transformer_engine")
    package.pytorch = ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    package.pytorch.make_graphed_callables = stand_in.make_graphed_callables
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    return stand_in


def capture(blocks: Any, **options: Any) -> Any:
    return make_graphed_callables(
        list(blocks),
        [(torch.zeros(4, 8, requires_grad=True),)] * len(blocks),
        sample_kwargs=[{"scale": torch.ones(8)}] * len(blocks),
        backend="transformer_engine",
        **options,
    )


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ValueError, match=r"needs the package transformer-engine \(pip install"):
        capture(make_blocks())


ORDERS = {
    "one chunk": [1, 1, -1, 1, -1, -1],
    "two chunks": [1, 1, 2, -2, 1, 2, -2, -1, -1, 2, -2, -1],
}


def trained(order: list[float], *, through: bool, reuse: Any) -> tuple[list, list[Tensor]]:
    """Losses of three steps and the parameters after them."""
    blocks = make_blocks()
    optimizer = torch.optim.SGD(blocks.parameters(), 1e-2)
    calls = capture(blocks, order=order, reuse=reuse) if through else ()

    def call(chunk: int, microbatch: int, layer: int) -> Any:
        if not calls:
            return blocks[chunk * pipeline.per_chunk + layer]
        return calls[(chunk * pipeline.num_microbatches + microbatch) * pipeline.per_chunk + layer]

    pipeline = Pipeline(order, call)
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(pipeline.step(number))
        optimizer.step()
    return losses, [param.detach().clone() for param in blocks.parameters()]


@pytest.mark.parametrize("reuse", [None, "none"])
@pytest.mark.parametrize("name", ORDERS)
def test_training_through_it_is_eager_training(name: str, reuse: Any, engine: StandIn) -> None:
    order = ORDERS[name]
    expected = trained(order, through=False, reuse=reuse)
    found = trained(order, through=True, reuse=reuse)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    given = engine.given
    assert given["_order"] == order
    assert given["_num_layers_per_chunk"] == [LAYERS // max(order)] * max(order)
    assert given["_reuse_graph_input_output_buffers"] == (reuse is None)
    assert len({id(args[0]) for args in given["sample_args"]}) == LAYERS * order.count(1)
    assert all(args[0].requires_grad for args in given["sample_args"])


def test_each_option_arrives_under_its_name(engine: StandIn) -> None:
    def nothing() -> None: ...

    hooks = [{"forward_hooks": {0: lambda _: None}}, None]
    capture(
        make_blocks()[:2],
        order=[1, 1, -1, -1],
        num_warmup_iters=5,
        allow_unused_input=True,
        retain_graph_in_backward=True,
        clone_param_grads_on_return=False,
        pre_warmup_hook=nothing,
        post_warmup_hook=nothing,
        capture_time_hooks=hooks,
        pool=(0, 1),
    )
    given = engine.given
    expected = {
        "num_warmup_iters": 5,
        "allow_unused_input": True,
        "retain_graph_in_backward": True,
        "clone_param_grads_on_return": False,
        "pre_warmup_hook": nothing,
        "post_warmup_hook": nothing,
        "capture_time_hooks": hooks,
        "pool": (0, 1),
        "_order": [1, 1, -1, -1],
        "_num_layers_per_chunk": [2],
    }
    assert {name: given[name] for name in expected} == expected
    untouched = [name for name in given if name.startswith(("fp8", "enabled", "calib", "recipe"))]
    assert all(given[name] is None for name in untouched)


def test_one_microbatch_at_a_time_takes_one_set_of_graphs(engine: StandIn) -> None:
    calls = capture(make_blocks(), order=[1, -1] * 3)
    assert engine.given["_order"] == [1, -1]
    assert len(calls) == 3 * LAYERS
    assert calls[0] is calls[LAYERS]


def test_without_an_order_modules_stay_what_they_are(engine: StandIn) -> None:
    blocks = make_blocks()
    assert capture(blocks) == tuple(blocks)
    assert engine.given["_order"] is None
    blocks[1](torch.ones(4, 8, requires_grad=True), scale=torch.ones(8))
    assert engine.log == ["1 on None"]
    blocks[1].reset_graphs()
    assert engine.log[-1] == "1 reset"
    with pytest.raises(ReplayError, match=r"input 0: now shape \(5, 8\), not \(4, 8\)"):
        blocks[0](torch.ones(5, 8, requires_grad=True), scale=torch.ones(8))
    blocks.eval()
    blocks[0](torch.ones(5, 8), scale=torch.ones(8))
    assert len(engine.log) == 2


def test_streams_are_passed_on(engine: StandIn) -> None:
    calls = capture(make_blocks(), order=[1, -1])
    calls[2](torch.ones(4, 8, requires_grad=True), scale=torch.ones(8), cuda_graph_stream="side")
    assert engine.log == ["2 on side"]


class Delaying(Block):
    def need_backward_dw(self) -> bool:
        return True


def test_weight_halves_make_every_layer_a_chunk(engine: StandIn) -> None:
    assert _expanded([1, 2, -2, -2.5, -1, -1.5], [1, 2]) == [
        1, 2, 3, -3, -2, -3.5, -2.5, -1, -1.5
    ]  # fmt: skip
    blocks = [Delaying() for _ in range(3)]
    order = [1, 2, -2, -2.5, -1, -1.5, 1, 2, -2, -2.5, -1, -1.5]
    calls = capture(blocks, order=order, num_layers_per_chunk=[1, 2], defer_weight_grads=True)
    assert engine.given["_order"] == [1, 2, 3, -3, -2, -3.5, -2.5, -1, -1.5] * 2
    assert engine.given["_num_layers_per_chunk"] == [1, 1, 1]
    # Ours: chunk 0 (2 microbatches of layer 0), chunk 1 (layers 1, 2 of one, then of the other);
    # its: layer by layer.
    for call in calls:
        call.backward_dw()
    assert engine.log == [f"{number} dw" for number in (0, 1, 2, 4, 3, 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": "graphs"}, 'has its own graphs, so reuse = "graphs" is not to be had'),
        ({"generators": [torch.Generator()]}, "its own random-number tracker"),
        ({"order": [1, -1, -1.5]}, "set defer_weight_grads = True"),
        (
            {"order": [1, -1, -1.5], "defer_weight_grads": True},
            r"module 0 \(Block\) has no part that can delay its weight gradients",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    options: dict[str, Any], message: str, engine: StandIn
) -> None:
    with pytest.raises(ValueError, match=message):
        capture(make_blocks(), **options)
    assert engine.given == {}


@pytest.mark.parametrize(
    ("order", "reuse", "message"),
    [
        ([1, 1, -1, -1, -1.5, -1.5], "none", r"position 3: -1 comes before the weight half of the"),
        ([1, -1, 1, -1.5, -1, -1.5], None, r"position 3: -1.5 comes after a forward pass to which"),
    ],
)
def test_orders_that_it_would_get_wrong_are_refused(
    order: list[float], reuse: Any, message: str, engine: StandIn
) -> None:
    with pytest.raises(ValueError, match=message):
        capture([Delaying()], order=order, reuse=reuse, defer_weight_grads=True)
    assert engine.given == {}


def test_inputs_that_differ_in_strides_alone_are_not_shared(engine: StandIn) -> None:
    modules = [nn.Linear(4, 4) for _ in range(2)]
    samples = [(torch.zeros(4, 4),), (torch.zeros(4, 4).t(),)]
    options: dict[str, Any] = {"order": [1, -1], "backend": "transformer_engine"}
    with pytest.raises(ValueError, match="but of other strides or requires_grad"):
        make_graphed_callables(modules, samples, **options)
    make_graphed_callables(modules, samples, **options, reuse="none")
    assert [args[0].stride() for args in engine.given["sample_args"]] == [(4, 1), (1, 4)]


@pytest.mark.usefixtures("engine")
def test_an_older_version_without_an_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(modules: Any, sample_args: Any) -> None:
        del modules, sample_args

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "make_graphed_callables", older)
    with pytest.raises(ValueError, match="has no argument num_warmup_iters"):
        capture(make_blocks())


@pytest.mark.usefixtures("engine")
def test_a_failure_leaves_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    blocks = make_blocks()
    before = [dict(block.__dict__) for block in blocks]
    monkeypatch.setattr(StandIn, "_replay", fail)
    with pytest.raises(
        CaptureError, match="Transformer Engine could not capture: RuntimeError: op"
    ):
        capture(blocks)
    assert [dict(block.__dict__) for block in blocks] == before


def test_parts_of_a_model_run_their_hooks_around_it_and_not_in_it(engine: StandIn) -> None:
    seen: Counter[str] = Counter()
    part = nn.Sequential(nn.Linear(2, 2))
    part[0].register_forward_pre_hook(lambda *_: seen.update(["pre"]))
    part[0].weight.register_post_accumulate_grad_hook(lambda _: seen.update(["grad"]))
    x = torch.ones(3, 2, requires_grad=True)
    graphs = PartialGraphs(
        [[part]],
        [[((x,), {})]],
        backend=TransformerEngineBackend(),
        program=build_schedule("1f1b", num_ranks=2, num_microbatches=4).program(0),
    )
    assert engine.given["_order"] == [1, 1, -1, 1, -1, 1, -1, -1]
    assert engine.given["clone_param_grads_on_return"] is False
    assert (graphs.num_graphs, graphs.static_bytes()["static_inputs"]) == (8, 2 * 3 * 2 * 4)
    assert not seen
    graphs.call(0, 0, 3)(x)
    assert seen["pre"] == 2  # the stand-in calls the module too
    graphs.reset()
    assert engine.log[1:] == [f"{number} reset" for number in range(4)]


def test_a_configuration_may_name_it_for_parts_on_a_gpu() -> None:
    def settle(**graphs: Any) -> Config:
        sections = {
            "model": {"num_layers": 2},
            "graphs": {"backend": "transformer_engine", **graphs},
        }
        return resolve(Config(**sections), 1, vocab_size=256, cuda=False)

    with pytest.raises(ConfigError, match="computes on the CPU; use emulated there"):
        settle(mode="partial")
    with pytest.raises(ConfigError, match="captures modules, and no whole steps"):
        settle(mode="full")
