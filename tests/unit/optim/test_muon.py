"""Muon on one process: tables of others, torch.optim.Muon, and the parts of fused matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.optim import (
    AdamW,
    DistributedOptimizer,
    Muon,
    OptimizerOptions,
    ParamGroup,
    UpdateRule,
)
from megacore.optim import newton_schulz as newton_schulz_module
from megacore.optim.newton_schulz import CutMatrix, orthogonalize
from megacore.optim.rules.muon import CoefficientSet, Scale
from megacore.parallel import Group, Matrices, ParamInfo, ProcessGroups

# Singular values 1.644853, 1.284417, 0.380436.
G = torch.tensor(
    [[((5 * i * i + 3 * j + 2 * i * j) % 7 - 3) / 4 for j in range(4)] for i in range(3)]
)
LR, DECAY = 0.02, 0.1


def newton_schulz(matrix: Tensor, rule: Muon) -> Tensor:
    rows, columns = matrix.shape
    whole = CutMatrix(values=matrix, rows=rows, columns=columns, cut=None)
    dtype = torch.bfloat16 if rule.precision == "bfloat16" else torch.float32
    [found] = orthogonalize([whole], rule.iterations, group=Group.solo(), dtype=dtype)
    return found


# First row and singular values, computed with NVIDIA's Emerging-Optimizers in fp32.
@pytest.mark.parametrize(
    ("coefficients", "steps", "row", "values"),
    [
        ("simple", 5, (-0.75688, -0.15884, 0.439199, 0.214421), (1.071483, 1.001826, 0.743548)),
        ("quintic", 5, (-0.778892, -0.086045, 0.606802, 0.228522), (1.025728, 1.013949, 1.009589)),
        (
            *("deepseekv4", 10),
            (-0.768466, -0.088373, 0.591719, 0.227778),
            (1.000209, 1.000184, 1.000105),
        ),
        ("polar_express", 5, (-0.769984, -0.057448, 0.655087, 0.133028), (1.1234, 1.1105, 0.8767)),
        ("polar_express", 8, (-0.768337, -0.088364, 0.591609, 0.227704), (1.0, 1.0, 1.0)),
        ("cubic5", 5, (-0.891688, -0.159258, 0.57317, 0.213353), (1.29755, 1.122527, 0.971364)),
    ],
)
def test_iterations_have_the_published_values(
    coefficients: CoefficientSet, steps: int, row: tuple[float, ...], values: tuple[float, ...]
) -> None:
    rule = Muon(coefficients=coefficients, steps=steps)
    found = newton_schulz(G, rule)
    torch.testing.assert_close(found[0], torch.tensor(row), rtol=0, atol=1e-5)
    tolerance = 1e-5 if coefficients != "polar_express" else 6e-5
    singular = torch.linalg.svdvals(found)
    torch.testing.assert_close(singular, torch.tensor(values), rtol=0, atol=tolerance)
    assert torch.equal(newton_schulz(G.t(), rule), found.t())


@pytest.mark.parametrize("shape", [(6, 6), (5, 40), (64, 24)])
@pytest.mark.parametrize("coefficients", ["deepseekv4", "polar_express"])
def test_singular_values_become_one_and_vectors_stay(
    shape: tuple[int, int], coefficients: CoefficientSet
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    found = newton_schulz(1e-4 * matrix, Muon(coefficients=coefficients, steps=14))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(found, left @ right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("shape", [(37, 50), (50, 37), (41, 41)])
def test_equal_blocks_that_are_computed_once_change_no_result(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    whole = newton_schulz(matrix, Muon())
    monkeypatch.setattr(newton_schulz_module, "_LEAST_HALVED", 8)
    torch.testing.assert_close(newton_schulz(matrix, Muon()), whole, rtol=0, atol=2e-6)
    product, plus = torch.empty(37, 37), torch.eye(37)
    newton_schulz_module._times_transposed(matrix[:37], out=product, plus=plus, beta=2, alpha=3)
    expected = 2 * plus + 3 * matrix[:37] @ matrix[:37].t()
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(newton_schulz(torch.zeros(3, 4), Muon()), torch.zeros(3, 4))


def optimizer_of(
    rule: UpdateRule, named: list[tuple[ParamInfo, nn.Parameter]]
) -> DistributedOptimizer:
    groups = ProcessGroups.single()
    buffers = make_buffers(named, groups=groups, options=BufferOptions(bucket_numel=30))
    options = OptimizerOptions(rule=rule, clip_grad=0.0, weight_decay=DECAY)
    return DistributedOptimizer(buffers, groups=groups, options=options)


def two_steps(rule: Muon, start: Tensor, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    param = nn.Parameter(start.clone())
    info = ParamInfo(name="w", full_shape=tuple(start.shape), tp_dim=None, matrices=Matrices())
    optimizer = optimizer_of(rule, [(info, param)])
    found = []
    for grad in grads:
        optimizer.zero_grads()
        (param * grad).sum().backward()
        optimizer.step(lr=LR)
        found.append(param.detach().clone())
    return found


START = torch.cos(0.7 * torch.arange(12)).view(3, 4)
GRADS = (G, 0.5 * G.flatten().roll(1).view(3, 4))


# Computed with NVIDIA's Emerging-Optimizers in fp32: row 0 after each of two steps, and of the
# transposed problem after one.
@pytest.mark.parametrize(
    ("scale", "first", "second", "tall"),
    [
        (
            "original",
            (1.013138, 0.766489, 0.160843, -0.508125),
            (1.011312, 0.780646, 0.15315, -0.517339),
            (1.015479, -0.940206, 0.761058),
        ),
        (
            "match_rms_adamw",
            (1.004055, 0.764583, 0.166114, -0.505552),
            (1.002127, 0.76933, 0.162833, -0.508633),
            (1.004055, -0.940292, 0.769526),
        ),
        (
            "spectral",
            (1.028275, 0.769666, 0.152059, -0.512413),
            (1.02662, 0.799506, 0.137012, -0.53185),
            (1.028275, -0.940109, 0.751572),
        ),
        (
            "unit_rms_norm",
            (1.01111, 0.766064, 0.16202, -0.50755),
            (1.009261, 0.778119, 0.155312, -0.515395),
            (1.015479, -0.940206, 0.761058),
        ),
    ],
)
def test_two_steps_have_the_published_values(
    scale: Scale, first: tuple[float, ...], second: tuple[float, ...], tall: tuple[float, ...]
) -> None:
    found = two_steps(Muon(scale=scale), START, GRADS)
    torch.testing.assert_close(found[0][0], torch.tensor(first), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1][0], torch.tensor(second), rtol=0, atol=1e-5)
    turned = two_steps(Muon(scale=scale), START.t().contiguous(), (G.t(), G.t()))
    torch.testing.assert_close(turned[0][0], torch.tensor(tall), rtol=0, atol=1e-5)


def test_momentum_without_nesterov_has_the_published_values() -> None:
    found = two_steps(Muon(nesterov=False), START, GRADS)[1][0]
    expected = torch.tensor((1.005522, 0.767559, 0.160436, -0.507738))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_steps_are_those_of_torch(scale: Scale, precision: str) -> None:
    found = two_steps(Muon(scale=scale, precision=precision), START, GRADS)  # type: ignore[arg-type]
    param = nn.Parameter(START.clone())
    oracle = torch.optim.Muon([param], lr=LR, weight_decay=DECAY, adjust_lr_fn=scale)
    for grad, ours in zip(GRADS, found, strict=True):
        param.grad = grad
        oracle.step()
        torch.testing.assert_close(ours, param.detach(), rtol=0, atol=1e-3)


def test_each_matrix_of_a_fused_parameter_is_orthogonalized_alone() -> None:
    random = torch.Generator().manual_seed(2)
    shapes: dict[str, tuple[tuple[int, ...], Matrices]] = {
        "gate_up": ((2, 6, 4), Matrices(batch_dims=1)),
        "experts": ((3, 2, 6, 4), Matrices(batch_dims=2)),
        "qkv": ((2, 12, 5), Matrices(sections=(6, 3, 3))),
    }
    named, grads = [], {}
    for name, (shape, matrices) in shapes.items():
        info = ParamInfo(name=name, full_shape=shape, tp_dim=None, matrices=matrices)
        named.append((info, nn.Parameter(torch.zeros(shape))))
        grads[name] = torch.randn(shape, generator=random)
    rule = Muon(momentum=0.0)
    optimizer = optimizer_of(rule, named)
    torch.stack([(param * grads[info.name]).sum() for info, param in named]).sum().backward()
    optimizer.step(lr=1.0)

    def alone(matrix: Tensor) -> Tensor:
        return -0.2 * math.sqrt(max(matrix.shape)) * newton_schulz(matrix, rule)

    found = {info.name: param.detach() for info, param in named}
    for each in range(2):
        torch.testing.assert_close(found["gate_up"][each], alone(grads["gate_up"][each]))
    for expert in range(3):
        for each in range(2):
            expected = alone(grads["experts"][expert, each])
            torch.testing.assert_close(found["experts"][expert, each], expected)
    for rows in (slice(0, 6), slice(6, 9), slice(9, 12)):
        matrix = grads["qkv"][:, rows].reshape(-1, 5)
        torch.testing.assert_close(found["qkv"][:, rows].reshape(-1, 5), alone(matrix))


def test_other_parameters_get_adamw_with_a_rate_of_their_own() -> None:
    torch.manual_seed(0)
    start = {"embedding": torch.randn(6, 4), "norm": torch.randn(4)}
    adamw = AdamW(beta1=0.8, eps=1e-6)
    finals = []
    for rule, lr in ((Muon(others=adamw, others_lr_scale=0.25), 0.4), (adamw, 0.1)):
        named = [
            (ParamInfo(name=name, full_shape=tuple(v.shape), tp_dim=None), nn.Parameter(v.clone()))
            for name, v in start.items()
        ]
        info = ParamInfo(name="w", full_shape=(2, 2), tp_dim=None, matrices=Matrices())
        named.append((info, nn.Parameter(torch.eye(2))))
        optimizer = optimizer_of(rule, named)
        for _ in range(2):
            optimizer.zero_grads()
            torch.stack([p.square().sum() for _, p in named]).sum().backward()
            optimizer.step(lr=lr)
        finals.append([p.detach() for _, p in named[:-1]])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_a_skipped_step_changes_nothing() -> None:
    param = nn.Parameter(START.clone())
    info = ParamInfo(name="w", full_shape=(3, 4), tp_dim=None, matrices=Matrices())
    optimizer = optimizer_of(Muon(), [(info, param)])
    (param * G).sum().backward()
    optimizer.step(lr=LR)
    before = {kind: values.clone() for kind, values in optimizer.pieces()[0].tensors.items()}
    optimizer.zero_grads()
    (param * math.inf).sum().backward()
    assert optimizer.step(lr=LR).skipped
    after = optimizer.pieces()[0].tensors
    assert all(torch.equal(after[kind], values) for kind, values in before.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"matrices": Matrices(batch_dims=2)}, "leaves no matrix of .*; use 0 to 1"),
        ({"matrices": Matrices(sections=(2, 2))}, "must be positive and have the sum 6"),
        ({"matrices": Matrices(sections=(2, 4)), "tp_dim": 1}, "put a dimension that tp splits"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParamInfo(**{"name": "w", "full_shape": (2, 6, 4), "tp_dim": None, **fields})  # type: ignore[arg-type]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale must be 'match_rms_adamw' or .*, got 'rms'"):
        Muon(scale="rms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps must be 5 with the coefficients 'cubic5', got 6"):
        Muon(coefficients="cubic5", steps=6)


def test_a_model_without_matrices_is_refused() -> None:
    info = ParamInfo(name="w", full_shape=(3, 4), tp_dim=None)
    with pytest.raises(ValueError, match=r"Muon computes with whole matrices, but no parameter"):
        optimizer_of(Muon(), [(info, nn.Parameter(START.clone()))])


@pytest.mark.parametrize(("rule", "own"), [(Muon(), AdamW()), (Muon(), Muon(steps=7))])
def test_all_matrices_may_be_in_groups(rule: UpdateRule, own: UpdateRule) -> None:
    info = ParamInfo(name="w", full_shape=(3, 4), tp_dim=None, matrices=Matrices())
    groups = ProcessGroups.single()
    optimizer = DistributedOptimizer(
        make_buffers([(info, nn.Parameter(START.clone()))], groups=groups),
        groups=groups,
        options=OptimizerOptions(rule=rule),
        param_groups=[ParamGroup(pattern="w", rule=own)],
    )
    [piece] = optimizer.pieces()
    assert set(piece.tensors) == {"main_param", *(tensor.name for tensor in own.state)}


def test_a_group_of_a_model_without_matrices_is_refused() -> None:
    info, groups = ParamInfo(name="w", full_shape=(3, 4), tp_dim=None), ProcessGroups.single()
    with pytest.raises(ValueError, match=r"Muon computes with whole matrices, but no parameter"):
        DistributedOptimizer(
            make_buffers([(info, nn.Parameter(START.clone()))], groups=groups),
            groups=groups,
            param_groups=[ParamGroup(pattern="w", rule=Muon())],
        )
