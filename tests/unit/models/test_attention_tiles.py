"""Attention by tiles against a matrix of scores, for every rank of context parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore.ops.kernel_choice import MEASURED, leaving
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_positions, context_slices
from megatrain.models.attention import blockwise
from megatrain.models.attention.blockwise import (
    ScoreRule,
    Tile,
    attend_tiles,
    causal_tiles,
    visible,
)
from megatrain.models.attention.context_parallel import Masks, attend, causal_attention, needs_order
from megatrain.models.attention.ring import ring_tiles

SEQUENCE = 24
RULES = {
    "plain": ScoreRule(),
    "scale": ScoreRule(scale=0.7),
    "window of a slice": ScoreRule(window=2),
    "window over slices": ScoreRule(window=9),
    "window of more than all": ScoreRule(window=1000),
    "soft cap": ScoreRule(softcap=1.5),
    "soft cap, window": ScoreRule(softcap=1.5, window=5),
}


@pytest.fixture(params=["torch", "ours"], autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Attention without a mask by torch's kernel, and by ours."""
    with leaving(MEASURED if request.param == "torch" else (), "cpu"):
        yield


def by_matrix(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Attention of whole sequences from the matrix of all scores, ``(S, B, N, E)``."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * (rule.scale or q.shape[3] ** -0.5)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
    scores = scores.masked_fill((distance < 0) | (distance >= (rule.window or 10**9)), -torch.inf)
    if sinks is not None:
        extra = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., : q.shape[0]]
    return torch.einsum("bnst,tbne->sbne", weights, v)


def on_all_ranks(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sinks: Tensor | None, cp: int
) -> Tensor:
    """The same from the queries of each cp rank; keys in the order in which ranks gather them."""
    length = q.shape[0] // (2 * cp)
    if not needs_order(q, rule, sinks, None) and cp > 1:
        held = [context_slices(cp, rank) for rank in range(cp)]
        order = [late for _, late in held] + [early for early, _ in held]
        k, v = (torch.cat([x.split(length)[index] for index in order]) for x in (k, v))
    handle: Any = object() if cp > 1 else None
    mixed = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for rank in range(cp):
        own = context_positions(q.shape[0], cp_size=cp, position=rank)
        found = attend(
            q[own],
            k,
            v,
            group=Group(name="cp", ranks=tuple(range(cp)), position=rank, handle=handle),
            grouped=q.shape[2] > k.shape[2],
            masks=Masks(),
            rule=rule,
            sinks=sinks,
        )
        mixed = mixed.index_add(0, own, found)
    return mixed


def tensors(num_kv_heads: int, value_dim: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 8), (num_kv_heads, 8), (num_kv_heads, value_dim))
    return [
        torch.randn(SEQUENCE, 2, *shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("cp", "num_kv_heads", "value_dim"), [(1, 2, 8), (2, 2, 8), (3, 1, 8), (4, 4, 8), (2, 4, 5)]
)
def test_ranks_compute_the_attention_of_the_whole_sequence_and_its_gradients(
    rule: ScoreRule, cp: int, num_kv_heads: int, value_dim: int, with_sinks: bool
) -> None:
    q, k, v = tensors(num_kv_heads, value_dim)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=q.dtype, requires_grad=True)
    arguments = q, k, v, rule, sinks if with_sinks else None
    inputs = [q, k, v, *([sinks] if with_sinks else [])]
    found, expected = on_all_ranks(*arguments, cp), by_matrix(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=q.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("width", [10, 40])
def test_values_of_another_width_in_float32(width: int) -> None:
    random = torch.Generator().manual_seed(4)
    shapes = ((24,), (24,), (width,))
    drawn = [torch.randn(SEQUENCE, 2, 4, *shape, generator=random) for shape in shapes]
    found, expected = [], []
    group = Group("cp", (0,), 0, None)
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        leaves = [x.to(dtype).requires_grad_() for x in drawn]
        mixed = causal_attention(
            *leaves, group=group, grouped=False, masks=Masks(), rule=ScoreRule()
        )
        results += [mixed, *torch.autograd.grad(mixed.square().sum(), leaves)]
    for one, right in zip(found, expected, strict=True):
        assert (one.double() - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("rule", [ScoreRule(), RULES["soft cap"]], ids=["fused", "blocks"])
def test_values_wider_than_queries_are_mixed_too(rule: ScoreRule) -> None:
    q, k, v = tensors(2, 11)
    found, expected = on_all_ranks(q, k, v, rule, None, 2), by_matrix(q, k, v, rule, None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_tiles_round_as_little_as_one_kernel(dtype: torch.dtype, limit: float) -> None:
    exact = tensors(2, 8)
    expected = by_matrix(*exact, ScoreRule(), None)
    grad = torch.ones_like(expected)
    of_expected = torch.autograd.grad(expected, exact, grad)
    narrow = tensors(2, 8, dtype)
    mixed = on_all_ranks(*narrow, ScoreRule(), None, 2)
    found = (mixed, *torch.autograd.grad(mixed, narrow, grad.to(dtype)))
    for one, other in zip(found, (expected, *of_expected), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() < limit * other.abs().max()


@pytest.mark.parametrize("rule", [RULES["soft cap"], RULES["soft cap, window"]], ids=str)
def test_blocks_of_any_size_give_the_same(rule: ScoreRule, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(2, 8)
    expected = by_matrix(q, k, v, rule, None)
    monkeypatch.setattr(blockwise, "_BLOCK_SCORES", 5 * 2 * 4 * SEQUENCE)
    found = on_all_ranks(q, k, v, rule, None, 1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [q, k, v], grad), torch.autograd.grad(expected, [q, k, v], grad)
    )


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in _tensors(result)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(
    ("rule", "value_dim", "with_sinks"),
    [
        (ScoreRule(), 8, False),
        (ScoreRule(), 8, True),
        (ScoreRule(), 4, False),
        (ScoreRule(window=40), 8, False),
        (ScoreRule(window=40), 8, True),
        (ScoreRule(window=1 << 20), 8, False),
        (ScoreRule(softcap=1.5), 8, False),
    ],
)
@pytest.mark.parametrize("cp", [1, 2])
def test_no_tensor_has_an_element_per_query_and_key(
    rule: ScoreRule, value_dim: int, with_sinks: bool, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 1024
    monkeypatch.setattr(blockwise, "_BLOCK_SCORES", 16 * length)
    q, k, v = (torch.randn(length, 1, 1, d, requires_grad=True) for d in (8, 8, value_dim))
    sinks = torch.zeros(1, requires_grad=True) if with_sinks else None
    with _Largest() as largest:
        on_all_ranks(q, k, v, rule, sinks, cp).sum().backward()
    assert largest.elements <= 16 * length


def test_a_window_of_many_queries_reads_no_keys_before_it() -> None:
    masks = Masks()
    tiles = causal_tiles(300, 1000, masks.bands.of(100, torch.empty(0)))
    assert [tile.queries for tile in tiles] == [(0, 100), (100, 200), (200, 300)]
    assert [tile.keys for tile in tiles] == [(601, 800), (701, 900), (801, 1000)]


def test_a_single_token_attends_to_all_keys() -> None:
    q, k, v = tensors(2, 8)
    expected = by_matrix(q, k, v, ScoreRule(), None)[-1:]
    tiles = causal_tiles(1, SEQUENCE)
    torch.testing.assert_close(attend_tiles(q[-1:], k, v, tiles, rule=ScoreRule()), expected)
    alone = causal_attention(
        q[-1:], k, v, group=Group.solo(), grouped=True, masks=Masks(), rule=ScoreRule()
    )
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("comm_case", ["whole", "window", "documents", "documents, window"])
@pytest.mark.parametrize("size", [2, 3])
def test_tiles_of_a_ring_are_the_visible_pairs_once(comm_case: str, size: int) -> None:
    length = 6
    sequence = 2 * size * length
    window = 8 if "window" in comm_case else None
    starts = ((0, 3, 7, 20), (0, 11)) if "documents" in comm_case else ((0,),)
    band = None if window is None else torch.zeros(4, 4 + window - 1)
    if band is not None and window is not None:
        band.masked_fill_(~visible(4, 4 + window - 1, window), -torch.inf)
    for sample, documents in enumerate(starts):
        document = torch.bucketize(torch.arange(sequence), torch.tensor(documents), right=True)
        wanted = visible(sequence, sequence, window or sequence)
        wanted &= document[:, None] == document
        found = torch.zeros(sequence, sequence, dtype=torch.int64)
        for position, member in itertools.product(range(size), repeat=2):
            tiles = ring_tiles(
                position, member, size, length, starts=starts, window=window, band=band
            )
            own, theirs = (
                context_positions(sequence, cp_size=size, position=p) for p in (position, member)
            )
            for tile in tiles:
                (first, last), (start, end) = tile.queries, tile.keys
                if first // (2 * length) != sample:
                    continue
                shown = torch.ones(last - first, end - start, dtype=torch.int64)
                if tile.causal:
                    shown = shown.tril()
                if tile.mask is not None:
                    shown = (tile.mask == 0).long()
                assert shown.any(1).all(), "a query without a key"
                rows, columns = (
                    positions[torch.arange(*ends) - 2 * length * sample]
                    for positions, ends in ((own, tile.queries), (theirs, tile.keys))
                )
                found[rows[:, None], columns] += shown
        assert torch.equal(found, wanted.long())


@pytest.mark.parametrize(
    ("queries", "keys"), [((3, 3), (0, 2)), ((0, 2), (4, 4)), ((2, 1), (0, 1))]
)
def test_a_tile_without_queries_or_keys_is_an_error(
    queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"a tile of attention must have (queries|keys), got \["):
        Tile(queries, keys)
