from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megacore.buffers import ParamGradBuffer, make_buffers
from megacore.buffers.options import BufferOptions
from megacore.ops.linear import linear
from megacore.parallel import Group, ProcessGroups
from megacore.parallel.param_info import ParamInfo


def info(param: nn.Parameter, name: str, **flags: bool | str) -> ParamInfo:
    return ParamInfo(name=name, full_shape=tuple(param.shape), tp_dim=None, **flags)  # type: ignore[arg-type]


def named(model: nn.Module, **flags: bool | str) -> list[tuple[ParamInfo, nn.Parameter]]:
    return [(info(param, name, **flags), param) for name, param in model.named_parameters()]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def test_parameters_keep_their_values_and_become_views() -> None:
    model = make_model()
    before = [param.detach().clone() for param in model.parameters()]
    buffer = ParamGradBuffer(named(model), dp_group=Group.solo())
    storage = buffer.param_data.untyped_storage().data_ptr()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
        assert param.untyped_storage().data_ptr() == storage
    with torch.no_grad():
        buffer.param_data.fill_(2.0)
    assert model[0].weight[3, 3].item() == 2.0


def test_gradients_of_microbatches_add_up_in_main_grad() -> None:
    model, oracle = make_model(), make_model()
    buffer = ParamGradBuffer(named(model), dp_group=Group.solo())
    for seed in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        oracle(x).square().mean().backward()
    for index, param in enumerate(oracle.parameters()):
        assert torch.equal(buffer.main_grad(index), param.grad)
        assert buffer.params[index][1].grad is None
    buffer.zero_grads()
    assert not buffer.grad_data.any()


def test_a_parameter_used_twice_is_added_once() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    buffer = ParamGradBuffer([(info(weight, "w"), weight)], dp_group=Group.solo())
    (weight * weight).sum().backward()
    assert buffer.main_grad(0).tolist() == [4.0, 6.0]


def test_bfloat16_gradients_accumulate_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buffer = ParamGradBuffer([(info(weight, "w"), weight)], dp_group=Group.solo())
    (256 * weight).sum().backward()
    for _ in range(7):
        weight.sum().backward()
    assert buffer.main_grad(0).item() == 263.0  # bfloat16 would stay at 256


def test_parameters_without_gradient_are_named_and_count_as_zero() -> None:
    model = make_model()
    buffer = ParamGradBuffer(named(model), dp_group=Group.solo())
    assert len(buffer.missing_grads()) == 4
    model[2](torch.ones(1, 7)).sum().backward()
    assert buffer.missing_grads() == ["0.weight", "0.bias"]
    assert not buffer.main_grad(0).any()
    buffer.zero_grads()
    assert len(buffer.missing_grads()) == 4


def test_an_empty_parameter_is_harmless() -> None:
    empty, full = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))
    buffer = ParamGradBuffer(
        [(info(empty, "empty"), empty), (info(full, "full"), full)], dp_group=Group.solo()
    )
    (empty.sum() + full.sum()).backward()
    buffer.reduce_scatter_grads()
    buffer.all_gather_params()
    assert buffer.main_grad(1).tolist() == [1.0, 1.0]
    only_empty = nn.Parameter(torch.empty(0))
    alone = ParamGradBuffer([(info(only_empty, "e"), only_empty)], dp_group=Group.solo())
    alone.reduce_scatter_grads()
    assert alone.plan.numel == 0


def test_shared_parameters_get_their_own_bucket() -> None:
    model = make_model()
    params = named(model)
    params[2] = (info(params[2][1], "tied", shared="embedding"), params[2][1])
    buffer = ParamGradBuffer(params, dp_group=Group.solo())
    assert [bucket.param_indices for bucket in buffer.plan.buckets] == [[3], [2], [1, 0]]


def test_the_buffer_lets_go_of_the_model_and_back() -> None:
    model = make_model()
    buffer = ParamGradBuffer(named(model), dp_group=Group.solo())
    gone = weakref.ref(buffer)
    gc.disable()
    try:
        del buffer
        assert gone() is None
    finally:
        gc.enable()


def test_grad_scale_multiplies_the_reduced_gradient() -> None:
    weight = nn.Parameter(torch.ones(2))
    buffer = ParamGradBuffer([(info(weight, "w"), weight)], dp_group=Group.solo(), grad_scale=0.25)
    (8 * weight).sum().backward()
    buffer.reduce_scatter_grads()
    assert buffer.main_grad(0).tolist() == [2.0, 2.0]


def test_make_buffers_sorts_by_dtype_and_expert() -> None:
    dense, low = make_model(), make_model(torch.bfloat16)
    experts = make_model()
    params = named(dense) + named(low) + named(experts, expert=True)
    options = BufferOptions(distributed=False, bucket_numel=10)
    buffers = make_buffers(params, groups=ProcessGroups.single(), options=options)
    kinds = [(b.param_data.dtype, b.params[0][0].expert, len(b.params)) for b in buffers]
    assert kinds == [
        (torch.float32, False, 4),
        (torch.bfloat16, False, 4),
        (torch.float32, True, 4),
    ]
    assert all(b.grad_data.dtype == torch.float32 for b in buffers)
    assert all(b.plan.bucket_numel == 10 and not b.distributed for b in buffers)


def test_unfit_parameters_are_refused_by_name() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    group = Group.solo()
    w = (info(weight, "w"), weight)
    with pytest.raises(ValueError, match="at least one parameter"):
        ParamGradBuffer([], dp_group=group)
    with pytest.raises(ValueError, match=r"h is torch.float64"):
        ParamGradBuffer([(info(wide, "h"), wide)], dp_group=group)
    with pytest.raises(ValueError, match="f needs no gradient"):
        ParamGradBuffer([(info(frozen, "f"), frozen)], dp_group=group)
    with pytest.raises(ValueError, match="again is the same tensor as w"):
        ParamGradBuffer([w, (info(weight, "again"), weight)], dp_group=group)
    with pytest.raises(ValueError, match=r"l .* cannot share a buffer with w"):
        ParamGradBuffer([w, (info(low, "l"), low)], dp_group=group)
    with pytest.raises(ValueError, match=r"e .* cannot share a buffer with w"):
        ParamGradBuffer([w, (info(other, "e", expert=True), other)], dp_group=group)
    with pytest.raises(ValueError, match=r"grad_dtype is torch.bfloat16"):
        ParamGradBuffer([w], dp_group=group, grad_dtype=torch.bfloat16)


def test_names_and_shapes_must_be_those_of_the_parameters() -> None:
    weights = [nn.Parameter(torch.ones(2, 4)) for _ in range(2)]

    def make(*infos: ParamInfo) -> None:
        ParamGradBuffer(list(zip(infos, weights, strict=False)), dp_group=Group.solo())

    whole = ParamInfo(name="w", full_shape=(2, 4), tp_dim=None)
    with pytest.raises(ValueError, match="two parameters are called w"):
        make(whole, whole)
    for full_shape, tp_dim in (((8,), None), ((2, 8), None), ((4, 8), 1), ((2, 6), 1)):
        with pytest.raises(ValueError, match=r"w is \(2, 4\), but its full_shape is"):
            make(ParamInfo(name="w", full_shape=full_shape, tp_dim=tp_dim))
    make(ParamInfo(name="w", full_shape=(2, 8), tp_dim=1))


def test_products_and_hooks_add_to_one_gradient_of_a_tied_weight() -> None:
    """Products of 16-bit weights add to main_grad themselves; the hook adds the embedding's."""
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    buffer = ParamGradBuffer([(info(weight, "w"), weight)], dp_group=Group.solo())
    seen: list[int] = []
    buffer.on_grad(seen.append)
    for number in range(1, 3):
        words = nn.functional.embedding(torch.tensor([0, 1, 1]), weight)
        linear(words.detach(), weight).sum().backward(retain_graph=True)
        (linear(words.detach(), weight).sum() + words.sum()).backward()
        assert seen == [0] * 2 * number
        once = torch.tensor([[7.0, 7.0], [8.0, 8.0], [6.0, 6.0]])
        assert torch.equal(buffer.main_grad(0), number * once)
        assert weight.grad is None
    assert buffer.missing_grads() == []
    buffer.zero_grads()
    assert not buffer.main_grad(0).any()
    assert buffer.missing_grads() == ["w"]


def test_a_narrow_buffer_takes_gradients_from_autograd() -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    wide = ParamGradBuffer([(info(weight, "w"), weight)], dp_group=Group.solo())
    narrow = ParamGradBuffer(
        [(info(weight, "w"), weight)], dp_group=Group.solo(), grad_dtype=torch.bfloat16
    )
    linear(torch.ones(1, 2, dtype=torch.bfloat16), weight).sum().backward()
    assert not wide.main_grad(0).any()
    assert narrow.main_grad(0).eq(1).all()
