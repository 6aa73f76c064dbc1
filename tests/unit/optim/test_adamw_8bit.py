"""AdamW with 8-bit moments: its numbers, its blocks, and its distance from AdamW."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.optim import AdamW, AdamW8bit, DistributedOptimizer, OptimizerOptions, UpdateRule
from megacore.optim.rules.adamw_8bit import decode, encode, numbers
from megacore.parallel import ParamInfo, ProcessGroups

# Of bitsandbytes' dynamic map, which has the same numbers: ends and some between.
SIGNED = {0: -0.9929687, 1: -0.9789062, 126: -5.5e-07, 127: 0.0, 128: 5.5e-07, 254: 0.9929687}
UNSIGNED = {0: 0.0, 1: 3.25e-07, 2: 7.75e-07, 3: 2.125e-06, 254: 0.9964844, 255: 1.0}


@pytest.mark.parametrize(("is_signed", "some"), [(True, SIGNED), (False, UNSIGNED)])
def test_the_numbers_are_the_dynamic_ones(is_signed: bool, some: dict[int, float]) -> None:
    found = numbers(is_signed=is_signed)
    assert len(found) == len(set(found)) == 256
    assert {at: found[at] for at in some} == pytest.approx(some, rel=1e-6)


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([1, 8, 32]))
def test_an_encoded_value_is_near(seed: int, is_signed: bool, block: int) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(4 * block, generator=random) * 10.0 ** (seed % 9 - 6)
    values = values if is_signed else values.abs()
    codes, scales = encode(values, block=block, is_signed=is_signed)
    found = decode(codes, scales, is_signed=is_signed)
    largest = values.abs().view(-1, block).amax(dim=1).repeat_interleave(block)
    assert torch.equal(scales.repeat_interleave(block), largest)
    # The widest gap within a power of ten, relative to its values; 0 is below the last.
    assert ((found - values).abs() <= values.abs() * 0.82 + largest * 1.1e-6).all()
    near = values.abs() > 0.1 * largest
    assert ((found - values).abs()[near] <= 0.0142 * largest[near]).all()
    assert (found[values > 0.0] > 0.0).all() or is_signed


def test_rounding_keeps_the_mean() -> None:
    values = torch.linspace(0.3, 0.31, 100_000).view(-1, 1).repeat(1, 2)
    values[:, 1] = 1.0
    codes, scales = encode(values.view(-1), block=2, is_signed=False)
    found = decode(codes, scales, is_signed=False).view(-1, 2)[:, 0]
    assert abs(float((found - values[:, 0]).mean())) < 2e-5
    assert len(found.unique()) >= 2


def test_zeros_are_encoded_exactly() -> None:
    codes, scales = encode(torch.zeros(64), block=32, is_signed=True)
    assert torch.equal(decode(codes, scales, is_signed=True), torch.zeros(64))
    fresh = torch.zeros(64, dtype=torch.uint8), torch.zeros(2)
    for is_signed in (True, False):
        assert torch.equal(decode(*fresh, is_signed=is_signed).abs(), torch.zeros(64))


def make(
    rule: UpdateRule, start: dict[str, Tensor]
) -> tuple[DistributedOptimizer, list[nn.Parameter]]:
    named = [
        (ParamInfo(name=name, full_shape=tuple(v.shape), tp_dim=None), nn.Parameter(v.clone()))
        for name, v in start.items()
    ]
    groups = ProcessGroups.single()
    buffers = make_buffers(
        named,
        groups=groups,
        kind_of=rule.rule_for,
        unit_of=lambda info: rule.rule_for(info)[0].unit,
    )
    options = OptimizerOptions(rule=rule, clip_grad=0.0)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options)
    return optimizer, [param for _, param in named]


def test_steps_are_near_those_of_adamw() -> None:
    torch.manual_seed(0)
    start = {"w": torch.randn(6, 64), "odd": torch.randn(3, 5), "norm": torch.randn(64)}
    optimizers = [make(rule, start) for rule in (AdamW8bit(), AdamW())]
    for step in range(30):
        torch.manual_seed(step)
        grads = [value * 0.1 + torch.randn_like(value) for value in start.values()]
        for optimizer, params in optimizers:
            optimizer.zero_grads()
            torch.stack(
                [(p * g).sum() for p, g in zip(params, grads, strict=True)]
            ).sum().backward()
            optimizer.step(lr=0.01)
    ours, theirs = (params for _, params in optimizers)
    moved = (theirs[0] - start["w"]).norm()
    assert 0.0 < (ours[0] - theirs[0]).norm() < 0.05 * moved
    assert torch.equal(ours[1], theirs[1])  # without whole blocks
    assert torch.equal(ours[2], theirs[2])
    kinds = {piece.info.name: piece.tensors for piece in optimizers[0][0].pieces()}
    assert set(kinds["norm"]) == {"main_param", "exp_avg", "exp_avg_sq"}
    assert kinds["w"]["exp_avg"].dtype == torch.uint8
    assert kinds["w"]["exp_avg_sq_scale"].numel() == 6 * 64 // 32


def test_a_skipped_step_changes_nothing() -> None:
    optimizer, [param] = make(AdamW8bit(), {"w": torch.randn(2, 32)})
    (param * torch.randn(2, 32)).sum().backward()
    optimizer.step(lr=0.1)
    before = {kind: values.clone() for kind, values in optimizer.pieces()[0].tensors.items()}
    optimizer.zero_grads()
    (param.sum() * float("nan")).backward()
    assert optimizer.step(lr=0.1).skipped
    after = optimizer.pieces()[0].tensors
    assert all(torch.equal(after[kind], values) for kind, values in before.items())


def test_blocks_that_ranks_divide_are_refused() -> None:
    info = ParamInfo(name="w", full_shape=(2, 64), tp_dim=1)
    half = nn.Parameter(torch.zeros(2, 32))
    groups = ProcessGroups.single()
    rule = AdamW8bit(block=64)
    with pytest.raises(ValueError, match=r"w has 32 columns .* multiple of 64, or blocks of 32"):
        DistributedOptimizer(
            make_buffers([(info, half)], groups=groups),
            groups=groups,
            options=OptimizerOptions(rule=rule),
        )
    whole = ParamInfo(name="w", full_shape=(2, 32), tp_dim=None)
    with pytest.raises(ValueError, match="give make_buffers unit_of="):
        DistributedOptimizer(
            make_buffers([(whole, nn.Parameter(torch.zeros(2, 32)))], groups=groups),
            groups=groups,
            options=OptimizerOptions(rule=AdamW8bit()),
        )


@given(st.integers(1, 9), st.sampled_from([1, 2, 3, 5, 8, 64]), st.integers(100, 5000))
def test_slices_of_ranks_begin_with_blocks(count: int, ranks: int, bucket_numel: int) -> None:
    from megacore.buffers import plan_buckets

    numels = [32 * (7 * index + 1) for index in range(count)]
    plan = plan_buckets(numels, dp_size=ranks, bucket_numel=bucket_numel, unit=32)
    for rank in range(ranks):
        for piece in plan.shard(rank):
            assert piece.param_start % 32 == piece.param_end % 32 == piece.local_start % 32 == 0


def test_a_block_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="block must be a power of two, got 24"):
        AdamW8bit(block=24)
