"""The optimizer on one process; tests/dist has the same with several."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megacore.buffers import ParamGradBuffer, make_buffers
from megacore.buffers.options import BufferOptions
from megacore.ops.optim import AdamWSettings, adamw_step_reference_
from megacore.optim import AdamW, DistributedOptimizer
from megacore.optim.options import OptimizerOptions
from megacore.parallel import Group, ProcessGroups
from megacore.parallel.param_info import ParamInfo

EPS = AdamW().eps
BUCKETS = BufferOptions(bucket_numel=50)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def named(model: nn.Module) -> list[tuple[ParamInfo, nn.Parameter]]:
    return [
        (
            ParamInfo(name=name, full_shape=tuple(p.shape), tp_dim=None, weight_decay=p.dim() > 1),
            p,
        )
        for name, p in model.named_parameters()
    ]


def make_optimizer(
    model: nn.Module, **fields: float
) -> tuple[DistributedOptimizer, OptimizerOptions]:
    options = OptimizerOptions(**{"clip_grad": 0.0, **fields})  # type: ignore[arg-type]
    groups = ProcessGroups.single()
    buffers = make_buffers(named(model), groups=groups, options=BUCKETS)
    return DistributedOptimizer(buffers, groups=groups, options=options), options


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (scale * model(x).float().square().mean()).backward()


def test_training_follows_torch_adamw_with_decay_of_matrices_only() -> None:
    ours, theirs = make_model(), make_model()
    optimizer, config = make_optimizer(ours, weight_decay=0.3)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    oracle = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.3},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=config.rule.decays,
        eps=EPS,
    )
    for step in range(15):
        optimizer.zero_grads()
        oracle.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        result = optimizer.step(lr=1e-2)
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])  # type: ignore[misc]
        oracle.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert not result.skipped
    assert optimizer.step_count == 15
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_is_that_of_torch() -> None:
    ours, theirs = make_model(), make_model()
    optimizer, config = make_optimizer(ours, clip_grad=0.01, weight_decay=0.0)
    oracle = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=config.rule.decays, weight_decay=0.0
    )
    for step in range(5):
        optimizer.zero_grads()
        oracle.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        result = optimizer.step(lr=1e-2)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
        oracle.step()
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert result.grad_norm > 0.01
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_fp32_main_parameters_are_the_parameters_themselves() -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    buffer = optimizer.buffers[0]
    for piece in optimizer.pieces():
        main = piece.tensors["main_param"]
        assert main.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()


def test_bfloat16_parameters_are_rounded_from_fp32_main_parameters() -> None:
    model = make_model(torch.bfloat16)
    optimizer, config = make_optimizer(model, weight_decay=0.0)
    buffer = optimizer.buffers[0]
    mains = [p.detach().float().flatten() for p in model.parameters()]
    moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in mains]
    for step in range(1, 6):
        optimizer.zero_grads()
        backward(model, step)
        grads = [buffer.main_grad(i).flatten().clone() for i in range(len(mains))]
        optimizer.step(lr=1e-3)
        settings = AdamWSettings(
            step=step, lr=1e-3, beta1=config.rule.decays[0], beta2=config.rule.decays[1], eps=EPS
        )
        for main, grad, (exp_avg, exp_avg_sq) in zip(mains, grads, moments, strict=True):
            adamw_step_reference_(main, grad, exp_avg, exp_avg_sq, settings)
        for param, main in zip(model.parameters(), mains, strict=True):
            assert torch.equal(param.detach().flatten(), main.bfloat16())


def test_small_updates_survive_in_bfloat16() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    optimizer, _ = make_optimizer(model, weight_decay=0.0)
    for _ in range(40):
        optimizer.zero_grads()
        weight.sum().backward()
        optimizer.step(lr=1e-4)  # one update is far below the spacing of bfloat16 at 1
    assert weight.item() == pytest.approx(1 - 40e-4, abs=2**-8)
    assert weight.item() < 1


def test_gradients_in_the_parameters_dtype_are_stepped_in_fp32() -> None:
    model = make_model(torch.bfloat16)
    buffer = ParamGradBuffer(named(model), dp_group=Group.solo(), grad_dtype=torch.bfloat16)
    options = OptimizerOptions(clip_grad=0.0)
    optimizer = DistributedOptimizer([buffer], groups=ProcessGroups.single(), options=options)
    backward(model, 0)
    grad = buffer.main_grad(0).float()
    assert buffer.grad_data.dtype == torch.bfloat16
    result = optimizer.step(lr=1e-3)
    assert result.grad_norm > grad.norm().item() * 0.99
    states = {piece.info.name: piece.tensors for piece in optimizer.pieces()}
    scaled = grad * 1.0
    expected = scaled * (1 - options.rule.decays[0])
    assert torch.equal(states["0.weight"]["exp_avg"], expected.flatten())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_skips_the_step_and_is_counted(bad: float) -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    backward(model, 0)
    optimizer.step(lr=1e-2)
    before = [piece.tensors["exp_avg"].clone() for piece in optimizer.pieces()]
    params = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grads()
    backward(model, 1, scale=bad)
    result = optimizer.step(lr=1e-2, extra=torch.tensor([1.5]))
    assert (result.skipped, optimizer.num_skipped, optimizer.step_count) == (True, 1, 1)
    assert math.isnan(result.grad_norm)
    assert result.extra.tolist() == [1.5]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), params, strict=True))
    after = [piece.tensors["exp_avg"] for piece in optimizer.pieces()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.zero_grads()
    backward(model, 2)
    assert not optimizer.step(lr=1e-2).skipped
    assert optimizer.step_count == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moved_through_pieces_continues_to_the_bit(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer, _ = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grads()
        backward(model, step)
        optimizer.step(lr=1e-2)
    saved = [
        (p.info.name, p.start, p.end, {k: t.clone() for k, t in p.tensors.items()})
        for p in optimizer.pieces()
    ]
    resumed = make_model(dtype)
    with torch.no_grad():
        for param in resumed.parameters():
            param.zero_()
    other, _ = make_optimizer(resumed)
    for piece, (name, start, end, tensors) in zip(other.pieces(), saved, strict=True):
        assert (piece.info.name, piece.start, piece.end) == (name, start, end)
        for kind, values in tensors.items():
            piece.tensors[kind].copy_(values)
    other.finish_load(optimizer.step_count)
    for twin, opt in ((model, optimizer), (resumed, other)):
        opt.zero_grads()
        backward(twin, 3)
        opt.step(lr=1e-2)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="step_count is -1"):
        other.finish_load(-1)


def test_pieces_cover_every_parameter() -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    covered: dict[str, int] = {}
    for piece in optimizer.pieces():
        assert set(piece.tensors) == {"main_param", "exp_avg", "exp_avg_sq"}
        assert all(t.shape == (piece.end - piece.start,) for t in piece.tensors.values())
        covered[piece.info.name] = covered.get(piece.info.name, 0) + piece.end - piece.start
    assert covered == {name: p.numel() for name, p in model.named_parameters()}


def test_extra_comes_back_in_fp64() -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    backward(model, 0)
    extra = optimizer.step(lr=1e-2, extra=torch.tensor([2.0, 3.0])).extra
    assert extra.dtype == torch.float64
    assert extra.tolist() == [2.0, 3.0]
    optimizer.zero_grads()
    assert optimizer.step(lr=1e-2).extra.tolist() == []


def test_tied_parameters_on_one_rank_share_their_gradient() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    shape = {"full_shape": (3,), "tp_dim": None, "shared": "embedding"}
    infos = [
        ParamInfo(name="embedding", **shape),  # type: ignore[arg-type]
        ParamInfo(name="embedding", is_shared_copy=True, **shape),  # type: ignore[arg-type]
    ]
    options = OptimizerOptions(clip_grad=0.0)
    groups = ProcessGroups.single()
    buffers = make_buffers(list(zip(infos, (first, second), strict=True)), groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options)
    (
        first * torch.tensor([1.0, 2.0, 0.0]) + second * torch.tensor([2.0, 2.0, 0.0])
    ).sum().backward()
    result = optimizer.step(lr=0.1)
    assert result.grad_norm == 5.0  # (3, 4, 0), counted once
    assert torch.equal(first, second)
    one, two = (piece.tensors["exp_avg"] for piece in optimizer.pieces())
    assert torch.equal(one, two)


def test_no_buffers_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one buffer"):
        DistributedOptimizer([], groups=ProcessGroups.single(), options=OptimizerOptions())


def test_sums_over_tokens_are_divided_by_the_number_of_tokens() -> None:
    ours, theirs = make_model(), make_model()
    optimizer, _ = make_optimizer(ours)
    oracle, _ = make_optimizer(theirs)
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, oracle)):
            one.zero_grads()
            backward(model, step)
        for buffer in optimizer.buffers:
            buffer.grad_data.mul_(8.0)
        tokens = torch.tensor(8, dtype=torch.int32)
        found = optimizer.step(lr=1e-2, num_tokens=tokens, extra=torch.tensor([3.0]))
        assert found.grad_norm == pytest.approx(oracle.step(lr=1e-2).grad_norm)
        assert found.extra.tolist() == [3.0]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_no_tokens_at_all_count_as_one() -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    optimizer.zero_grads()
    assert optimizer.step(lr=1e-2, num_tokens=torch.zeros(1)).grad_norm == 0.0


def test_scalars_go_from_one_optimizer_to_another() -> None:
    first, _ = make_optimizer(make_model(torch.float16), loss_scale=8.0, loss_scale_interval=3)
    first.zero_grads()
    first.buffers[0].grad_data.fill_(1.0)
    first.step(lr=0.0)
    first.buffers[0].grad_data.fill_(torch.inf)
    first.step(lr=0.0)
    first.buffers[0].grad_data.fill_(1.0)
    first.step(lr=0.0)
    kept = first.scalars()
    assert kept == {
        "step_count": 2, "num_skipped": 1, "loss_scale": 4.0, "loss_scale_good_steps": 1
    }  # fmt: skip
    second, _ = make_optimizer(make_model(torch.float16), loss_scale_interval=3)
    second.load_scalars(kept)
    assert second.scalars() == kept
    for _ in range(2):
        second.zero_grads()
        second.step(lr=0.0)
    assert second.loss_scale == 8.0


def test_scalars_that_cannot_be_are_refused() -> None:
    optimizer, _ = make_optimizer(make_model())
    with pytest.raises(ValueError, match="unknown scalar 'steps'; use some of step_count"):
        optimizer.load_scalars({"steps": 1})
    with pytest.raises(ValueError, match=r"num_skipped must be .*, got -1"):
        optimizer.load_scalars({"num_skipped": -1})


@pytest.mark.parametrize("fields", [{}, {"overlap": "grads"}])
def test_the_newest_of_several_optimizers_of_a_model_trains_it(fields: dict[str, float]) -> None:
    model, oracle = make_model(), make_model()
    first, _ = make_optimizer(model, **fields)
    second, _ = make_optimizer(model, **fields)
    expected, _ = make_optimizer(oracle)
    for step in range(2):
        for optimizer, trained in ((second, model), (expected, oracle)):
            optimizer.zero_grads()
            optimizer.before_backward(is_last=True)
            backward(trained, step)
            optimizer.step(lr=1e-2)
    assert second.missing_grads() == []
    for a, b in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"0\.weight has left its buffer: another one was made"):
        first.zero_grads()


def test_a_parameter_that_leaves_its_buffer_is_missed() -> None:
    model = make_model()
    optimizer, _ = make_optimizer(model)
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(ValueError, match=r"2\.weight has left its buffer"):
        optimizer.zero_grads()
    model = make_model()
    optimizer, _ = make_optimizer(model)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.weight needs no gradient any more.*freeze"):
        optimizer.zero_grads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"overlap": "params"}])
def test_weights_written_into_the_model_are_taken_over_when_told(
    dtype: torch.dtype, fields: dict[str, float]
) -> None:
    model = make_model(dtype)
    options = OptimizerOptions(clip_grad=0.0, **fields)  # type: ignore[arg-type]
    groups = ProcessGroups.single()
    buffers = make_buffers(named(model), groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options, modules=[model])
    optimizer.zero_grads()
    backward(model, 0)
    optimizer.step(lr=1e-2)
    if fields:
        with pytest.raises(RuntimeError, match="call finish_param_gather"):
            optimizer.reload_model_params()
    optimizer.finish_param_gather()
    model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()})
    optimizer.reload_model_params()
    optimizer.zero_grads()
    optimizer.step(lr=0.0)
    optimizer.finish_param_gather()
    assert all(bool((param == 0.5).all()) for param in model.parameters())


def test_float16_goes_on_from_other_formats_with_the_scale_of_its_config() -> None:
    other, _ = make_optimizer(make_model(torch.bfloat16))
    other.zero_grads()
    other.step(lr=0.0)
    kept = other.scalars()
    assert kept == {"step_count": 1, "num_skipped": 0}
    half, _ = make_optimizer(make_model(torch.float16), loss_scale=1024.0)
    half.load_scalars(kept)
    assert (half.step_count, half.loss_scale) == (1, 1024.0)
    other.load_scalars(half.scalars())
    assert other.scalars() == kept


@pytest.mark.parametrize(
    ("name", "value"), [("loss_scale", 0.0), ("loss_scale", math.nan), ("step_count", math.inf)]
)
def test_numbers_that_no_run_has_are_refused(name: str, value: float) -> None:
    optimizer, _ = make_optimizer(make_model(torch.float16))
    with pytest.raises(ValueError, match=f"{name} must be a number of at least .*, got {value}"):
        optimizer.load_scalars({name: value})
    for lr in (math.nan, -1.0):
        with pytest.raises(ValueError, match=f"lr must be a number of at least 0, got {lr}"):
            optimizer.step(lr=lr)


def test_sparse_gradients_train_like_dense_ones() -> None:
    models = [nn.Embedding(8, 3, sparse=sparse) for sparse in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer, _ = make_optimizer(model)
        for _ in range(2):
            optimizer.zero_grads()
            for row in (1, 5):
                model(torch.tensor([row, 1])).square().sum().backward()
            optimizer.step(lr=0.1)
    assert torch.equal(models[0].weight, models[1].weight)
