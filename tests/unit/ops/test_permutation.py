from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from megacore.ops import permute, permute_probs, sort_by_expert, top_k, unpermute
from megacore.ops.permutation import (
    permute_reference,
    permute_with_probs,
    sort_by_expert_reference,
    unpermute_reference,
)
from megacore.ops.topk import top_k_reference

cases = st.tuples(
    st.integers(0, 20), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32)
)  # tokens, choices, experts, seed


def test_operations_compile_without_a_graph_break() -> None:
    def layer(tokens: Tensor, expert_of: Tensor) -> tuple[Tensor, Tensor]:
        row_map, counts = sort_by_expert(expert_of, 3)
        return unpermute(permute(tokens, row_map, 8) * 2, row_map), counts

    tokens, expert_of = torch.randn(4, 5), choices(4, 2, 3, 0)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for expected, found in zip(layer(tokens, expert_of), compiled(tokens, expert_of), strict=True):
        assert torch.equal(found, expected)


def choices(num_tokens: int, k: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_experts, (num_tokens, k), generator=generator)


def rows_by_loop(expert_of: Tensor, num_experts: int) -> list[list[int]]:
    """The copies (token, choice) of each row: by expert, token, choice."""
    return [
        [token, choice]
        for expert in range(num_experts)
        for token in range(expert_of.shape[0])
        for choice in range(expert_of.shape[1])
        if expert_of[token, choice] == expert
    ]


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_rows_are_sorted_by_expert_then_token_then_choice(case: tuple[int, int, int, int]) -> None:
    _, k, num_experts, _ = case
    expert_of = choices(*case)
    tokens = torch.arange(1.0, expert_of.shape[0] + 1)[:, None].expand(-1, 3)
    row_map, tokens_per_expert = sort_by_expert(expert_of, num_experts)
    rows = permute(tokens, row_map, expert_of.numel())
    order = rows_by_loop(expert_of, num_experts)
    assert rows.shape == (expert_of.numel(), 3)
    assert rows[: len(order), 0].tolist() == [token + 1 for token, _ in order]
    assert not rows[len(order) :].any()
    assert [row_map[t, j].item() for t, j in order] == list(range(len(order)))
    assert int((row_map == -1).sum()) == expert_of.numel() - len(order)
    expected = [int((expert_of == e).sum()) for e in range(num_experts)]
    assert tokens_per_expert.tolist() == expected
    for a, b in zip(
        sort_by_expert(expert_of, num_experts),
        sort_by_expert_reference(expert_of, num_experts),
        strict=True,
    ):
        assert torch.equal(a, b)
    back = unpermute(rows, row_map)
    assert torch.equal(back, tokens * (expert_of >= 0).sum(1, keepdim=True))
    assert k == expert_of.shape[1]


@settings(max_examples=60, deadline=None)
@given(case=cases, width=st.integers(1, 40), low=st.booleans(), weighted=st.booleans())
def test_native_kernels_equal_the_references_to_the_bit_or_rounding(
    case: tuple[int, int, int, int], width: int, low: bool, weighted: bool
) -> None:
    expert_of = choices(*case)
    dtype = torch.bfloat16 if low else torch.float32
    generator = torch.Generator().manual_seed(case[3])
    tokens = torch.randn(expert_of.shape[0], width, generator=generator).to(dtype)
    weights = torch.rand(expert_of.shape, generator=generator) if weighted else None
    row_map, _ = sort_by_expert(expert_of, case[2])
    num_rows = expert_of.numel() + 2

    def both(native: bool) -> list[Tensor]:
        a = tokens.clone().requires_grad_()
        p = None if weights is None else weights.clone().requires_grad_()
        move, back = (permute, unpermute) if native else (permute_reference, unpermute_reference)
        rows = move(a, row_map, num_rows, p)
        out = back(rows, row_map, p)
        out.float().square().sum().backward()
        assert a.grad is not None
        found = [rows, out, a.grad]
        if p is not None:
            assert p.grad is not None
            found.append(p.grad)
        return found

    tolerance = 2e-2 if low else 2e-6
    for ours, reference in zip(both(True), both(False), strict=True):
        assert ours.dtype == reference.dtype
        limit = tolerance * max(1.0, float(reference.detach().abs().max()) if ours.numel() else 0.0)
        assert torch.allclose(ours.float(), reference.float(), rtol=0.0, atol=limit)


def test_probabilities_follow_their_copies() -> None:
    expert_of = torch.tensor([[1, 0], [0, -1], [1, 1]])
    probs = torch.tensor([[0.1, 0.2], [0.3, 9.0], [0.5, 0.6]], requires_grad=True)
    row_map, _ = sort_by_expert(expert_of, 2)
    per_row = permute_probs(probs, row_map, 6)
    assert torch.equal(per_row, torch.tensor([0.2, 0.3, 0.1, 0.5, 0.6, 0.0]))
    (per_row * torch.arange(6.0)).sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[2.0, 0.0], [1.0, 0.0], [3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_tokens_and_probabilities_together_have_the_bits_of_each(
    dtype: torch.dtype, needs: tuple[bool, bool]
) -> None:
    row_map, _ = sort_by_expert(torch.tensor([[1, 0], [0, -1], [1, 1]]), 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found: list[list[torch.Tensor]] = []
    for together in (True, False):
        torch.manual_seed(0)
        inputs = [torch.randn(3, 4, dtype=dtype), torch.randn(3, 2, dtype=wide)]
        for tensor, need in zip(inputs, needs, strict=True):
            tensor.requires_grad_(need)
        if together:
            rows, probs = permute_with_probs(*inputs, row_map, 7)
        else:
            rows, probs = permute(inputs[0], row_map, 7), permute_probs(inputs[1], row_map, 7)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        loss = (rows * torch.randn_like(rows)).sum() + (probs * torch.randn_like(probs)).sum()
        found.append([rows, probs, *torch.autograd.grad(loss, wanted)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_tokens_and_probabilities_together_need_only_the_gradients_that_are_asked_for() -> None:
    row_map, _ = sort_by_expert(torch.tensor([[1, 0], [0, 1]]), 2)
    tokens, probs = torch.ones(2, 3), torch.ones(2, 2, requires_grad=True)
    rows, row_probs = permute_with_probs(tokens, probs, row_map, 4)
    assert (rows.requires_grad, row_probs.requires_grad) == (False, True)
    row_probs.mul_(2)
    row_probs.sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    tokens.requires_grad_()
    _, row_probs = permute_with_probs(tokens, probs, row_map, 4)
    (grad,) = torch.autograd.grad(row_probs.sum(), [tokens], allow_unused=True)
    assert grad is None


def test_fewer_rows_are_enough_when_the_caller_knows_it() -> None:
    expert_of = torch.tensor([[-1], [0], [-1]])
    row_map, _ = sort_by_expert(expert_of, 1)
    assert permute(torch.ones(3, 2), row_map, 1).tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="row 0 of copy 0 of token 1 is not among the 0 rows"):
        permute(torch.ones(3, 2), row_map, 0)


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="copy 1 is for expert 2; there are 2"):
        sort_by_expert(torch.tensor([[0], [2]]), 2)
    with pytest.raises(ValueError, match="expert -2"):
        sort_by_expert(torch.tensor([[-2]]), 2)
    with pytest.raises(ValueError, match="must have one T"):
        permute(torch.ones(3, 1), torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match=r"must be \(T, k\) int64"):
        sort_by_expert(torch.tensor([0]), 2)
    with pytest.raises(ValueError, match="must have the shape of row_map"):
        unpermute(torch.ones(1, 1), torch.tensor([[0]]), torch.ones(2, 1))


def test_torch_can_trace_and_differentiate_the_operations() -> None:
    expert_of = torch.tensor([[0, 1], [1, -1], [2, 0], [0, 2]])
    row_map, _ = sort_by_expert(expert_of, 3)
    tokens = torch.randn(4, 6, requires_grad=True)
    rows = torch.randn(8, 6, requires_grad=True)
    weights = torch.rand(4, 2, requires_grad=True)
    ops = torch.ops.megacore
    opcheck(ops.sort_by_expert.default, (expert_of, 3))
    opcheck(ops.top_k.default, (tokens.detach(), 2))
    opcheck(ops.row_dots.default, (tokens.detach(), rows.detach(), row_map))
    opcheck(ops.permute_both.default, (tokens, weights, row_map, 8))
    opcheck(ops.unpermute_both.default, (rows.detach(), torch.rand(8), row_map))
    for w in (weights, None):
        opcheck(ops.permute.default, (tokens, row_map, 8, w))
        opcheck(ops.unpermute.default, (rows, row_map, w))
    wide = [x.detach().double().requires_grad_() for x in (tokens, rows, weights)]
    assert torch.autograd.gradcheck(lambda t, _, w: permute(t, row_map, 8, w), wide)
    assert torch.autograd.gradcheck(lambda t, _, w: permute_with_probs(t, w, row_map, 8), wide)
    assert torch.autograd.gradgradcheck(lambda t, _, w: ops.permute_both(t, w, row_map, 8), wide)
    assert torch.autograd.gradcheck(lambda _, r, w: unpermute(r, row_map, w), wide)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 40),
    levels=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_top_k_is_the_stable_sort(
    rows: int, columns: int, levels: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, columns))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (rows, columns), generator=generator).float()
    values = torch.tensor([-torch.inf, -0.0, torch.inf, torch.nan])
    special = torch.rand(scores.shape, generator=generator) < 0.1
    scores[special] = values[torch.randint(0, 4, scores.shape, generator=generator)][special]
    assert torch.equal(top_k(scores, k), top_k_reference(scores, k))


def test_top_k_refuses_impossible_numbers() -> None:
    with pytest.raises(ValueError, match=r"k is 4; with 3 columns it must lie in \[1, 3\]"):
        top_k(torch.zeros(2, 3), 4)
    with pytest.raises(ValueError, match=r"must be \(T, E\)"):
        top_k(torch.zeros(3), 1)
