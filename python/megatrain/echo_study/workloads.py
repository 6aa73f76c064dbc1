"""Synthetic routings: token counts per source rank and expert, step by step.

Tokens choose their experts one by one, without replacement, in proportion to the experts'
popularity (an exponential race, equivalent to Gumbel top-k), so counts have the noise of a real
router and no expert gets more tokens than there are. Workloads differ in the distribution of
popularity and its change from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megacore.moe.echo.plan import Counts
from megatrain.config.base import nearest_divisors

Floats = npt.NDArray[np.float64]

WORKLOADS = ("zipf", "lognormal", "drift", "bursts")

# Variation of expert popularity between ranks, standard deviation of the logarithm.
_SOURCE_VARIATION = 0.1
_DRIFT_CORRELATION = 0.9
_BURST_FACTOR = 6.0
_BURST_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """Sizes of one expert-parallel MoE layer.

    Attributes:
        num_ranks: Expert-parallel ranks.
        num_experts: Experts over all ranks; a multiple of ``num_ranks``.
        top_k: Experts per token.
        num_tokens: Tokens per rank and step.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    num_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_experts % self.num_ranks != 0:
            raise ValueError(
                f"{self.num_experts} experts do not divide over {self.num_ranks} ranks; "
                f"nearest: {nearest_divisors(self.num_ranks, self.num_experts)}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")


# Routed experts and experts per token of three public models.
MODEL_SHAPES = {"deepseek-v3": (256, 8), "qwen3": (128, 8), "mixtral": (8, 2)}


def routing_steps(
    name: str, shape: RoutingShape, *, num_steps: int, seed: int, skew: float = 0.6
) -> Iterator[Counts]:
    """Generate counts ``(num_ranks, num_experts)`` int64 per step; deterministic in the seed.

    Args:
        name: ``"zipf"``: popularity 1/1, 1/2, 1/3 ... over experts in random order, fixed.
            ``"lognormal"``: the logarithm is normal with deviation ``skew``, fixed. ``"drift"``:
            the same, but the logarithm wanders (first-order autoregression, correlation 0.9).
            ``"bursts"``: the same as drift, and in each step 2 percent of the experts (at least
            one) are 6 times as popular.
        shape: Sizes of the layer.
        num_steps: Number of matrices.
        seed: Seed of the random generator.
        skew: Standard deviation of the logarithm of popularity; not for ``"zipf"``. 0.25 is mild,
            1.2 severe.

    Raises:
        ValueError: If the workload is unknown.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    random = np.random.default_rng([seed, WORKLOADS.index(name)])
    log_popularity = _initial(name, shape, random, skew)
    variation = random.normal(0.0, _SOURCE_VARIATION, (shape.num_ranks, shape.num_experts))
    for _ in range(num_steps):
        yield _route(log_popularity + _burst(name, shape, random) + variation, shape, random)
        if name in {"drift", "bursts"}:
            fresh = random.normal(0.0, skew, shape.num_experts)
            weight = np.sqrt(1.0 - _DRIFT_CORRELATION**2)
            log_popularity = _DRIFT_CORRELATION * log_popularity + weight * fresh


def _initial(name: str, shape: RoutingShape, random: np.random.Generator, skew: float) -> Floats:
    if name == "zipf":
        zipf: Floats = -np.log(1.0 + random.permutation(shape.num_experts))
        return zipf
    return random.normal(0.0, skew, shape.num_experts)


def _burst(name: str, shape: RoutingShape, random: np.random.Generator) -> Floats:
    extra = np.zeros(shape.num_experts)
    if name == "bursts":
        size = max(1, round(_BURST_SHARE * shape.num_experts))
        extra[random.choice(shape.num_experts, size, replace=False)] = np.log(_BURST_FACTOR)
    return extra


def _route(log_popularity: Floats, shape: RoutingShape, random: np.random.Generator) -> Counts:
    """Sample one matrix of counts; ``log_popularity`` is ``(num_ranks, num_experts)``."""
    counts = np.empty((shape.num_ranks, shape.num_experts), np.int64)
    slowness = np.exp(-log_popularity).astype(np.float32)
    for rank in range(shape.num_ranks):
        # The top_k smallest of exponential times with rate = popularity.
        times = random.standard_exponential((shape.num_tokens, shape.num_experts), np.float32)
        times *= slowness[rank]
        if shape.top_k == shape.num_experts:
            counts[rank] = shape.num_tokens
            continue
        chosen = np.argpartition(times, shape.top_k - 1, axis=1)[:, : shape.top_k]
        counts[rank] = np.bincount(chosen.ravel(), minlength=shape.num_experts)
    return counts
