"""Kernels of norms, rotation and router against float64 and the CPU, into poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.ops import has_cuda_kernels
from megacore.ops.activations import swiglu
from megacore.ops.dense import add_rms_norm, rms_norm, rms_norm_reference
from megacore.ops.dropout import counter_dropout
from megacore.ops.linear import add_weight_grad_
from megacore.ops.normed_rotation import norm_and_rotate
from megacore.ops.rotation import split_and_rotate
from megacore.ops.routing import RouterLosses, has_kernel, route
from tests.support.gpu import capture, poisoned_memory, synchronising_is_an_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda_kernels(), reason="built without CUDA kernels"),
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Largest error relative to the largest element: one rounding, and sums of a few rounded terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    assert torch.isfinite(found).all()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    worst = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert worst <= tolerance * max(scale, 1e-30), f"off by {worst:.3g}, scale {scale:.3g}"


def gradients(run: Any, leaves: list[Tensor], seed: int = 9) -> list[Tensor]:
    """Results, then gradients of all leaves for random gradients of the results."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    results = [y for y in run(*leaves) if y.is_floating_point() and y.requires_grad]
    random = torch.Generator().manual_seed(seed)
    grads = [torch.randn(y.shape, generator=random).to(y.device, y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "width"), [(0, 64), (1, 8), (700, 128), (33, 1032), (5000, 2048), (300, 7168)]
)
def test_norms_and_their_gradients(rows: int, width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(rows, width, generator=random)).to(dtype)
    weight = (1 + torch.randn(width, generator=random)).to(dtype)
    with poisoned_memory(), synchronising_is_an_error():
        leaves = [x.to("cuda", non_blocking=True), weight.to("cuda", non_blocking=True)]
        found = gradients(lambda x, w: [rms_norm(x, w, 1e-5)], leaves)
    exact = gradients(
        lambda x, w: [rms_norm_reference(x, w, 1e-5)[0]], [x.double(), weight.double()]
    )
    for part, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert_close(a, b, TOLERANCE[dtype] * (4 if part == 2 else 2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [128, 1032, 16384])
def test_norms_with_the_sum_before_them_have_the_bits_of_both(
    width: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(width)
    shapes = [(300, width), (300, width), (width,)]
    leaves = [torch.randn(shape, generator=random).to("cuda", dtype) for shape in shapes]

    def in_turn(x: Tensor, added: Tensor, weight: Tensor) -> list[Tensor]:
        total = x + added
        return [total, rms_norm(total, weight, 1e-5)]

    with poisoned_memory():
        found = gradients(lambda x, added, w: add_rms_norm(x, added, w, 1e-5), leaves)
    for a, b in zip(found, gradients(in_turn, leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_rotated"), [((2, 4), 128, 128), ((1, 1), 64, 32), ((3, 2), 6, 4)]
)
@pytest.mark.parametrize("per_sample", [False, True])
def test_rotation_and_its_gradient(
    heads: tuple[int, int], head_dim: int, num_rotated: int, per_sample: bool, dtype: torch.dtype
) -> None:
    groups, q_per_kv = heads
    random = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(37, 3, groups, (q_per_kv + 2) * head_dim, generator=random).to(dtype)
    positions = (37, 3) if per_sample else (37,)
    angles = torch.randn(*positions, num_rotated // 2, generator=random)
    cos, sin = angles.cos(), angles.sin()
    with poisoned_memory():
        tables = cos.cuda(), sin.cuda()
        found = gradients(lambda x: split_and_rotate(x, *tables, head_dim=head_dim), [qkv.cuda()])
    exact = gradients(
        lambda x: split_and_rotate(x, cos.double(), sin.double(), head_dim=head_dim),
        [qkv.double()],
    )
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_rotated"),
    [((2, 4), 128, 128), ((1, 1), 64, 32), ((1, 3), 96, 96), ((3, 2), 6, 4), ((1, 2), 512, 512)],
)
def test_rotation_behind_norms_and_its_gradients(
    heads: tuple[int, int], head_dim: int, num_rotated: int, dtype: torch.dtype
) -> None:
    groups, q_per_kv = heads
    random = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(37, 3, groups, (q_per_kv + 2) * head_dim, generator=random).to(dtype)
    weights = [(1 + torch.randn(head_dim, generator=random)).to(dtype) for _ in range(2)]
    angles = torch.randn(37, num_rotated // 2, generator=random)
    tables = angles.cos(), angles.sin()

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        on = [table.to(leaves[0].device) for table in tables]
        return norm_and_rotate(*leaves, *on, head_dim=head_dim, eps=1e-5)

    with poisoned_memory():
        found = gradients(run, [leaf.cuda() for leaf in (qkv, *weights)])
    exact = gradients(run, [leaf.double() for leaf in (qkv, *weights)])
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b, 8 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [7, 1024])
def test_dropout_has_the_bits_of_the_cpu(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(65, 3, width).to(dtype)
    ids, positions, key = torch.tensor([2**40, 0, 7]), torch.arange(40, 105), torch.tensor(-5)

    def run(x: Tensor) -> list[Tensor]:
        on = [each.to(x.device) for each in (ids, positions)]
        return [counter_dropout(x, *on, key=key.to(x.device), p=0.3)]

    with poisoned_memory():
        found = gradients(run, [x.cuda()])
    for a, b in zip(found, gradients(run, [x]), strict=True):
        assert torch.equal(a.cpu(), b)


ROUTERS = {
    "softmax": {"is_sigmoid": False, "softmax_after_top_k": False, "normalize": True},
    "plain": {"is_sigmoid": False, "softmax_after_top_k": False, "normalize": False},
    "sigmoid": {"is_sigmoid": True, "softmax_after_top_k": False, "normalize": True},
    "after": {"is_sigmoid": False, "softmax_after_top_k": True, "normalize": False},
}


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "pools"),
    [(0, 8, 2, 1), (1, 8, 2, 1), (2048, 64, 6, 4), (4096, 256, 8, 1), (96, 1000, 32, 96)],
)
def test_routers_and_their_gradients(
    kind: str, tokens: int, experts: int, k: int, pools: int
) -> None:
    random = torch.Generator().manual_seed(experts)
    logits = 2 * torch.randn(tokens, experts, generator=random)
    bias = 0.1 * torch.randn(experts, generator=random)
    rule = {"top_k": k, "num_pools": pools, "scaling": 2.5, **ROUTERS[kind]}
    assert has_kernel(logits.cuda(), k, pools)
    scales = {"aux_scale": 0.5, "z_scale": 0.25, "aux_slope": 2.0, "z_slope": 0.125}
    seen = [torch.ones(experts, dtype=torch.int64, device=device) for device in ("cpu", "cuda")]
    on_host = route(logits, bias, None, losses=RouterLosses(**scales), seen=seen[0], **rule)
    with poisoned_memory():
        on_device = route(logits.cuda(), bias.cuda(), None, **rule)
        again = route(
            logits.cuda(),
            None,
            on_host[1].cuda(),
            losses=RouterLosses(**scales),
            seen=seen[1],
            **rule,
        )
    # Where two scores differ in the last bit only, each may choose another expert.
    same = (on_device[1].cpu() == on_host[1]).all(1)
    assert same.float().mean() > 0.99 or tokens == 0
    assert torch.equal(again[1].cpu(), on_host[1])
    assert torch.equal(again[2][0].cpu(), on_host[2][0])
    assert torch.equal(seen[1].cpu(), seen[0])
    for index in (0, 2, 3):
        assert_close(again[index], on_host[index], 1e-5)
    chosen, factors = on_host[1], torch.rand(pools, generator=random)

    def run(x: Tensor) -> list[Tensor]:
        losses = RouterLosses(aux_factor=factors.to(x.device), z_factor=0.5, **scales)
        return [route(x, None, chosen.to(x.device), losses=losses, **rule).probs]

    for a, b in zip(gradients(run, [logits.cuda()]), gradients(run, [logits]), strict=True):
        assert_close(a, b, 2e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_swiglu_is_the_kernel(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 2 * 264).to(dtype)
    found = gradients(lambda x: [swiglu(x)], [x.cuda()])
    for a, b in zip(found, gradients(lambda x: [swiglu(x)], [x.double()]), strict=True):
        assert_close(a, b, 4 * TOLERANCE[dtype])


def test_a_captured_layer_follows_changing_inputs() -> None:
    x = torch.randn(64, 2, 4 * 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(64, 64, device="cuda")
    tables = angles.cos(), angles.sin()

    def run() -> tuple[Tensor, ...]:
        normed = rms_norm(x, weight, 1e-5)
        heads = split_and_rotate(normed.view(64, 2, 1, 512), *tables, head_dim=128)
        logits = normed.flatten(0, 1)[:, :64].float()
        losses = RouterLosses(aux_scale=0.5, z_scale=0.25)
        return (*heads, *route(logits, top_k=4, num_pools=1, scaling=1.0, losses=losses,
                               **ROUTERS["softmax"]))  # fmt: skip

    graph, outputs = capture(run)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        expected = run()
        graph.replay()
        for found, exact in zip(outputs, expected, strict=True):
            assert torch.equal(found, exact)


@pytest.mark.real_gpu  # a product of torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 16, 8), (1, 8, 16), (300, 1, 64), (300, 200, 136)])
def test_weight_gradients_are_added_in_float32(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, outputs, inputs = shape
    torch.manual_seed(0)
    grad = torch.randn(rows, outputs, device="cuda").to(dtype)
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    before = torch.randn(outputs, inputs, device="cuda") * 100
    main_grad = before.clone()
    add_weight_grad_(main_grad, grad, x)  # fills the workspace of cuBLAS
    main_grad.copy_(before)
    with synchronising_is_an_error():
        add_weight_grad_(main_grad, grad, x)
    expected = before.double() + grad.double().t() @ x.double()
    is_rounded = outputs == 1
    tolerance = 0.5 if is_rounded else 1e-3
    torch.testing.assert_close(main_grad.double(), expected, rtol=1e-6, atol=tolerance)
