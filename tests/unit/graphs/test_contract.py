"""What graphed callables share with those of Transformer Engine, item by item."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.graphs import CaptureError, EmulatedBackend, make_graphed_callables
from megacore.graphs.backend import CapturedGraph, Results


def x_of(*, rows: int = 4, grad: bool = True) -> Tensor:
    return torch.randn(rows, 8).requires_grad_(grad)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 8)


def graphed(module: nn.Module, **options: Any) -> Any:
    return make_graphed_callables(module, (x_of(),), **{"backend": "emulated", **options})


# ---- random numbers ------------------------------------------------------------------------------


class Drops(nn.Module):
    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
        return x * self.weight * mask


def test_a_capture_draws_no_random_numbers_that_count() -> None:
    for generator in (None, torch.Generator()):
        eager = Drops(generator)
        source = generator or torch.default_generator
        xs = [x_of() for _ in range(3)]
        source.manual_seed(5)
        expected = [eager(x) for x in xs]
        generators = () if generator is None else (generator,)
        source.manual_seed(5)
        call = make_graphed_callables(
            Drops(generator), xs[:1], backend="emulated", generators=generators
        )
        found = []
        for x in xs:  # each before the next one overwrites it
            found.append(call(x).detach().clone())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- hooks ---------------------------------------------------------------------------------------


def test_capture_time_hooks_surround_warmup_and_capture_and_no_replay() -> None:
    seen: list[tuple[str, bool]] = []
    inside = []

    class Module(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inside.append("forward")
            return super().forward(x)

    module = Module(8, 8)

    def hook(kind: str) -> Callable[[nn.Module], None]:
        def run(given: nn.Module) -> None:
            inside.append(kind)
            seen.append((kind, given is module))

        return run

    kinds = ["forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"]
    order = []
    graphed(
        module,
        num_warmup_iters=2,
        capture_time_hooks=[{kind: {0: hook(kind)} for kind in kinds}],
        pre_warmup_hook=lambda: order.append(len(seen)),
        post_warmup_hook=lambda: order.append(len(seen)),
    )
    assert seen == [(kind, True) for kind in kinds] * 3
    assert order == [0, 8]
    assert inside == ["forward_pre_hooks", "forward", *kinds[1:]] * 3
    module(x_of()).sum().backward()
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        ([None, None], ValueError, "capture_time_hooks has 2 entries for 1 modules"),
        ([{"forward": {}}], ValueError, 'names "forward"; the kinds are forward_pre_hooks'),
        ([{"forward_hooks": {0: lambda _: 1}}], CaptureError, "returned 1; it must return None"),
    ],
)  # fmt: skip
def test_bad_capture_time_hooks_are_refused(
    hooks: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        graphed(linear(), capture_time_hooks=hooks)


def test_hooks_on_gradients_of_parameters_run_once_for_each_replay() -> None:
    eager, module = linear(), linear()
    for one in (eager, module):
        one.weight.register_hook(lambda grad: grad * 2)
    call = graphed(module)
    x = x_of()
    for _ in range(2):
        eager(x).sum().backward()
        call(x).sum().backward()
    assert torch.equal(module.weight.grad, eager.weight.grad)


def test_pre_hooks_of_all_modules_inside_run_before_each_replay_if_asked() -> None:
    seen: list[str] = []
    module = nn.Sequential(linear(), linear())
    for name, inner in module.named_modules():
        inner.register_forward_pre_hook(
            lambda _, args, name=name: seen.append(f"{name}:{len(args)}")
        )
    (call,) = graphed(module, run_pre_hooks=True, order=[1, -1])
    assert seen == []
    call(x_of())
    assert seen == [":0", "0:0", "1:0"]
    seen.clear()
    graphed(module, run_pre_hooks=True)(x_of())  # a call of the module itself runs its own
    assert seen == [":1", "0:0", "1:0"]


# ---- gradients -----------------------------------------------------------------------------------


def test_gradients_of_parameters_belong_to_whoever_gets_them() -> None:
    call = graphed(linear())
    call(torch.ones(4, 8, requires_grad=True)).sum().backward()
    first = call.weight.grad
    value = first.clone()
    call.weight.grad = None
    call(2 * torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert torch.equal(first, value)
    assert torch.equal(call.weight.grad, 2 * value)

    lent = graphed(linear(), clone_param_grads_on_return=False)
    grads = []
    lent.weight.register_hook(grads.append)
    for _ in range(2):
        lent.zero_grad(set_to_none=True)
        lent(x_of()).sum().backward()
    assert grads[0].data_ptr() == grads[1].data_ptr()


def test_gradients_that_come_and_go_are_refused() -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) if self.calls != 2 else x * 1

    with pytest.raises(CaptureError, match="gives gradients to other tensors in one warmup pass"):
        graphed(Moody(8, 8))


def test_a_gradient_that_waits_while_other_graphs_replay_is_not_lost() -> None:
    """A skip over a graphed module: the gradient of its end is added up behind that module."""
    torch.manual_seed(2)
    modules = [nn.Linear(8, 8) for _ in range(3)]
    calls = make_graphed_callables(modules, [(x_of(),)] * 3, order=[1, -1], backend="emulated")

    def run(calls: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        a = calls[0](x)
        b = a + calls[1](a)
        (b + a + calls[2](b)).square().sum().backward()
        found = [x.grad, *(p.grad for m in modules for p in m.parameters())]
        for module in modules:
            module.zero_grad(set_to_none=True)
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(modules), run(calls), strict=True))


# ---- modes and arguments -------------------------------------------------------------------------


def test_a_gradient_with_other_strides_counts_like_its_copy_row_by_row() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48))
    tensors = [torch.randn(37, 64, requires_grad=True), *module.parameters()]
    for grad in (torch.randn(48, 37).t(), torch.randn(48).expand(37, 48)):
        assert not grad.is_contiguous()
        expected = torch.autograd.grad(module(tensors[0]), tensors, grad.contiguous())
        copied = copy.deepcopy(module)
        (call,) = make_graphed_callables(
            (copied,), ((torch.zeros(37, 64, requires_grad=True),),), order=[1, -1]
        )
        found = torch.autograd.grad(call(tensors[0]), [tensors[0], *copied.parameters()], grad)
        assert all(map(torch.equal, found, expected))


def test_modules_in_evaluation_mode_get_graphs_of_their_forward_pass() -> None:
    module = nn.Sequential(linear(), nn.Dropout(0.5)).eval()
    x, y = x_of(grad=False), x_of(grad=False)
    expected = module(x), module(y)
    call = make_graphed_callables(module, (x,), backend="emulated")
    assert torch.equal(call(x).clone(), expected[0])
    with torch.no_grad():
        first = call(y)
        assert torch.equal(first, expected[1])
        assert first.data_ptr() == call(x).data_ptr()
    assert not first.requires_grad
    call.train()
    assert call(x).data_ptr() != first.data_ptr()  # the module itself


def test_arguments_may_be_given_by_name() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    module, scale = Scaled(8, 8), torch.full((8,), 2.0)
    x = x_of()
    expected = module(x, scale=scale)
    call = make_graphed_callables(module, (x,), sample_kwargs={"scale": scale}, backend="emulated")
    assert torch.equal(call(x, scale=scale), expected)


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup'"):
        graphed(linear(), warmup=3)
    with pytest.raises(ValueError, match="num_layers_per_chunk belongs to an order list"):
        graphed(linear(), num_layers_per_chunk=1)
    with pytest.raises(ValueError, match="has no memory pool to share; leave out pool"):
        graphed(linear(), pool=(0, 1))
    with pytest.raises(ValueError, match=r"pool and generators are given to a backend when it is"):
        graphed(linear(), backend=EmulatedBackend(), generators=[torch.Generator()])
    module = linear()
    module.register_buffer("table", torch.ones(8, requires_grad=True))
    with pytest.raises(ValueError, match="has a buffer that requires grad; make it a parameter"):
        graphed(module)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"use autocast\(..., cache_enabled=False\)"),
    ):
        graphed(linear())


# ---- streams and memory, as a backend of real graphs sees them -----------------------------------


class Watched(EmulatedBackend):
    """Notes what a backend of real graphs is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.apart: list[Hashable] = []
        self.disowned: list[tuple[int, int]] = []
        self.where: list[tuple[Any, Any]] = []

    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        number = len(self.apart)
        self.apart.append(apart)
        graph = super().capture(function)
        graph.disown = lambda first=0: self.disowned.append((number, first))  # type: ignore[method-assign]
        return graph

    @contextmanager
    def replaying(self, stream: Any = None, event: Any = None) -> Iterator[None]:
        self.where.append((stream, event))
        yield


def test_a_call_may_name_its_stream_and_event() -> None:
    watched = Watched()
    (call,) = make_graphed_callables(linear(), (x_of(),), order=[1, -1], backend=watched)
    call(x_of(), cuda_graph_stream="side", cuda_graph_event="done").sum().backward()
    call(x_of()).sum().backward()
    assert watched.where == [("side", "done")] * 2 + [(None, None)] * 2
    call = graphed(linear())
    with pytest.raises(ValueError, match="the emulated backend replays at once, on no stream"):
        call(x_of(), cuda_graph_stream="side")


ORDER = [1, 1, -1, 1, -1, -1]  # two microbatches at once


def test_graphs_that_replay_in_any_order_share_no_memory() -> None:
    def apart(**options: Any) -> list[Hashable]:
        watched = Watched()
        make_graphed_callables([linear(), linear()], [(x_of(),)] * 2, backend=watched, **options)
        return watched.apart

    # Microbatch 2 runs the first pass of microbatch 0 again while microbatch 1 is alive.
    first, second = (0, 0), (0, 1)
    assert apart(order=ORDER) == [first] * 2 + [second] * 2 + [first] * 2 + [second] * 2
    assert apart(order=ORDER, reuse="buffers") == [None] * 12
    assert apart() == [0, 1, 1, 0]


def test_results_give_up_their_memory_behind_the_last_pass_that_reads_them() -> None:
    def disowned(order: list[float], **options: Any) -> list[tuple[int, int]]:
        watched = Watched()
        make_graphed_callables(
            linear(), (x_of(),), order=order, reuse="buffers", backend=watched, **options
        )
        return watched.disowned

    # Graphs 0, 1: forward; 2: backward. Gradients of inputs stay, those of parameters are cloned.
    assert disowned([1, 1, -1, -1]) == [(0, 0), (2, 1), (1, 0), (3, 1)]
    assert disowned([1, 1, -1, -1], clone_param_grads_on_return=False) == [(0, 0), (1, 0)]
    assert disowned([1, 1, -1, -1], retain_graph_in_backward=True) == []
    assert disowned([1, -1, 1, -1.5, -1, -1.5]) == [(0, 0), (3, 0), (2, 0), (5, 0)]
    watched = Watched()
    make_graphed_callables(linear(), (x_of(),), order=ORDER, backend=watched)
    assert watched.disowned == []


# ---- numbers of the code -------------------------------------------------------------------------


class Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e9, float("nan"), x * self.weight)


def test_nan_in_the_code_is_the_same_number_in_every_replay() -> None:
    module = graphed(Marks())
    for _ in range(3):
        x = x_of()
        assert torch.equal(module(x), x)
