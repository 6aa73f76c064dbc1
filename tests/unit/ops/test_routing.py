from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from megacore.ops.routing import RouterLosses, route, route_reference

RULES = st.fixed_dictionaries(
    {
        "is_sigmoid": st.booleans(),
        "softmax_after_top_k": st.booleans(),
        "normalize": st.booleans(),
        "scaling": st.sampled_from([1.0, 2.5]),
    }
)
SCALES = {"aux_scale": 0.3, "aux_slope": 0.7, "z_scale": 0.02, "z_slope": 0.05}


def run(function: Any, logits: Tensor, *, chosen: Tensor | None = None) -> list[Tensor]:
    """Results and the gradient of the logits, for the same gradient of the weights."""
    leaf = logits.clone().requires_grad_()
    results = function(leaf, chosen)
    generator = torch.Generator().manual_seed(5)
    grad_probs = torch.randn(results[0].shape, generator=generator).to(logits.dtype)
    (grad,) = torch.autograd.grad(results[0], leaf, grad_probs)
    return [*results, grad]


@settings(max_examples=60, deadline=None)
@given(
    rule=RULES,
    experts=st.sampled_from([1, 2, 7, 16, 33]),
    pools=st.integers(1, 3),
    biased=st.booleans(),
    replayed=st.booleans(),
    factor=st.sampled_from(["number", "one", "each"]),
    data=st.data(),
)
def test_the_native_router_equals_torch_in_float64(
    rule: dict[str, Any],
    experts: int,
    pools: int,
    biased: bool,
    replayed: bool,
    factor: str,
    data: Any,
) -> None:
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(6 * pools, experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator) if biased else None
    chosen = None
    if replayed:
        chosen = torch.rand(len(logits), experts, generator=generator).topk(k).indices
    factors = {
        "number": (0.4, -1.5),
        "one": (torch.tensor(0.4), torch.tensor(-1.5)),
        "each": (torch.rand(pools, generator=generator), torch.rand(3, generator=generator)),
    }[factor]
    seen = torch.full((experts,), 5)

    def routed(x: Tensor, ids: Tensor | None, seen: Tensor | None) -> Any:
        losses = RouterLosses(aux_factor=factors[0], z_factor=factors[1], **SCALES)
        return route(
            x,
            bias if ids is None else None,
            ids,
            top_k=k,
            num_pools=pools,
            losses=losses,
            seen=seen,
            **rule,
        )

    found = run(lambda x, ids: routed(x, ids, seen), logits, chosen=chosen)
    expected = run(lambda x, ids: by_autograd(x, ids, rule, pools, factors), logits.double(),
                   chosen=found[1])  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-5, atol=2e-6)
    # And the fallback for other dtypes, which replays the reference.
    fallback = run(lambda x, ids: routed(x, ids, None), logits.double(), chosen=found[1])
    for ours, theirs in zip(fallback, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    assert seen.sum() == 5 * experts + found[1].numel()
    assert torch.equal((seen - 5).float(), found[2][0].sum(0))
    if chosen is None:
        values = [rule[n] for n in ("is_sigmoid", "softmax_after_top_k", "normalize", "scaling")]
        best = route_reference(logits, bias, None, None, k, pools, *values, False, 0.0, 0.0)[1]
        assert (best == found[1]).all(1).float().mean() > 0.9  # but for scores that round alike
    else:
        assert torch.equal(found[1], chosen)


def by_autograd(
    x: Tensor, ids: Tensor, rule: dict[str, Any], pools: int, factors: tuple[Any, Any]
) -> tuple[Tensor, ...]:
    """The reference, with the losses' gradients added to that of the sum of weights."""
    values = [rule[n] for n in ("is_sigmoid", "softmax_after_top_k", "normalize", "scaling")]
    scales = SCALES["aux_scale"], SCALES["z_scale"]
    k = ids.shape[1]
    probs, ids, stats, losses = route_reference(
        x, None, ids, None, k, pools, *values, True, *scales
    )
    counts, totals = stats.detach()[0], stats[1]
    aux = ((counts * totals).sum(1) * torch.as_tensor(factors[0])).mean() * SCALES["aux_slope"]
    squares = torch.logsumexp(x, -1).square()
    per_token = torch.as_tensor(factors[1]).reshape(1, -1)
    z = (squares.view(-1, per_token.shape[1]) * per_token).sum() * SCALES["z_slope"]
    return _WithLoss.apply(probs, aux + z), ids, stats.detach(), losses.detach()  # type: ignore[no-untyped-call]


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return grad, torch.ones((), dtype=grad.dtype)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    logits = torch.randn(9000, 8, generator=torch.Generator().manual_seed(0))
    options = {"softmax_after_top_k": False, "normalize": True, "scaling": 1.0}
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        losses = RouterLosses(**SCALES)
        found.append(
            run(
                lambda x, ids, losses=losses: route(
                    x, None, ids, top_k=2, num_pools=3, is_sigmoid=True, losses=losses, **options
                ),
                logits,
            )
        )
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_router_without_losses_has_no_sums_and_only_the_gradient_of_its_weights() -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    rule = {"top_k": 3, "num_pools": 2, "is_sigmoid": False, "scaling": 1.0, "normalize": True}
    silent = RouterLosses(aux_factor=0.0, z_factor=0.0, **SCALES)
    found = [
        run(lambda x, ids, each=each: route(x, None, ids, softmax_after_top_k=False, losses=each,
                                            **rule), logits)
        for each in (None, silent)
    ]  # fmt: skip
    assert found[0][2].shape == (0, 2, 8)
    assert found[0][3].shape == (0,)
    assert torch.equal(found[0][-1], found[1][-1])


def test_counts_of_other_ranks_enter_the_gradient_after_the_forward_pass() -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    rule: dict[str, Any] = {
        "top_k": 3, "num_pools": 1, "is_sigmoid": False, "scaling": 1.0, "normalize": True,
        "softmax_after_top_k": False,
    }  # fmt: skip
    grads = []
    for times in (1.0, 2.0):
        leaf, losses = logits.clone().requires_grad_(), RouterLosses(aux_slope=1.0 / times)
        routed = route(leaf, losses=losses, **rule)
        assert losses.counts is not None
        losses.counts = losses.counts * times
        routed.probs.sum().backward()
        grads.append(leaf.grad)
    assert grads[0] is not None
    assert bool(grads[0].any())
    assert torch.equal(*grads)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_sums", [False, True])
def test_torch_finds_no_fault_in_the_registration(has_sums: bool) -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(4, dtype=torch.int64) if has_sums else None
    rule = (3, True, False, True, 1.0)
    arguments = (logits, None, None, seen, 2, *rule, has_sums, 0.5, 0.25)
    opcheck(torch.ops.megacore.route.default, arguments)
    probs, ids, stats, _ = torch.ops.megacore.route(*arguments)
    factor = torch.ones(()) if has_sums else None
    counts = stats[0] if has_sums else None
    arguments = (probs, logits, ids, counts, factor, factor, *rule, 0.5, 0.25)
    opcheck(torch.ops.megacore.route_backward.default, arguments)
