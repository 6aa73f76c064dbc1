from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megacore.ops.dropout import counter_dropout, keep_mask
from megatrain.models.dropout import DropoutKey, Site
from tests.support.models import random_batch, tiny_config, whole_model

KEY = DropoutKey(seed=1, step=2, layer=3, site=Site.MLP)


def mask(key: DropoutKey = KEY, *, p: float = 0.5, num_features: int = 64) -> Tensor:
    """64 positions, 64 samples."""
    return keep_mask(
        key.as_int64(),
        p=p,
        sample_ids_B=torch.arange(64),
        positions_S=torch.arange(64),
        num_features=num_features,
    )


def splitmix64(state: int) -> int:
    """The published generator's mixer, on Python integers."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_mask_is_the_documented_function_of_its_arguments() -> None:
    golden, p = 0x9E3779B97F4A7C15, 0.3
    samples, positions = [0, 5, 2**40], [0, 1, 700]
    ours = keep_mask(
        KEY.as_int64(),
        p=p,
        sample_ids_B=torch.tensor(samples),
        positions_S=torch.tensor(positions),
        num_features=9,
    )
    for (s, position), (b, sample), f in itertools.product(
        enumerate(positions), enumerate(samples), range(9)
    ):
        token = splitmix64(splitmix64(KEY.as_int64() + sample * golden) + position * golden)
        number = splitmix64(token + (f + 1) * golden)
        signed = number - 2**64 if number >= 2**63 else number
        assert ours[s, b, f].item() == (signed >= p * 2**64 - 2**63)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_each_element_is_kept_with_probability_one_minus_p(p: float) -> None:
    keep = mask(p=p).double()
    for dims, count in (((0, 1, 2), 64**3), ((0, 1), 64**2), ((0, 2), 64**2), ((1, 2), 64**2)):
        sigma = (p * (1 - p) / count) ** 0.5
        assert (keep.mean(dims) - (1 - p)).abs().max().item() <= 5 * sigma


def test_neighbours_along_every_dimension_are_independent() -> None:
    sign = mask().double() * 2 - 1
    for dim, distance in itertools.product(range(3), (1, 2, 32)):
        length = sign.shape[dim] - distance
        product = sign.narrow(dim, 0, length) * sign.narrow(dim, distance, length)
        assert abs(product.mean().item()) < 5 / product.numel() ** 0.5


def test_two_by_two_patterns_are_uniform() -> None:
    bits = mask().long()
    pattern = bits[0::2, :, 0::2] * 8 + bits[1::2, :, 0::2] * 4
    pattern += bits[0::2, :, 1::2] * 2 + bits[1::2, :, 1::2]
    counts = pattern.flatten().bincount(minlength=16).double()
    expected = counts.sum() / 16
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 45  # 15 degrees of freedom: 1 in 10,000 fair masks is above


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, seed=2),
        replace(KEY, step=3),
        replace(KEY, layer=4),
        replace(KEY, site=Site.ATTENTION),
    ],
)
def test_another_seed_step_layer_or_site_gives_an_unrelated_mask(other: DropoutKey) -> None:
    agree = (mask() == mask(other)).double().mean().item()
    assert agree == pytest.approx(0.5, abs=5 * 0.5 / 64**1.5)


def test_a_sample_has_the_same_mask_in_any_microbatch_slice_and_width() -> None:
    whole = mask()
    part = keep_mask(
        KEY.as_int64(),
        p=0.5,
        sample_ids_B=torch.tensor([9, 4]),
        positions_S=torch.arange(16, 32),
        num_features=10,
    )
    assert torch.equal(part, whole[16:32, [9, 4], :10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("on_device", [False, True])
def test_dropout_scales_what_the_mask_keeps_and_its_gradients(
    dtype: torch.dtype, on_device: bool
) -> None:
    x = torch.randn(5, 3, 33, dtype=dtype, requires_grad=True)
    ids, positions, key = torch.tensor([2**40, 0, 7]), torch.arange(40, 45), KEY.as_int64()
    keep = keep_mask(key, p=0.25, sample_ids_B=ids, positions_S=positions, num_features=33)
    factor = (keep * (1.0 / 0.75)).to(dtype)
    y = counter_dropout(x, ids, positions, key=torch.tensor(key) if on_device else key, p=0.25)
    assert torch.equal(y, x * factor)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    assert torch.equal(x.grad, grad * factor)


@pytest.mark.parametrize(
    ("ids", "positions", "name"),
    [
        (torch.arange(3, dtype=torch.int32), torch.arange(5), "sample_ids_B must be .3,. int64"),
        (torch.arange(2), torch.arange(5), "sample_ids_B must be .3,. int64 on cpu, got .2,."),
        (torch.arange(3), torch.arange(4), "positions_S must be .5,. int64 on cpu, got .4,."),
    ],
)
def test_ids_that_do_not_fit_the_rows_are_refused(
    ids: Tensor, positions: Tensor, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        counter_dropout(torch.ones(5, 3, 4), ids, positions, key=1, p=0.5)


def test_a_key_on_the_device_must_be_one_whole_number() -> None:
    x, ids, positions = torch.ones(5, 3, 2), torch.arange(3), torch.arange(5)
    for key in (torch.tensor(3.0), torch.arange(2)):
        with pytest.raises(ValueError, match="key must be one whole number on cpu, got"):
            counter_dropout(x, ids, positions, key=key, p=0.5)
    narrow = counter_dropout(x, ids, positions, key=torch.tensor(3, dtype=torch.int32), p=0.5)
    assert torch.equal(narrow, counter_dropout(x, ids, positions, key=3, p=0.5))


def test_dropout_is_the_same_for_any_number_of_threads_and_strides() -> None:
    x, ids, positions = torch.randn(90, 3, 1000), torch.arange(6)[::2], torch.arange(180)[::2]
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(counter_dropout(x, ids, positions, key=3, p=0.1))
    torch.set_num_threads(before)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    contiguous = ids.contiguous(), positions.contiguous()
    found.append(counter_dropout(turned, *contiguous, key=3, p=0.1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_torch_finds_no_fault_in_the_registration_of_dropout() -> None:
    x, ids, positions = torch.randn(2, 3, 4, requires_grad=True), torch.arange(3), torch.arange(2)
    for key, value in ((None, 5), (torch.tensor(5), 0)):
        arguments = (x, ids, positions, key, value, 0.5)
        opcheck(torch.ops.megacore.counter_dropout.default, arguments)


def test_the_model_drops_in_training_only_and_anew_in_every_step() -> None:
    config = tiny_config(dropout=0.2)
    model, plain = whole_model(config), whole_model(tiny_config())
    batch = random_batch(config)
    with torch.no_grad():
        losses = [model(None, replace(batch, step=step)).item() for step in (0, 1, 0)]
        assert losses[0] == losses[2]
        assert losses[0] != losses[1]
        model.eval()
        assert model(None, batch) == plain(None, batch)
