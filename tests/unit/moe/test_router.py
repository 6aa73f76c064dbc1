from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megacore.moe.balance import RouterGroups, inject_gradient, load_balancing_loss
from megacore.moe.options import RouterOptions
from megacore.moe.router import (
    RoutingResult,
    TokenNames,
    TopKRouter,
    update_expert_biases,
)
from megacore.ops import (
    grouped_gemm,
    permute,
    permute_probs,
    sort_by_expert,
    swiglu,
    unpermute,
)
from megatrain.routing_trace import RoutingLog


def make_router(hidden: int = 16, *, seed: int = 3, **options: Any) -> TopKRouter:
    config = RouterOptions(**{"num_experts": 8, "top_k": 2, **options})
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(config.num_experts, hidden, generator=generator))
    return TopKRouter(config, weight, seed=5, layer=2)


def tokens(length: int, batch: int, hidden: int = 16, *, seed: int = 0) -> Tensor:
    return torch.randn(length, batch, hidden, generator=torch.Generator().manual_seed(seed))


def names(length: int, batch: int, *, first: int = 0, step: int = 0) -> TokenNames:
    return TokenNames(
        step=step,
        sample_ids_B=torch.arange(batch) + 40,
        positions_S=torch.arange(first, first + length),
    )


def run_hf(gate: nn.Module, x: Tensor, probe: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    _, weights, ids = gate(x)
    (weights * probe).sum().backward()
    assert x.grad is not None
    return weights.detach(), ids, x.grad, gate.weight.grad


def check_against_hf(gate: nn.Module, router: TopKRouter, x: Tensor) -> None:
    """Same choices, weights and gradients; HF may list the choices in another order."""
    with torch.no_grad():
        router.weight.copy_(gate.weight)
    own = x.clone().requires_grad_()
    routed = router(own)
    order = routed.expert_ids.argsort(-1)
    ids = routed.expert_ids.gather(1, order)
    generator = torch.Generator().manual_seed(9)
    per_expert = torch.rand(x.shape[0], router.options.num_experts, generator=generator)
    _, hf_ids_before = gate(x)[1:]
    weights, hf_ids, grad_x, grad_weight = run_hf(gate, x, per_expert.gather(1, hf_ids_before))
    hf_order = hf_ids.argsort(-1)
    assert torch.equal(ids, hf_ids.gather(1, hf_order))
    torch.testing.assert_close(
        routed.probs.detach().gather(1, order), weights.gather(1, hf_order), rtol=1e-6, atol=1e-7
    )
    (routed.probs * per_expert.gather(1, routed.expert_ids)).sum().backward()
    assert own.grad is not None
    assert router.weight.grad is not None
    torch.testing.assert_close(own.grad, grad_x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(router.weight.grad, grad_weight, rtol=1e-5, atol=1e-6)


def test_mixtral_routes_the_same() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = modeling.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)
    gate = modeling.MixtralTopKRouter(config)
    nn.init.normal_(gate.weight)
    for score in ("softmax", "softmax_after_top_k"):
        check_against_hf(gate, make_router(score_function=score), tokens(50, 1)[:, 0])
        gate.zero_grad()


@pytest.mark.parametrize("normalize", [False, True])
def test_qwen3_moe_routes_the_same(normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=16, num_experts=12, num_experts_per_tok=4, norm_topk_prob=normalize
    )
    gate = modeling.Qwen3MoeTopKRouter(config)
    nn.init.normal_(gate.weight)
    router = make_router(num_experts=12, top_k=4, normalize=normalize)
    check_against_hf(gate, router, tokens(50, 1)[:, 0])


@pytest.mark.parametrize("normalize", [False, True])
def test_deepseek_v3_routes_the_same(normalize: bool) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    gate = modeling.DeepseekV3TopkRouter(config)
    nn.init.normal_(gate.weight)
    # Scores with their bias stay positive: transformers closes groups with a score of 0.
    bias = torch.rand(16, generator=torch.Generator().manual_seed(1))
    gate.e_score_correction_bias.copy_(bias)
    router = make_router(
        num_experts=16,
        top_k=4,
        score_function="sigmoid",
        num_groups=4,
        groups_top_k=2,
        normalize=normalize,
        scaling_factor=2.5,
        bias_rate=1e-3,
    )
    assert router.expert_bias is not None
    router.expert_bias.copy_(bias)
    check_against_hf(gate, router, tokens(50, 1)[:, 0])


def test_balancing_loss_of_a_batch_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = tokens(20, 3, 8)
    expected = modeling.load_balancing_loss_func((logits.flatten(0, 1),), 8, 2)
    scores = logits.softmax(-1)
    ids = scores.topk(2, -1).indices
    own, value = load_balancing_loss(scores, ids, kind="batch", groups=RouterGroups())
    # Theirs counts every choice as a whole token.
    torch.testing.assert_close(value * 2, expected)
    torch.testing.assert_close(own.mean(), value)


def test_balancing_loss_of_sequences_does_not_depend_on_how_the_batch_is_cut() -> None:
    router = make_router(aux_loss_coef=0.1)
    whole = tokens(12, 6)
    value = router(whole).aux_loss
    cut = torch.stack([router(whole[:, i : i + 2]).aux_loss for i in (0, 2, 4)])
    torch.testing.assert_close(cut.mean(), value)


@pytest.mark.parametrize("kind", ["sequence", "batch"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_reach_the_router_with_the_factor_of_the_training_loss(
    kind: str, score: str
) -> None:
    options = {"score_function": score, "aux_loss_type": kind}
    plain = make_router(**options)
    router = make_router(aux_loss_coef=0.1, z_loss_coef=0.01, **options)
    x = tokens(6, 3)
    factor = torch.zeros(())
    loss = router(x, loss_factor=factor).probs.square().mean()
    factor.fill_(0.25)  # filled in after the forward pass
    (loss * 0.25).backward()
    # The same by plain autograd.
    logits = x @ plain.weight.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    total = plain(x).probs.square().mean()
    ids = scores.topk(2, -1).indices
    if score == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    pools = [(slice(None), [b]) for b in range(3)] if kind == "sequence" else [(slice(None),) * 2]
    for pool in pools:
        share = torch.bincount(ids[pool].flatten(), minlength=8) / ids[pool].numel()
        mean = scores[pool].flatten(0, 1).mean(0)
        total = total + 0.1 * 8 * (share * mean).sum() / len(pools)
    total = total + 0.01 * torch.logsumexp(logits, -1).square().mean()
    (total * 0.25).backward()
    assert router.weight.grad is not None
    assert plain.weight.grad is not None
    torch.testing.assert_close(router.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["sequence", "batch"])
@pytest.mark.parametrize(("length", "batch"), [(0, 1), (3, 0), (0, 0)])
def test_a_rank_without_tokens_has_losses_of_zero(kind: Any, length: int, batch: int) -> None:
    router = make_router(aux_loss_coef=0.1, aux_loss_type=kind, z_loss_coef=0.1)
    result = router(tokens(length, batch), loss_factor=torch.ones(batch))
    result.probs.sum().backward()
    assert result.probs.shape == (0, 2)
    assert result.aux_loss is not None
    assert result.z_loss is not None
    assert (result.aux_loss.item(), result.z_loss.item()) == (0.0, 0.0)
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


def test_no_losses_in_evaluation() -> None:
    router = make_router(aux_loss_coef=0.1, z_loss_coef=0.1, bias_rate=1e-3).eval()
    routed = router(tokens(4, 1))
    assert routed.aux_loss is None
    assert routed.z_loss is None
    assert router.tokens_seen is not None
    assert not router.tokens_seen.any()


def test_an_injected_gradient_leaves_the_value_alone() -> None:
    x = torch.randn(3, requires_grad=True)
    y = torch.randn((), requires_grad=True)
    out = inject_gradient(x, y.square(), 2.0)
    assert torch.equal(out, x)
    out.sum().backward()
    assert y.grad is not None
    torch.testing.assert_close(y.grad, 4 * y.detach())


def test_jitter_is_the_same_for_any_cut_of_tokens() -> None:
    router = make_router(jitter=0.3)
    x = tokens(8, 2)
    whole = router(x, names=names(8, 2))
    assert not torch.equal(whole.probs, router.eval()(x).probs)
    router.train()
    halves = [router(x[i : i + 4], names=names(4, 2, first=i)) for i in (0, 4)]
    torch.testing.assert_close(torch.cat([half.probs for half in halves]), whole.probs)
    other = router(x, names=names(8, 2, step=1))
    assert not torch.equal(other.probs, whole.probs)
    with pytest.raises(ValueError, match="jitter needs the names"):
        router(x)


def test_jitter_stays_within_its_bounds() -> None:
    router = make_router(hidden=8, jitter=0.25)
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
    logits = router._logits(torch.ones(100, 4, 8), names(100, 4))
    assert logits.min() >= 0.75
    assert logits.max() <= 1.25
    assert abs(logits.mean().item() - 1.0) < 0.01


@pytest.mark.parametrize("named", [False, True])
def test_forced_balance_gives_every_expert_the_same(named: bool) -> None:
    router = make_router(top_k=2, force_balanced=True)
    routed = router(tokens(16, 2), names=names(16, 2) if named else None)
    assert routed.expert_ids.flatten().bincount(minlength=8).tolist() == [8] * 8
    assert all(len(set(row)) == 2 for row in routed.expert_ids.tolist())


def test_low_precision_is_routed_in_float32() -> None:
    router = make_router()
    router.weight.data = router.weight.data.bfloat16()
    x = tokens(20, 1).bfloat16()
    routed = router(x)
    assert routed.probs.dtype == torch.float32
    exact = make_router()
    exact.weight.data.copy_(router.weight.data)
    assert torch.equal(routed.expert_ids, exact(x.float()).expert_ids)
    assert torch.equal(routed.probs, exact(x.float()).probs)


def test_expert_bias_changes_choices_but_not_weights() -> None:
    router = make_router(score_function="sigmoid", bias_rate=1e-3, normalize=False)
    x = tokens(30, 1)
    assert router.expert_bias is not None
    router.expert_bias[5] = 100.0
    routed = router(x)
    assert (routed.expert_ids[:, 0] == 5).all()
    scores = (x[:, 0] @ router.weight.t()).sigmoid()
    torch.testing.assert_close(routed.probs, scores.gather(1, routed.expert_ids))
    assert "expert_bias" in router.state_dict()
    assert "tokens_seen" not in router.state_dict()


def test_expert_biases_move_towards_balance() -> None:
    routers = [make_router(bias_rate=0.1, seed=s) for s in (1, 2)]
    x = tokens(64, 1)
    for router in routers:
        router(x)
        router(x)
    seen = [router.tokens_seen.clone() for router in routers]  # type: ignore[union-attr]
    update_expert_biases([*routers, make_router()])
    for router, load in zip(routers, seen, strict=True):
        assert int(load.sum()) == 2 * 64 * 2
        expected = 0.1 * (load.double().mean() - load).sign()
        torch.testing.assert_close(router.expert_bias, expected.float())
    router = make_router(bias_rate=0.004, score_function="sigmoid")
    with torch.no_grad():
        router.weight[0] += 0.15
    largest = []
    for _ in range(300):
        largest.append(int(router(x.abs()).expert_ids.flatten().bincount().max()))
        update_expert_biases([router])
    assert largest[0] > 50
    assert max(largest[-20:]) < 25


def test_choices_can_be_recorded_and_replayed_in_another_cut(tmp_path: Path) -> None:
    router, other = make_router(seed=1), make_router(seed=2)
    x = tokens(8, 2)
    logs = [RoutingLog(), RoutingLog()]
    for first, log in zip((0, 4), logs, strict=True):
        part = names(4, 2, first=first)
        log.record(0, part, router(x[first : first + 4]).expert_ids)
        log.save(tmp_path / f"{first}.safetensors")
    log = RoutingLog.load(tmp_path / "0.safetensors", tmp_path / "4.safetensors")
    recorded = router(x).expert_ids
    replayed = other(x, expert_ids=log.expert_ids(0, names(8, 2)))
    assert torch.equal(replayed.expert_ids, recorded)
    assert not torch.equal(other(x).expert_ids, recorded)
    scores = (x.flatten(0, 1) @ other.weight.t()).softmax(-1).gather(1, recorded)
    torch.testing.assert_close(replayed.probs, scores / scores.sum(-1, keepdim=True))
    with pytest.raises(KeyError, match="no choices of sample 40 of step 0 in layer 1"):
        log.expert_ids(1, names(8, 2))
    with pytest.raises(KeyError, match=r"position 0 of sample 40 .* is not recorded"):
        RoutingLog.load(tmp_path / "4.safetensors").expert_ids(0, names(8, 2))
    with pytest.raises(KeyError, match="position 8 of sample 40"):
        log.expert_ids(0, names(9, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, r"top_k = 9: with num_experts = 8 it must lie in \[1, 8\]"),
        ({"top_k": 0}, r"top_k = 0: with num_experts = 8 it must lie in \[1, 8\]"),
        (
            {"num_groups": 3},
            r"num_groups = 3 does not divide num_experts = 8; use one of \[1, 2, 4, 8\]",
        ),
        ({"num_groups": 2, "groups_top_k": 3}, "groups_top_k = 3: with num_groups = 2"),
        ({"num_groups": 4, "top_k": 5}, "offer 2; groups_top_k must be at least 3"),
        (
            {"score_function": "relu"},
            "score_function must be 'softmax' or 'softmax_after_top_k' or 'sigmoid'",
        ),
        ({"aux_loss_type": "global"}, "aux_loss_type must be .*'sequence' or 'batch'"),
        ({"jitter": 1.0}, "jitter must be below 1, got 1.0"),
        ({"z_loss_coef": -1.0}, "z_loss_coef must be at least 0, got -1.0"),
    ],
)
def test_mistakes_in_the_settings_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_router(**options)


def test_mistakes_in_calls_are_explained() -> None:
    router = make_router()
    with pytest.raises(ValueError, match=r"expected \(S, B, 16\)"):
        router(torch.zeros(3, 1, 15))
    with pytest.raises(ValueError, match=r"expected \(3, 2\)"):
        router(torch.zeros(3, 1, 16), expert_ids=torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected \(8, H\)"):
        TopKRouter(router.options, nn.Parameter(torch.zeros(7, 16)))


# ---- the whole path of a token, against a loop over tokens ---------------------------------------


def experts_by_loop(x: Tensor, routed: RoutingResult, w1: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for choice, expert in enumerate(routed.expert_ids[token].tolist()):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            y = w2[expert] @ (torch.nn.functional.silu(gate) * up)
            out[token] = out[token] + routed.probs[token, choice] * y
    return out


def experts_by_ops(x: Tensor, routed: RoutingResult, w1: Tensor, w2: Tensor) -> Tensor:
    row_map, counts = sort_by_expert(routed.expert_ids, w1.shape[0])
    moved = permute(x, row_map, row_map.numel())
    probs = permute_probs(routed.probs, row_map, row_map.numel())
    inner = swiglu(grouped_gemm(moved, w1, counts), probs)
    rows = grouped_gemm(inner, w2, counts)
    return unpermute(rows, row_map)


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 2, 5, 13, 17]),
    num_experts=st.integers(1, 7),
    data=st.data(),
    one_expert=st.booleans(),
)
def test_experts_equal_a_loop_over_tokens(
    num_tokens: int, num_experts: int, data: st.DataObject, one_expert: bool
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    # The weight of a single choice would be 1 after normalization, and its gradient pure rounding.
    router = make_router(hidden=6, num_experts=num_experts, top_k=top_k, normalize=top_k > 1)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 6, generator=generator)
    if one_expert:  # everybody prefers expert 0, and the others follow in one order
        x = x.abs()
        with torch.no_grad():
            router.weight.copy_(-torch.arange(float(num_experts))[:, None].expand(-1, 6))
    w1 = torch.randn(num_experts, 10, 6, generator=generator)
    w2 = torch.randn(num_experts, 6, 5, generator=generator)
    results = []
    for compute in (experts_by_loop, experts_by_ops):
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        router.weight.grad = None
        routed = router(leaves[0])
        if one_expert:
            assert routed.expert_ids.sort().values.tolist() == [list(range(top_k))] * num_tokens
        out = compute(leaves[0], routed, leaves[1], leaves[2])
        out.square().sum().backward()
        results.append([out, router.weight.grad, *[leaf.grad for leaf in leaves]])
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        limit = 1e-5 * float(expected.detach().abs().max()) + 1e-6
        assert torch.allclose(found, expected, rtol=0.0, atol=limit)


def test_groups_take_no_tokens_at_all() -> None:
    config = RouterOptions(num_experts=4, top_k=2, num_groups=2, groups_top_k=1)
    router = TopKRouter(config, nn.Parameter(torch.randn(4, 8)))
    assert router(torch.zeros(0, 1, 8)).expert_ids.shape == (0, 2)
