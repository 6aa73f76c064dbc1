from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from megacore.ops.routing import route, route_reference

RULES = st.fixed_dictionaries(
    {
        "is_sigmoid": st.booleans(),
        "softmax_after_top_k": st.booleans(),
        "normalize": st.booleans(),
        "scaling": st.sampled_from([1.0, 2.5]),
    }
)


def run(function: Any, logits: Tensor, *, chosen: Tensor | None = None) -> list[Tensor]:
    """Results and the gradient of the logits, for the same gradients of the results."""
    leaf = logits.clone().requires_grad_()
    probs, ids, counts, totals = function(leaf, chosen)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (probs, totals)]
    (grad,) = torch.autograd.grad((probs, totals), leaf, grads)
    return [probs, ids, counts, totals, grad]


@settings(max_examples=60, deadline=None)
@given(
    rule=RULES,
    experts=st.sampled_from([1, 2, 7, 16, 33]),
    pools=st.integers(1, 3),
    biased=st.booleans(),
    replayed=st.booleans(),
    data=st.data(),
)
def test_the_native_router_equals_torch_in_float64(
    rule: dict[str, Any], experts: int, pools: int, biased: bool, replayed: bool, data: Any
) -> None:
    k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(6 * pools, experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator) if biased else None
    chosen = None
    if replayed:
        chosen = torch.rand(len(logits), experts, generator=generator).topk(k).indices

    order = ("is_sigmoid", "softmax_after_top_k", "normalize", "scaling")
    values = [rule[name] for name in order]

    def native(x: Tensor, ids: Tensor | None) -> Any:
        return route(x, bias, ids, top_k=k, num_pools=pools, **rule)

    found = run(native, logits, chosen=chosen)
    expected = run(
        lambda x, ids: route_reference(x, None, ids, k, pools, *values),
        logits.double(),
        chosen=found[1],
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-5, atol=2e-6)
    if chosen is None:
        best = route_reference(logits, bias, None, k, pools, *values)[1]
        assert (best == found[1]).all(1).float().mean() > 0.9  # but for scores that round alike
    else:
        assert torch.equal(found[1], chosen)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    logits = torch.randn(9000, 8, generator=torch.Generator().manual_seed(0))
    options = {"softmax_after_top_k": False, "normalize": True, "scaling": 1.0}
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(
            run(
                lambda x, ids: route(
                    x, None, ids, top_k=2, num_pools=3, is_sigmoid=True, **options
                ),
                logits,
            )
        )
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_torch_finds_no_fault_in_the_registration() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arguments = (logits, None, None, 2, 3, True, False, True, 1.0)
    opcheck(torch.ops.megacore.route.default, arguments)


@settings(max_examples=20, deadline=None)
@given(rule=RULES, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_result_without_gradient_is_one_with_a_gradient_of_zero(
    rule: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)

    def grad_of(results: tuple[int, ...], grads: list[Tensor | None]) -> Tensor:
        leaf = logits.clone().requires_grad_()
        found = route(leaf, None, None, top_k=3, num_pools=2, **rule)
        torch.autograd.backward([found[i] for i in results], grads)
        assert leaf.grad is not None
        return leaf.grad

    probs, totals = torch.randn(6, 3, dtype=dtype), torch.randn(2, 8, dtype=dtype)
    both = (0, 3)
    assert torch.equal(grad_of((0,), [probs]), grad_of(both, [probs, torch.zeros_like(totals)]))
    assert torch.equal(grad_of((3,), [totals]), grad_of(both, [torch.zeros_like(probs), totals]))
