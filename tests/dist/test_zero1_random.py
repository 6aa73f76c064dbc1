"""Random models, bucket sizes, dtypes and options: ZeRO-1 is one-rank AdamW to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import ParamGradBuffer
from megacore.ops.optim import AdamWSettings, adamw_step_reference_
from megacore.optim import AdamW, DistributedOptimizer
from megacore.optim.options import OptimizerOptions
from megacore.parallel.param_info import ParamInfo
from tests.dist.test_distributed_optimizer import dp_groups
from tests.support.clipping import clip_coefficient
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 3
LR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random model and its options."""

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    grad_dtype: torch.dtype
    bucket_numel: int
    pad_for_ring: bool
    distributed: bool
    overlap: bool
    host_memory: bool
    clip_grad: float


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    shapes = tuple(
        tuple(rng.choice((1, 2, 7, 33, 64)) for _ in range(rng.choice((1, 1, 2))))
        for _ in range(rng.randint(1, 7))
    )
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return Case(
        seed=seed,
        shapes=shapes,
        dtype=dtype,
        grad_dtype=rng.choice((torch.float32, dtype)),
        bucket_numel=rng.choice((1, 100, 700, 10**6)),
        pad_for_ring=rng.random() < 0.1,
        distributed=rng.random() < 0.8,
        overlap=rng.random() < 0.5,
        host_memory=rng.random() < 0.6,
        clip_grad=rng.choice((0.0, 0.3)),
    )


def make_params(case: Case) -> list[tuple[ParamInfo, nn.Parameter]]:
    generator = torch.Generator().manual_seed(case.seed)
    params = []
    for number, shape in enumerate(case.shapes):
        info = ParamInfo(
            name=f"p{number}", full_shape=shape, tp_dim=None, weight_decay=len(shape) > 1
        )
        params.append((info, nn.Parameter(torch.randn(shape, generator=generator).to(case.dtype))))
    return params


def grad_of(case: Case, rank: int, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * case.seed + 100 * step + 10 * rank + number)
    return torch.randn(case.shapes[number], generator=generator).to(case.dtype)


class Model(nn.Module):
    """Owns all parameters; its forward pass gives each of them a known gradient."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        for number, param in enumerate(params):
            self.register_parameter(f"p{number}", param)

    def forward(self, grads: list[Tensor]) -> Tensor:
        terms = [(p * g).float().sum() for p, g in zip(self.parameters(), grads, strict=True)]
        return torch.stack(terms).sum()


def train(rank: int, world_size: int, seeds: list[int]) -> list[tuple[list[float], list[Tensor]]]:
    ways = {way: dp_groups(world_size, host_memory=way) for way in (True, False)}
    results = []
    for seed in seeds:
        case = make_case(seed)
        groups = ways[case.host_memory]
        params = make_params(case)
        buffer = ParamGradBuffer(
            params,
            dp_group=groups.dp_cp,
            bucket_numel=case.bucket_numel,
            pad_for_ring=case.pad_for_ring,
            grad_dtype=case.grad_dtype,
            distributed=case.distributed,
        )
        model = Model([param for _, param in params])
        options = OptimizerOptions(
            clip_grad=case.clip_grad,
            overlap="all" if case.overlap else "none",
            loss_scale=1.0,
        )
        optimizer = DistributedOptimizer(
            [buffer],
            groups=groups,
            options=options,
            modules=[model],
        )
        norms = []
        for step in range(STEPS):
            optimizer.zero_grads()
            loss = model([grad_of(case, rank, step, i) for i in range(len(params))])
            optimizer.before_backward(is_last=True)
            loss.backward()
            norms.append(optimizer.step(lr=LR).grad_norm)
        optimizer.finish_param_gather()
        results.append((norms, [param.detach().clone() for _, param in params]))
    return results


def train_alone(case: Case, world_size: int, norms: list[float]) -> list[Tensor]:
    options, adamw = OptimizerOptions(), AdamW()
    finals = []
    for number, (info, param) in enumerate(make_params(case)):
        main = param.detach().float().flatten()
        exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
        for step, norm in enumerate(norms):
            total = torch.zeros(param.shape)
            for rank in range(world_size):
                total += grad_of(case, rank, step, number).float()
            mean = (total / world_size).to(case.grad_dtype).float().flatten()
            settings = AdamWSettings(
                step=step + 1,
                lr=LR,
                beta1=adamw.beta1,
                beta2=adamw.beta2,
                eps=adamw.eps,
                weight_decay=options.weight_decay if info.weight_decay else 0.0,
                grad_scale=clip_coefficient(norm, max_norm=case.clip_grad),
            )
            adamw_step_reference_(main, mean, exp_avg, exp_avg_sq, settings)
        finals.append(main.to(case.dtype).view(param.shape))
    return finals


@pytest.mark.parametrize(
    ("world_size", "num_cases"),
    [(1, 30), (2, 30), (3, 20), (4, 10), (5, 8), (6, 5), (7, 5), (8, 5)],
)
def test_random_models_on_any_number_of_ranks(world_size: int, num_cases: int) -> None:
    seeds = [100 * world_size + number for number in range(num_cases)]
    by_rank = run_ranks(world_size, train, world_size, seeds, timeout_s=180)
    for index, seed in enumerate(seeds):
        case = make_case(seed)
        norms, _ = by_rank[0][index]
        expected = train_alone(case, world_size, norms)
        for rank in range(world_size):
            found_norms, found = by_rank[rank][index]
            assert found_norms == norms, case
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), case
