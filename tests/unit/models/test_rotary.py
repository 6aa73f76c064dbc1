"""Rotary frequencies under scaling, compared with values of `transformers` 5.23."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.config import ModelConfig, RopeScalingConfig
from megatrain.models.attention.rotary import RotaryTables, frequencies

LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Base, rotated elements, scaling, sequence; frequencies 1, R/4 and last, their sum, the factor.
GOLDEN: dict[str, tuple[float, int, dict[str, Any], int, tuple[float, ...]]] = {
    "linear 2": (
        1e4,
        128,
        {"type": "linear", "factor": 2.0},
        0,
        (0.432982177, 0.00499999989, 5.77390965e-5, 3.7299771, 1.0),
    ),
    "linear 8": (
        1e6,
        256,
        {"type": "linear", "factor": 8.0},
        0,
        (0.112210892, 1.25000006e-4, 1.39246737e-7, 1.2217415, 1.0),
    ),
    "dynamic, within the original length": (
        1e4,
        128,
        {"type": "dynamic", "factor": 2.0, "original_seq_length": 4096},
        4096,
        (0.865964353, 0.00999999978, 1.15478193e-4, 7.4599542, 1.0),
    ),
    "dynamic, twice the original length": (
        1e4,
        128,
        {"type": "dynamic", "factor": 2.0, "original_seq_length": 4096},
        8192,
        (0.850994289, 0.00572338188, 3.84927334e-5, 6.71093241, 1.0),
    ),
    "dynamic, four times": (
        1e4,
        64,
        {"type": "dynamic", "factor": 4.0, "original_seq_length": 4096},
        16384,
        (0.690345228, 0.00266110199, 1.02578579e-5, 3.22938021, 1.0),
    ),
    "llama 3.1": (
        5e5,
        128,
        {**LLAMA3, "factor": 8.0, "original_seq_length": 8192},
        0,
        (0.814617217, 5.24846022e-4, 3.06892588e-7, 5.38605826, 1.0),
    ),
    "llama 3.2": (
        5e5,
        64,
        {**LLAMA3, "factor": 32.0, "original_seq_length": 8192},
        0,
        (0.663601279, 4.29556705e-4, 9.41830649e-8, 2.9682024, 1.0),
    ),
    "yarn of qwen": (
        1e6,
        128,
        {"type": "yarn", "factor": 4.0, "original_seq_length": 32768},
        0,
        (0.805842221, 6.02941145e-4, 3.10234441e-7, 5.14403483, 1.13862944),
    ),
    "yarn of deepseek": (
        1e4,
        64,
        {
            "type": "yarn",
            "factor": 40.0,
            "original_seq_length": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        0,
        (0.749894202, 0.00550000044, 3.33380353e-6, 3.94893627, 1.0),
    ),
    "yarn with two magnitudes": (
        1e4,
        64,
        {
            "type": "yarn",
            "factor": 40.0,
            "original_seq_length": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
        0,
        (0.749894202, 0.00550000044, 3.33380353e-6, 3.94893627, 1.15572199),
    ),
    "yarn of gpt-oss, not truncated": (
        150000.0,
        64,
        {"type": "yarn", "factor": 32.0, "original_seq_length": 4096, "truncate": False},
        0,
        (0.689044297, 4.56483918e-4, 3.0235114e-7, 3.18043826, 1.34657359),
    ),
    "yarn of kimi": (
        5e4,
        64,
        {
            "type": "yarn",
            "factor": 32.0,
            "original_seq_length": 4096,
            "beta_fast": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        0,
        (0.713111103, 0.00447213603, 8.76441277e-7, 3.48176241, 1.0),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    base, num_rotated, fields, sequence, expected = GOLDEN[name]
    angle, factor = frequencies(
        num_rotated, base=base, scaling=RopeScalingConfig(**fields), sequence=sequence
    )
    shown = (angle[1], angle[num_rotated // 4], angle[-1], angle.sum())
    assert [float(x) for x in shown] == pytest.approx(expected[:4], rel=1e-6)
    assert factor == pytest.approx(expected[4], rel=1e-8)


def test_dynamic_tables_follow_the_length_of_the_sequence() -> None:
    scaling = RopeScalingConfig(type="dynamic", factor=2.0, original_seq_length=4)
    config = ModelConfig(seq_length=16, rope_scaling=scaling)
    tables = RotaryTables(config, 32, device=torch.device("cpu"))
    plain = RotaryTables(ModelConfig(seq_length=16), 32, device=torch.device("cpu"))
    assert torch.equal(tables(4)[0], plain(4)[0])
    long = tables(16)[0].clone()
    assert not torch.allclose(long, plain(16)[0])
    assert torch.equal(tables(3)[0], plain(3)[0])
    assert torch.equal(tables(16)[0], long)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "yarn"}, 'rope_scaling.type = "yarn" needs rope_scaling.original_seq_length'),
        (
            {"type": "llama3", "original_seq_length": 8, "low_freq_factor": 4.0},
            r"high_freq_factor must be above low_freq_factor = 4.0, got 4.0",
        ),
        ({"type": "mrope"}, "type must be 'none', 'linear'"),
    ],
)
def test_an_incomplete_rule_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScalingConfig(**fields)


def test_a_share_of_a_head_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match=r"even number of elements .* got 0.1, which rotates 3"):
        ModelConfig(hidden_size=128, num_heads=4, rotary_fraction=0.1)
