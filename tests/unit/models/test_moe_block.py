from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacore.moe.dispatchers import ExpertRows
from megacore.moe.dispatchers.local import LocalDispatcher
from megacore.ops.recompute import recompute
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.params import ShardPosition, before_use, shard
from megacore.parallel.process_groups import Group
from megatrain.config import ModelConfig, MoEConfig
from megatrain.generation.decoding import Sampling, generate
from megatrain.models.gpt import GPTChunk
from megatrain.models.moe_block import MoEBlock
from megatrain.models.size import count_parameters
from megatrain.models.transformer import MLP
from tests.support.models import params_by_name, random_batch, tiny_config, whole_model


def tiny_moe(**changes: Any) -> MoEConfig:
    fields = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}
    return MoEConfig(**{**fields, **changes})


def groups_at(rank: int, **sizes: int) -> ProcessGroups:
    """Groups of a rank that never communicates: enough to build parameters."""
    topology = Topology(**sizes)
    handle: Any = object()
    groups = {}
    for name, token in (("ep", "ep"), ("etp", "etp"), ("etp_ep", "etp-ep"), ("expert_dp", "edp")):
        ranks = tuple(topology.expert_group_of(rank, token))
        groups[name] = Group(name, ranks, ranks.index(rank), handle if len(ranks) > 1 else None)
    return replace(ProcessGroups.single(), topology=topology, rank=rank, **groups)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 4}, {"etp": 2}, {"ep": 2, "etp": 2}])
def test_every_layout_holds_boxes_of_the_same_experts(
    sizes: dict[str, int], activation: Any
) -> None:
    config, moe = tiny_config(), tiny_moe(activation=activation)
    whole = params_by_name(whole_model(config, moe=moe))
    world_size = sizes.get("ep", 1) * sizes.get("etp", 1)
    for rank in range(world_size):
        groups = groups_at(rank, world_size=world_size, **sizes)
        for info, parameter in whole_model(config, moe=moe, groups=groups).param_infos():
            box = ShardPosition.of(info, groups)
            assert torch.equal(parameter, shard(whole[info.name], info, **vars(box))), info.name


def test_experts_have_weights_of_their_own() -> None:
    params = params_by_name(whole_model(tiny_config(), moe=tiny_moe()))
    for name in ("layers.0.moe.experts.fc1", "layers.1.moe.experts.fc2"):
        experts = params[name].detach().flatten(1)
        assert len(torch.unique(experts, dim=0)) == 4
    more = params_by_name(whole_model(tiny_config(), moe=tiny_moe(num_experts=8)))
    name = "layers.0.moe.experts.fc1"
    assert torch.equal(more[name][:4], params[name]), "more experts must not change the others"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_pattern": "d(e)"},
        {"activation": "gelu"},
        {"shared_ffn_hidden_size": 16, "shared_gate": True},
    ],
)
@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_the_count_is_that_of_the_model(changes: dict[str, Any], qk_norm: str) -> None:
    config, moe = tiny_config(qk_norm=qk_norm, head_dim=10), tiny_moe(**changes)
    count = count_parameters(config, moe)
    infos = whole_model(config, moe=moe).param_infos()
    assert count.total == sum(weight.numel() for _, weight in infos)
    experts = sum(weight.numel() for info, weight in infos if info.expert)
    assert count.total - count.active == experts // 2  # 2 of 4 are idle


@pytest.mark.parametrize("dispatcher", ["allgather", "static"])
def test_all_dispatchers_compute_the_same(dispatcher: Any) -> None:
    config = tiny_config()
    batch = random_batch(config)
    losses = []
    for name in ("alltoall", dispatcher):
        model = whole_model(config, moe=tiny_moe(dispatcher=name, z_loss_coef=0.1))
        loss = model(None, batch)
        loss.backward()
        losses.append((loss.item(), [weight.grad for _, weight in model.param_infos()]))
    assert losses[0][0] == losses[1][0]
    for first, second in zip(losses[0][1], losses[1][1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-8)


def test_a_recomputed_layer_computes_its_shared_expert_in_one_part() -> None:
    calls = []

    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("whole")
            return x * x

        def start(self, x: torch.Tensor) -> Any:
            calls.append("parts")
            return lambda: x * x

    config = tiny_config()
    model = whole_model(config, moe=tiny_moe(shared_ffn_hidden_size=16))
    (layer, *_) = [module.moe for module in model.modules() if isinstance(module, MoEBlock)]
    layer.shared = Shared()
    x = torch.randn(3, 2, config.hidden_size, requires_grad=True)
    layer(x).sum().backward()
    assert calls == ["parts"]
    calls.clear()
    recompute(layer, x).sum().backward()
    assert calls == ["whole", "whole"]


@pytest.mark.parametrize("gated", [False, True])
def test_hooks_of_a_shared_expert_run(gated: bool) -> None:
    config = tiny_config()
    moe = tiny_moe(shared_ffn_hidden_size=16, shared_gate=gated)
    (layer, *_) = whole_model(config, moe=moe).moe_layers().values()
    assert layer.shared is not None
    waits: list[str] = []
    before_use(layer.shared, lambda: waits.append("wait"))
    x = torch.randn(3, 2, config.hidden_size)
    plain = layer(x)
    outputs: list[torch.Tensor] = []
    handle = layer.shared.register_forward_hook(lambda _module, _args, y: outputs.append(y))
    assert torch.equal(layer(x), plain)
    handle.remove()
    layer.shared.register_forward_pre_hook(lambda _module, args: outputs.append(args[0]))
    layer(x)
    assert [tuple(output.shape) for output in outputs] == [(3, 2, config.hidden_size)] * 2
    assert waits


class Noted(torch.autograd.Function):
    """Identity that notes its name in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, names: tuple[str, str], log: list[str]) -> torch.Tensor:
        ctx.name, ctx.log = names[1], log
        log.append(names[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.append(ctx.name)
        return grad, None, None


def test_a_part_of_the_shared_expert_runs_during_each_exchange_of_both_passes() -> None:
    log: list[str] = []

    def noted(x: torch.Tensor, forward: str, backward: str) -> torch.Tensor:
        result: torch.Tensor = Noted.apply(x, (forward, backward), log)  # type: ignore[no-untyped-call]
        return result

    class Slow(LocalDispatcher):
        def dispatch(self, x_TH: torch.Tensor, *args: Any) -> Any:
            pending = super().dispatch(noted(x_TH, "dispatch", "dispatched back"), *args)
            return SimpleNamespace(finish=lambda: self.arrive(pending.finish()))

        def arrive(self, rows: ExpertRows) -> ExpertRows:
            return replace(rows, rows=noted(rows.rows, "arrived", "dispatch back"))

        def start_combine(self, rows: torch.Tensor, *args: Any) -> Any:
            rows = noted(rows, "combine", "combined back")
            pending = super().start_combine(rows, *args)
            return SimpleNamespace(
                finish=lambda: noted(pending.finish(), "combined", "combine back")
            )

    config = tiny_config()
    model = whole_model(config, moe=tiny_moe(shared_ffn_hidden_size=16))
    (block, *_) = [module for module in model.modules() if isinstance(module, MoEBlock)]
    layer = block.moe
    layer.dispatcher = Slow(layer.dispatcher.placement)
    assert isinstance(layer.shared, MLP)
    for name, part in (("first", layer.shared.gate_up), ("second", layer.shared.down)):
        part.register_forward_hook(
            lambda _module, _args, y, name=name: noted(y, name, f"{name} back")
        )
    x_SBH = torch.randn(4, 2, config.hidden_size, requires_grad=True)
    layer(x_SBH).sum().backward()
    assert log == [
        *("dispatch", "first", "arrived"),
        *("combine", "second", "combined"),
        *("combine back", "second back", "combined back"),
        *("dispatch back", "first back", "dispatched back"),
    ]


def test_counts_are_those_of_all_forward_passes_until_reset() -> None:
    config = tiny_config()
    model = whole_model(config, moe=tiny_moe(layer_pattern="d(e)", aux_loss_coef=0.5))
    layers = model.moe_layers()
    assert list(layers) == [1]
    for _ in range(2):
        model(None, random_batch(config))
    counts = layers[1].counts()
    assert counts.tokens_per_expert.sum() == 2 * 3 * 16 * 2  # passes, samples, tokens, experts
    assert counts.losses[0] >= 2 * 0.5 * 0.9
    layers[1].reset_counts()
    assert not any(count.any() for count in vars(layers[1].counts()).values())


def test_generation_needs_no_even_number_of_tokens() -> None:
    config = tiny_config()
    model = whole_model(config, moe=tiny_moe(expert_bias=True))
    tokens = generate(
        model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, sampling=Sampling(temperature=0.0)
    )
    assert tokens.shape == (1, 7)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts do not divide over ep = 3"):
        whole_model(tiny_config(), moe=tiny_moe(), groups=groups_at(0, world_size=3, ep=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k = 3: with num_experts = 2 it must lie in"),
        ({"pad_to_capacity": True}, "needs capacity_factor and dispatcher"),
        ({"shared_gate": True}, "shared_gate needs a shared expert"),
        (
            {"num_experts": 4, "biases": True, "echo": {"num_spare_slots": 1}},
            "clones matrices of experts, not their biases",
        ),
    ],
)
def test_contradicting_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


def test_head_norms_and_width_of_heads_are_free() -> None:
    config = ModelConfig(
        hidden_size=20,
        num_heads=3,
        num_kv_heads=1,
        head_dim=6,
        qk_norm="head",
        ffn_hidden_size=16,
        num_layers=1,
        vocab_size=11,
        seq_length=4,
    )
    model = GPTChunk(
        config,
        layers=range(1),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
    )
    shapes = {name: tuple(weight.shape) for name, weight in params_by_name(model).items()}
    assert shapes["layers.0.attention.qkv"] == (1, 30, 20)
    assert shapes["layers.0.attention.output"] == (20, 18)
    assert shapes["layers.0.attention.q_norm"] == (6,)
