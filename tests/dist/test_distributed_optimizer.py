"""ZeRO-1 on real gloo ranks: exactly one-rank AdamW, whatever the number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import ParamGradBuffer, make_buffers
from megacore.ops.optim import AdamWSettings, adamw_step_reference_
from megacore.optim import DistributedOptimizer, StepResult
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.param_info import ParamInfo
from megatrain.config import Config, OptimizerConfig, resolve
from tests.support.clipping import clip_coefficient
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

# Odd sizes: parameters cross shard borders, buckets, and leave ranks with padding only.
SHAPES = {"a": (37, 5), "b": (201,), "c": (3,), "d": (64, 9), "e": (1,)}
BUCKET_NUMEL = 300
NUM_STEPS = 4
LR = 1e-2


def make_params(dtype: torch.dtype) -> list[tuple[ParamInfo, nn.Parameter]]:
    random = torch.Generator().manual_seed(3)
    return [
        (
            ParamInfo(name=name, full_shape=shape, tp_dim=None, weight_decay=len(shape) > 1),
            nn.Parameter(torch.randn(shape, generator=random).to(dtype)),
        )
        for name, shape in SHAPES.items()
    ]


def local_grad(rank: int, step: int, param: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + param.numel())
    return torch.randn(param.shape, generator=random)


def backward(params: list[tuple[ParamInfo, nn.Parameter]], rank: int, step: int) -> None:
    """Give every parameter a known gradient through autograd."""
    terms = [(p.float() * local_grad(rank, step, p)).sum() for _, p in params]
    torch.stack(terms).sum().backward()


def make_optimizer(
    params: list[tuple[ParamInfo, nn.Parameter]], groups: ProcessGroups, **fields: Any
) -> DistributedOptimizer:
    section = OptimizerConfig(**{"clip_grad": 0.0, "bucket_numel": BUCKET_NUMEL, **fields})
    config = resolve(Config(optimizer=section), 1, vocab_size=256, cuda=False).optimizer
    buffers = make_buffers(params, groups=groups, options=config.buffer_options())
    return DistributedOptimizer(buffers, groups=groups, options=config.options())


def dp_groups(world_size: int, cp: int = 1, *, host_memory: bool = True) -> ProcessGroups:
    return ProcessGroups.create(Topology(world_size=world_size, cp=cp), host_memory=host_memory)


def train(
    rank: int, world_size: int, dtype: torch.dtype, fields: dict[str, Any], cp: int = 1
) -> tuple[list[Tensor], list[float]]:
    """Parameters and gradient norms after a few steps of data-parallel training."""
    params = make_params(dtype)
    optimizer = make_optimizer(params, dp_groups(world_size, cp), **fields)
    norms = []
    for step in range(NUM_STEPS):
        optimizer.zero_grads()
        backward(params, rank, step)
        norms.append(optimizer.step(lr=LR).grad_norm)
    return [p.detach().clone() for _, p in params], norms


def train_alone(
    world_size: int, dtype: torch.dtype, norms: list[float], fields: dict[str, Any]
) -> list[Tensor]:
    """Do the same on one rank: AdamW in plain torch, fed the mean of all ranks' gradients."""
    config = OptimizerConfig(**{"clip_grad": 0.0, **fields})
    params = make_params(dtype)
    mains = [p.detach().float().flatten() for _, p in params]
    moments = [(torch.zeros_like(main), torch.zeros_like(main)) for main in mains]
    for step, norm in enumerate(norms):
        for (info, param), main, (exp_avg, exp_avg_sq) in zip(params, mains, moments, strict=True):
            total = torch.zeros(param.shape)
            for rank in range(world_size):
                # In the parameters' dtype, as autograd delivers it.
                total += local_grad(rank, step, param).to(dtype)
            settings = AdamWSettings(
                step=step + 1,
                lr=LR,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                weight_decay=config.weight_decay if info.weight_decay else 0.0,
                grad_scale=clip_coefficient(norm, max_norm=config.clip_grad),
            )
            mean = (total / world_size).flatten()
            adamw_step_reference_(main, mean, exp_avg, exp_avg_sq, settings)
    return [
        main.to(dtype).view(param.shape) for main, (_, param) in zip(mains, params, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_zero1_is_exactly_one_rank_adamw(world_size: int, dtype: torch.dtype) -> None:
    results = run_ranks(world_size, train, world_size, dtype, {"weight_decay": 0.2})
    norms = results[0][1]
    expected = train_alone(world_size, dtype, norms, {"weight_decay": 0.2})
    for params, found_norms in results:
        assert found_norms == norms
        for found, wanted in zip(params, expected, strict=True):
            assert torch.equal(found, wanted)


def test_context_parallel_ranks_share_the_state_too() -> None:
    plain = run_ranks(4, train, 4, torch.float32, {})
    with_cp = run_ranks(4, train, 4, torch.float32, {}, 2)
    for (params, norms), (expected, expected_norms) in zip(with_cp, plain, strict=True):
        assert norms == expected_norms
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


def test_clipping_uses_the_norm_of_the_mean_gradient() -> None:
    world_size, fields = 4, {"clip_grad": 0.5}
    results = run_ranks(world_size, train, world_size, torch.float32, fields)
    params, norms = results[3]
    for step, norm in enumerate(norms):
        means = [
            sum(local_grad(rank, step, p) for rank in range(world_size)) / world_size
            for _, p in make_params(torch.float32)
        ]
        flat = torch.cat([mean.flatten() for mean in means]).double()  # type: ignore[union-attr]
        assert norm == pytest.approx(flat.norm().item(), rel=1e-6)
    expected = train_alone(world_size, torch.float32, norms, fields)
    for found, wanted in zip(params, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharding_changes_no_bit(dtype: torch.dtype) -> None:
    fields = {"clip_grad": 0.5}
    sharded = run_ranks(3, train, 3, dtype, fields | {"num_instances": 1})
    whole = run_ranks(3, train, 3, dtype, fields | {"distributed": False})
    for (params_a, norms_a), (params_b, norms_b) in zip(sharded, whole, strict=True):
        assert norms_a == norms_b
        for a, b in zip(params_a, params_b, strict=True):
            assert torch.equal(a, b)


def skip_together(rank: int) -> tuple[StepResult, int, int, bool]:
    params = make_params(torch.float32)
    optimizer = make_optimizer(params, dp_groups(2))
    before = [p.detach().clone() for _, p in params]
    backward(params, rank, 0)
    if rank == 1:
        optimizer.buffers[0].main_grad(4)[0] = math.nan
    result = optimizer.step(lr=LR, extra=torch.tensor([1.0, float(rank)]))
    same = all(torch.equal(a, p) for a, (_, p) in zip(before, params, strict=True))
    optimizer.zero_grads()
    backward(params, rank, 1)
    assert not optimizer.step(lr=LR).skipped
    return result, optimizer.num_skipped, optimizer.step_count, same


def test_a_nan_on_one_rank_makes_every_rank_skip_and_count() -> None:
    for result, num_skipped, step_count, same in run_ranks(2, skip_together):
        assert result.skipped
        assert math.isnan(result.grad_norm)
        assert result.extra.tolist() == [2.0, 1.0]
        assert (num_skipped, step_count, same) == (1, 1, True)


def resume(rank: int, dtype: torch.dtype, distributed: bool) -> tuple[list[Tensor], list[Tensor]]:
    groups = dp_groups(2)
    params, fresh = make_params(dtype), make_params(dtype)
    optimizer = make_optimizer(params, groups, distributed=distributed)
    for step in range(2):
        optimizer.zero_grads()
        backward(params, rank, step)
        optimizer.step(lr=LR)
    for _, param in fresh:
        param.data.fill_(9.0)
    other = make_optimizer(fresh, groups, distributed=distributed)
    for ours, theirs in zip(optimizer.pieces(), other.pieces(), strict=True):
        for kind, values in ours.tensors.items():
            theirs.tensors[kind].copy_(values)
    other.finish_load(optimizer.step_count)
    loaded = [p.detach().clone() for _, p in fresh]
    assert all(torch.equal(a, p) for a, (_, p) in zip(loaded, params, strict=True))
    for twin, opt in ((params, optimizer), (fresh, other)):
        opt.zero_grads()
        backward(twin, rank, 2)
        opt.step(lr=LR)
    return [p.detach() for _, p in params], [p.detach() for _, p in fresh]


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moved_through_pieces_continues_to_the_bit(
    dtype: torch.dtype, distributed: bool
) -> None:
    for ours, theirs in run_ranks(2, resume, dtype, distributed):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def pieces_of(_rank: int, distributed: bool) -> list[tuple[str, int, int]]:
    optimizer = make_optimizer(make_params(torch.float32), dp_groups(4), distributed=distributed)
    return [(piece.info.name, piece.start, piece.end) for piece in optimizer.pieces()]


def test_pieces_of_all_ranks_cover_each_parameter_once() -> None:
    pieces = [piece for rank in run_ranks(4, pieces_of, True) for piece in rank]
    for name, shape in SHAPES.items():
        covered = 0
        for _, start, end in sorted(piece for piece in pieces if piece[0] == name):
            assert start == covered
            covered = end
        assert covered == math.prod(shape)
    everything = {(name, 0, math.prod(shape)) for name, shape in SHAPES.items()}
    assert all(set(rank) == everything for rank in run_ranks(4, pieces_of, False))


def norm_over_tp(rank: int) -> tuple[float, Tensor, Tensor]:
    """tp 2: one split parameter, one replicated, one replicated under sequence parallelism."""
    groups = ProcessGroups.create(Topology(world_size=2, tp=2))
    split, copied, partial = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    infos = [
        ParamInfo(name="split", full_shape=(4,), tp_dim=0),
        ParamInfo(name="copied", full_shape=(2,), tp_dim=None),
        ParamInfo(name="partial", full_shape=(2,), tp_dim=None, sequence_parallel=True),
    ]
    params = list(zip(infos, (split, copied, partial), strict=True))
    optimizer = make_optimizer(params, groups)
    buffer, partials = optimizer.buffers
    buffer.main_grad(0).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]][rank]))
    buffer.main_grad(1).copy_(torch.tensor([5.0, 6.0]))
    partials.main_grad(0).copy_(torch.tensor([[1.0, 0.0], [2.0, 4.0]][rank]))
    norm = optimizer.step(lr=LR).grad_norm
    return norm, partials.main_grad(0).clone(), partial.detach()


def test_norm_counts_tensor_parallel_replicas_once() -> None:
    expected = math.sqrt(1 + 4 + 9 + 16 + 25 + 36 + 3**2 + 4**2)
    results = run_ranks(2, norm_over_tp)
    for norm, summed, param in results:
        assert norm == pytest.approx(expected, rel=1e-12)
        assert summed.tolist() == [3.0, 4.0]
        assert torch.equal(param, results[0][2])


def tied_over_pp(_rank: int) -> tuple[float, Tensor]:
    """pp 2, dp 2: the embedding lives on the first and on the last stage."""
    groups = ProcessGroups.create(Topology(world_size=4, pp=2))
    last = groups.pp.position == 1
    info = ParamInfo(
        name="embedding", full_shape=(2,), tp_dim=None, shared="embedding", is_shared_copy=last
    )
    other = ParamInfo(name=f"stage{last}", full_shape=(1,), tp_dim=None)
    weight, alone = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    optimizer = make_optimizer([(info, weight), (other, alone)], groups)
    scale = 1.0 + 2.0 * groups.dp.position  # the mean over dp is twice the value on dp 0
    ((weight * torch.tensor([1.0, 3.0]) * (2 if last else 1)).sum() * scale).backward()
    (alone * scale).sum().backward()
    return optimizer.step(lr=LR).grad_norm, weight.detach()


def test_tied_embeddings_stay_equal_and_count_once() -> None:
    results = run_ranks(4, tied_over_pp)
    for norm, weight in results:
        # Embedding: (1 + 2) * (1, 3) * 2; two other parameters with a mean gradient of 2.
        assert norm == pytest.approx(math.sqrt(6**2 + 18**2 + 2 * 2**2), rel=1e-12)
        assert torch.equal(weight, results[0][1])


def expert_mean(rank: int) -> Tensor:
    groups = ProcessGroups.create(Topology(world_size=4, ep=2))
    expert = nn.Parameter(torch.zeros(2))
    info = ParamInfo(name="expert", full_shape=(2,), tp_dim=None, expert=True)
    buffers = make_buffers([(info, expert)], groups=groups)
    buffers[0].main_grad(0).fill_(float(1 + rank))
    buffers[0].reduce_scatter_grads()
    start, end = buffers[0].plan.shard_range(0, dp_rank=groups.expert_dp.position)
    return buffers[0].grad_data[start:end][:2]


def test_expert_gradients_are_a_mean_over_all_ranks_tokens() -> None:
    # With ep 2, ranks 0 and 2 hold one expert, 1 and 3 the other; each gradient already sums the
    # tokens of two ranks, so the mean over four ranks divides by four.
    results = run_ranks(4, expert_mean)
    assert results[0].tolist() == [1.0, 1.0]
    assert results[1].tolist() == [1.5, 1.5]


def bfloat16_grads(rank: int) -> tuple[Tensor, Tensor]:
    groups = dp_groups(2)
    params = make_params(torch.bfloat16)
    buffer = ParamGradBuffer(params, dp_group=groups.dp_cp, grad_dtype=torch.bfloat16)
    backward(params, rank, 0)
    buffer.reduce_scatter_grads()
    start, end = buffer.plan.shard_range(0, dp_rank=rank)
    expected = torch.zeros(buffer.plan.numel)
    for index, (_, param) in enumerate(params):
        first, last = buffer.plan.param_range(index)
        both = [local_grad(r, 0, param).bfloat16().float().flatten() for r in range(2)]
        expected[first:last] = (both[0] + both[1]) / 2
    return buffer.grad_data[start:end].clone(), expected[start:end].bfloat16()


def test_bfloat16_gradients_are_averaged_in_fp32_and_rounded_once() -> None:
    for found, expected in run_ranks(2, bfloat16_grads):
        assert torch.equal(found, expected)


def uneven(rank: int) -> list[str]:
    params = make_params(torch.float32)
    optimizer = make_optimizer(params, dp_groups(2))
    (params[1][1] * 2).sum().backward()
    if rank == 0:
        (params[0][1] * 4).sum().backward()
    missing = optimizer.buffers[0].missing_grads()
    norm = optimizer.step(lr=LR).grad_norm
    assert norm == pytest.approx(math.sqrt(37 * 5 * 2**2 + 201 * 2**2), rel=1e-12)
    return missing


def test_a_gradient_missing_on_one_rank_counts_as_zero() -> None:
    missing = run_ranks(2, uneven)
    assert missing == [["c", "d", "e"], ["a", "c", "d", "e"]]
