"""The CUDA optimizer step has the bits of its CPU twin, and neither waits nor allocates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.ops import cuda_kernels, has_cuda_kernels
from megacore.ops.optim import (
    AdamWSettings,
    StepRules,
    adamw_step_,
    adamw_step_reference_,
    decide_step_,
    sum_of_squares,
)
from megacore.optim import DistributedOptimizer
from megacore.optim.options import OptimizerOptions
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo
from tests.support.gpu import synchronising_is_an_error

pytestmark = pytest.mark.gpu

SETTINGS = AdamWSettings(step=3, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, grad_scale=0.7)


def tensors(numel: int) -> list[Tensor]:
    """Random param, grad, exp_avg and exp_avg_sq on the CPU, over many orders of magnitude."""
    random = torch.Generator().manual_seed(numel)
    made = [
        torch.randn(numel, generator=random)
        * 10.0 ** torch.randint(-8, 4, (numel,), generator=random)
        for _ in range(4)
    ]
    made[3].abs_()
    return made


def test_the_kernels_are_built_and_the_device_is_seen() -> None:
    assert has_cuda_kernels()
    assert cuda_kernels().device_count() == torch.cuda.device_count()


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 1023, 5_000_003])
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_the_cpu_step(
    numel: int, skew: int, copy: torch.dtype | None
) -> None:
    host = tensors(numel)
    device = []
    for tensor in host:  # a skew makes the kernel take its unaligned path
        storage = torch.empty(numel + skew, device="cuda")
        device.append(storage[skew:])
        device[-1].copy_(tensor)
    copies = [torch.zeros(numel, dtype=copy or torch.float32, device=d) for d in ("cpu", "cuda")]
    adamw_step_(*host, SETTINGS, copy_out=copies[0] if copy else None)
    adamw_step_(*device, SETTINGS, copy_out=copies[1] if copy else None)
    for a, b in zip(host, device, strict=True):
        assert torch.equal(a, b.cpu())
    assert torch.equal(copies[0], copies[1].cpu())


def test_the_reference_has_the_same_bits_on_the_gpu() -> None:
    kernel = [t.cuda() for t in tensors(10_001)]
    reference = [t.clone() for t in kernel]
    adamw_step_(*kernel, SETTINGS)
    adamw_step_reference_(*reference, SETTINGS)
    for a, b in zip(kernel, reference, strict=True):
        assert torch.equal(a, b)


def test_the_step_can_be_captured_and_does_not_wait() -> None:
    eager = [t.cuda() for t in tensors(4096)]
    captured = [t.clone() for t in eager]
    adamw_step_(*eager, SETTINGS)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        adamw_step_(*captured, SETTINGS)
    graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


def test_the_step_runs_on_the_current_stream() -> None:
    values = [t.cuda() for t in tensors(1 << 20)]
    expected = [t.clone() for t in values]
    adamw_step_(*expected, SETTINGS)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        values[1].mul_(0.0)
        adamw_step_(*values, SETTINGS)
    assert not stream.query()
    torch.cuda.synchronize()
    assert not torch.equal(values[0], expected[0])  # it saw the gradient after the sleep


def test_sum_of_squares_stays_on_the_device() -> None:
    values = torch.randn(100_003)
    on_device = values.cuda()
    with synchronising_is_an_error():
        total = sum_of_squares(on_device)
    assert total.device == on_device.device
    assert total.item() == pytest.approx(sum_of_squares(values).item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_on_the_gpu_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        weights = [nn.Parameter(torch.linspace(-1, 1, n).to(device, dtype)) for n in (300, 7)]
        infos = [
            ParamInfo(name=f"w{i}", full_shape=tuple(w.shape), tp_dim=None)
            for i, w in enumerate(weights)
        ]
        options, groups = OptimizerOptions(clip_grad=0.0), ProcessGroups.single()
        params = list(zip(infos, weights, strict=True))
        optimizer = DistributedOptimizer(
            make_buffers(params, groups=groups), groups=groups, options=options
        )
        for _ in range(3):
            optimizer.zero_grads()
            sum((w.float() * torch.arange(len(w), device=device)).sum() for w in weights).backward()  # type: ignore[union-attr]
            optimizer.step(lr=1e-2)
        found[device] = torch.cat([w.detach().cpu() for w in weights])
    assert torch.equal(found["cpu"], found["cuda"])


def test_a_step_is_decided_on_the_device_and_nothing_waits() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 4096, device="cuda", dtype=torch.float16))
    info = ParamInfo(name="w", full_shape=(4096,), tp_dim=None)
    options, groups = OptimizerOptions(loss_scale=8.0), ProcessGroups.single()
    buffers = make_buffers([(info, weight)], groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options)
    results, tokens = [], torch.ones((), device="cuda")
    for value in (1.0, float("inf"), 2.0):
        optimizer.zero_grads()
        buffers[0].grad_data.fill_(value)
        with synchronising_is_an_error():
            results.append(optimizer.step(lr=1e-3, num_tokens=tokens))
            optimizer.loss_scale_on_device()
    assert [result.skipped for result in results] == [False, True, False]
    assert results[0].grad_norm == pytest.approx(64.0 / 8.0)
    assert results[2].grad_norm == pytest.approx(2 * 64.0 / 4.0)
    assert optimizer.scalars() == {
        "step_count": 2, "num_skipped": 1, "loss_scale": 4.0, "loss_scale_good_steps": 1
    }  # fmt: skip


def test_decisions_have_the_bits_of_the_cpu() -> None:
    rules = StepRules(beta1=0.9, beta2=0.999, clip_grad=0.5, loss_scale_interval=3, num_averaged=4)
    found = {}
    for device in ("cpu", "cuda"):
        numbers = torch.tensor([0.0, 0.0, 16.0, 0.0, *6 * [0.0]]).double().to(device)
        state, control, history = numbers[:4], numbers[4:], []
        for step in range(50):
            sums = torch.tensor([step * 1.7, float(step % 7 == 3), 100.0 + step]).double()
            decide_step_(state, sums.to(device), control, rules)
            history.append(numbers.cpu().clone())
        found[device] = torch.stack(history).nan_to_num(nan=-1.0)
    assert torch.equal(found["cpu"], found["cuda"])
