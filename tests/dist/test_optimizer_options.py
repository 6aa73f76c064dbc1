"""Hybrid sharding, scaling before sums, float16 with loss scaling, bfloat16 moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.errors import ConfigError
from megacore.optim import DistributedOptimizer, ParamGroup
from megacore.optim.options import OptimizerOptions
from megacore.optim.param_group import check_patterns
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.instances import HybridShardGroups
from megatrain.config import OptimizerConfig
from megatrain.train.trainer import build_trainer
from tests.dist.test_distributed_optimizer import backward, dp_groups, make_params
from tests.dist.test_invariance import make_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

SMALL = {"optimizer.bucket_numel": 2000}
OVERLAP = {"optimizer.overlap": "all"}


def train(
    _rank: int, world_size: int, steps: int, changes: dict[str, Any]
) -> tuple[list[float], list[float], int]:
    config = make_config(world_size, {**SMALL, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    metrics = [trainer.train_step(step) for step in range(steps)]
    losses = [step.loss for step in metrics] + [trainer.mean_validation_loss(trainer.evaluate())]
    return losses, [step.grad_norm for step in metrics], trainer.optimizer.state_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.num_instances": 2},
        {"optimizer.average_in_collective": False},
        {
            "parallel.cp": 2,
            "optimizer.num_instances": 4,
            "optimizer.average_in_collective": False,
        },
    ],
)
def test_other_orders_of_sums_give_the_same_losses(changes: dict[str, Any]) -> None:
    [plain, *_] = run_ranks(4, train, 4, 6, {}, timeout_s=120)
    results = run_ranks(4, train, 4, 6, changes, timeout_s=120)
    overlapped = run_ranks(4, train, 4, 6, {**changes, **OVERLAP}, timeout_s=120)
    assert results == overlapped
    for losses, norms, _ in results:
        assert losses == pytest.approx(plain[0], rel=1e-5)
        assert norms == pytest.approx(plain[1], rel=1e-4)
    instances = changes.get("optimizer.num_instances", 1)
    assert results[0][2] == pytest.approx(plain[2] * instances, rel=0.1)


def test_powers_of_two_may_be_divided_before_or_after_the_sum() -> None:
    before = run_ranks(2, train, 2, 3, {"optimizer.average_in_collective": False})
    assert before == run_ranks(2, train, 2, 3, {})


def pieces(_rank: int) -> tuple[list[tuple[str, int, int]], list[Tensor]]:
    groups = dp_groups(4)
    params = make_params(torch.float32)
    instances = HybridShardGroups.split(groups, 2)
    buffers = make_buffers(
        params,
        groups=groups,
        options=BufferOptions(bucket_numel=300),
        instances=instances,
    )
    optimizer = DistributedOptimizer(buffers, groups=groups)
    backward(params, groups.rank, 0)
    optimizer.step(lr=0.1)
    found = [(piece.info.name, piece.start, piece.end) for piece in optimizer.pieces()]
    return found, [param.detach() for _, param in params]


def test_instances_hold_equal_state_and_equal_weights() -> None:
    results = run_ranks(4, pieces)
    assert results[0][0] == results[2][0] != results[1][0] == results[3][0]
    for _, params in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, results[0][1], strict=True))


def bad_split(_rank: int) -> str:
    try:
        HybridShardGroups.split(dp_groups(2), 3)
    except ConfigError as error:
        return str(error)
    return ""


def test_instances_must_divide_the_data_parallel_ranks() -> None:
    assert all("must divide the 2" in message for message in run_ranks(2, bad_split))
    with pytest.raises(ConfigError, match=r"num_instances = 3 .* does not divide 4, .*dp 4"):
        make_config(4, {"optimizer.num_instances": 3})
    with pytest.raises(ConfigError, match="num_instances must be a valid integer, got 'each'"):
        OptimizerConfig(num_instances="each")  # type: ignore[arg-type]


def test_float16_learns_what_float32_learns() -> None:
    steps = 12
    whole, _, _ = train(0, 1, steps, {})
    for changes in ({}, OVERLAP):
        # The first scale overflows: the steps that are skipped are the same on every rank.
        half = run_ranks(2, train, 2, steps, {"train.dtype": "float16", **changes}, timeout_s=120)
        assert repr(half[0]) == repr(half[1])  # norms of skipped steps are NaN
        assert half[0][0][-1] < half[0][0][0] - 0.2
        assert half[0][0][-1] == pytest.approx(whole[-1], rel=0.1)


def scaled(_rank: int) -> tuple[list[bool], list[float], int, list[Tensor], list[Tensor]]:
    params = make_params(torch.float16)
    groups = dp_groups(2)
    options = OptimizerOptions(clip_grad=0.0, loss_scale=2.0**24, loss_scale_interval=2)
    buffers = make_buffers(params, groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options)
    before = [param.detach().clone() for _, param in params]
    skipped, scales, frozen = [], [], before
    for _ in range(14):
        optimizer.zero_grads()
        loss = sum((param.float() * 0.5).sum() for _, param in params)
        assert isinstance(loss, Tensor)
        (loss * optimizer.loss_scale).backward()
        scales.append(optimizer.loss_scale)
        result = optimizer.step(lr=0.0)
        skipped.append(result.skipped)
        if not result.skipped:
            numel = sum(param.numel() for _, param in params)
            assert result.grad_norm == pytest.approx(0.5 * numel**0.5, rel=1e-6)
    return skipped, scales, optimizer.num_skipped, frozen, [p.detach() for _, p in params]


def test_loss_scale_halves_until_gradients_fit_and_grows_again() -> None:
    for skipped, scales, num_skipped, before, after in run_ranks(2, scaled):
        # 0.5 * 2^k overflows float16 from k = 17 on.
        assert scales[:9] == [2.0**k for k in (24, 23, 22, 21, 20, 19, 18, 17, 16)]
        assert skipped[:9] == [True] * 8 + [False]
        assert scales[9:] == [2.0**k for k in (16, 17, 16, 16, 17)]
        assert num_skipped == sum(skipped) == 10
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bfloat16_moments_take_half_the_memory_and_learn_the_same() -> None:
    whole = train(0, 1, 12, {})
    short = train(0, 1, 12, {"optimizer.moments_dtype": "bfloat16"})
    assert short[2] * 2 == whole[2]
    assert short[0] == pytest.approx(whole[0], rel=2e-2)
    assert short[0] != whole[0]


def test_one_process_alone_needs_no_groups() -> None:
    assert HybridShardGroups.split(ProcessGroups.single(), 1).dense_across.size == 1


def test_gradients_in_the_format_of_the_parameters() -> None:
    bf16 = {"train.dtype": "bfloat16"}
    narrow = {**bf16, "optimizer.grad_dtype": "param_fp32_sum"}
    [plain, *_] = run_ranks(2, train, 2, 5, bf16, timeout_s=120)
    results = run_ranks(2, train, 2, 5, narrow, timeout_s=120)
    overlapped = run_ranks(2, train, 2, 5, {**narrow, **OVERLAP}, timeout_s=120)
    over_gloo = run_ranks(
        2, train, 2, 5, {**narrow, **OVERLAP, "run.host_memory": False}, timeout_s=120
    )
    assert results == overlapped == over_gloo
    assert results[0][0] == pytest.approx(plain[0], rel=2e-2)
    assert results[0][0] != plain[0]  # rounded gradients leave a trace


def patterns_of_two_ranks(rank: int) -> str:
    groups = ProcessGroups.create(Topology(world_size=2, pp=2))
    mine = [f"layers.{rank}.mlp.up"]
    check_patterns([ParamGroup(pattern="layers.1.*")], mine, groups)
    with pytest.raises(ValueError, match="matches none") as caught:
        check_patterns([ParamGroup(pattern="layers.2.*")], mine, groups)
    return str(caught.value)


def test_a_pattern_may_match_on_another_rank_only() -> None:
    first, second = run_ranks(2, patterns_of_two_ranks)
    assert first == second
    assert "none of the 2 parameters" in first
