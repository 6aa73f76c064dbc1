"""Calls of every operation that has a kernel: on awkward shapes, and on those of a run.

Letters: T tokens, H features, F features of an MLP, E experts, k choices of a token, R rows of all
experts, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megacore.moe.echo import device_plan, reroute  # noqa: F401  registers
from megacore.ops import (  # noqa: F401  registers
    dense,
    dropout,
    echo_counts,
    grouped_product,
    normed_rotation,
    optim,
    permutation,
    quantize,
    rotation,
    routing,
    topk,
)
from megacore.ops.attention import attention
from megacore.ops.fp8 import fp8_grouped_gemm
from megacore.ops.kernel_choice import FEW_ROWS, LINEAR_MACS, MEASURED
from megacore.ops.linear import (
    add_weight_grad_,
    multiply_,
    multiply_input_grad,
    multiply_weight_grad_,
)
from megacore.ops.quantize import block_buffers

Call = tuple[Callable[..., Any], list[Any]]

# More experts in one product would take longer, and show nothing else.
_MOST_EXPERTS_OF_PRODUCT = 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the tensors that operations get on one rank.

    Attributes:
        tokens: T, of a microbatch.
        width: H.
        mlp: F, of an expert if there are experts.
        head_dim: D.
        groups: KV heads.
        q_per_kv: Query heads per KV head.
        experts: E, of all ranks; 0 without experts.
        choices: k.
        local_experts: Experts of this rank.
    """

    tokens: int
    width: int
    mlp: int
    head_dim: int
    groups: int = 1
    q_per_kv: int = 1
    experts: int = 0
    choices: int = 0
    local_experts: int = 0

    def text(self) -> str:
        """Describe the sizes briefly.

        Example:
            >>> Sizes(tokens=7, width=8, mlp=16, head_dim=4, experts=6, choices=2).text()
            '7 x 8, heads of 4, 6 experts'
        """
        experts = f", {self.experts} experts" if self.experts else ""
        return f"{self.tokens} x {self.width}, heads of {self.head_dim}{experts}"


def _awkward(tokens: int, width: int, head_dim: int, experts: int, choices: int) -> Sizes:
    return Sizes(
        tokens=tokens,
        width=width,
        mlp=min(2 * width, 168),
        head_dim=head_dim,
        groups=1 + experts % 2,
        q_per_kv=1 + tokens % 3,
        experts=experts,
        choices=choices,
        local_experts=min(experts, _MOST_EXPERTS_OF_PRODUCT),
    )


# No rows, one row, one column, odd sizes, sizes that no block divides, many experts.
AWKWARD = (
    _awkward(0, 16, 32, 4, 2),
    _awkward(1, 1, 2, 1, 1),
    _awkward(3, 5, 6, 3, 2),
    _awkward(7, 8, 16, 8, 3),
    _awkward(33, 96, 32, 6, 4),
    _awkward(130, 264, 64, 64, 8),
    _awkward(129, 1024, 128, 256, 8),
    _awkward(18, 520, 128, 1024, 16),
)


class Draw:
    """Random arguments of given sizes; the same for the same sizes and dtype.

    Args:
        sizes: Sizes of all tensors.
        dtype: dtype of activations and weights.
        device: Device of the tensors.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self._random = torch.Generator().manual_seed(sizes.tokens + sizes.width)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers, of the dtype of activations by default."""
        numbers = torch.randn(*shape, generator=self._random)
        return numbers.to(self.device, self.dtype if dtype is None else dtype)

    def wide(self, *shape: int) -> Tensor:
        """Draw normal numbers in float32."""
        return self.normal(*shape, dtype=torch.float32)

    def grid(self, rows: int, columns: int) -> Tensor:
        """Draw float32 rows of distinct multiples of ``8 / columns``, from -4 to 4."""
        order = torch.rand(rows, columns, generator=self._random).argsort(1)
        return (order.float() * (8 / columns) - 4).to(self.device)

    def ids(self) -> Tensor:
        """Draw choices of experts, ``(T, k)``, of which some are missing."""
        sizes = self.sizes
        drawn = torch.rand(sizes.tokens, sizes.experts, generator=self._random)
        ids = drawn.argsort(1)[:, : sizes.choices]
        return ids.masked_fill(drawn[:, : sizes.choices] < 0.1, -1).to(self.device)

    def row_map(self) -> Tensor:
        """Draw the row of each copy, ``(T, k)``, each row at most once, some missing."""
        shape = self.sizes.tokens, self.sizes.choices
        rows = torch.randperm(self.num_rows, generator=self._random)[: shape[0] * shape[1]]
        missing = torch.rand(shape, generator=self._random) < 0.1
        return rows.view(shape).masked_fill(missing, -1).to(self.device)

    @property
    def num_rows(self) -> int:
        """R, with some rows of no token."""
        return self.sizes.tokens * self.sizes.choices + 3

    def splits(self) -> Tensor:
        """Draw rows per local expert, of which some have none; three rows belong to nobody."""
        counts = torch.zeros(self.sizes.local_experts, dtype=torch.int64)
        used = torch.arange(0, max(1, len(counts) - 1))
        counts[used] = (self.num_rows - 3) // len(used)
        return counts.to(self.device)

    def loads(self) -> Tensor:
        """Draw tokens of each rank for each expert of all ranks, which are two if they can be."""
        experts = self.sizes.experts
        counts = torch.rand(2 - experts % 2, experts, generator=self._random) ** 4 * 300
        return counts.long().to(self.device)

    def scalar(self, value: int) -> Tensor:
        """Return an int64 scalar."""
        return torch.tensor(value, device=self.device)


def _op(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.megacore, name)  # type: ignore[no-any-return]


def _norms(draw: Draw) -> Iterator[Call]:
    shape, weight = (draw.sizes.tokens, draw.sizes.width), draw.normal(draw.sizes.width)
    yield _op("rms_norm"), [draw.normal(*shape), weight, 1e-5]


def _sum_norms(draw: Draw) -> Iterator[Call]:
    shape, weight = (draw.sizes.tokens, draw.sizes.width), draw.normal(draw.sizes.width)
    yield _op("add_rms_norm"), [draw.normal(*shape), draw.normal(*shape), weight, 1e-5]


def _norm_grads(draw: Draw) -> Iterator[Call]:
    shape, weight = (draw.sizes.tokens, draw.sizes.width), draw.normal(draw.sizes.width)
    grad, x, grad_sum = (draw.normal(*shape) for _ in range(3))
    scale = draw.wide(shape[0], 1).abs() + 0.5
    yield _op("rms_norm_backward"), [grad, x, weight, scale, True, True, grad_sum]
    yield _op("rms_norm_backward"), [grad, x, weight, scale, True, True, None]


def _activation(name: str) -> Callable[[Draw], Iterator[Call]]:
    def calls(draw: Draw) -> Iterator[Call]:
        rows, width = draw.num_rows, draw.sizes.mlp
        x = draw.normal(rows, 2 * width if name == "swiglu" else width)
        yield _op(name), [x, draw.wide(rows), draw.scalar(rows)]
        yield _op(name), [x, None, None]

    return calls


def _activation_grad(name: str) -> Callable[[Draw], Iterator[Call]]:
    def calls(draw: Draw) -> Iterator[Call]:
        rows, width = draw.num_rows, draw.sizes.mlp
        x = draw.normal(rows, 2 * width if name == "swiglu" else width)
        grad = draw.normal(rows, width)
        yield _op(f"{name}_backward"), [grad, x, draw.wide(rows), draw.scalar(rows)]
        yield _op(f"{name}_backward"), [grad, x, None, None]

    return calls


def _tables(draw: Draw) -> list[Tensor]:
    return [draw.wide(draw.sizes.tokens, draw.sizes.head_dim // 2) for _ in range(2)]


def _qkv(draw: Draw) -> Tensor:
    sizes = draw.sizes
    return draw.normal(sizes.tokens, 1, sizes.groups, (sizes.q_per_kv + 2) * sizes.head_dim)


def _heads(draw: Draw) -> list[Tensor]:
    sizes = draw.sizes
    counts = sizes.groups * sizes.q_per_kv, sizes.groups, sizes.groups
    return [draw.normal(sizes.tokens, 1, count, sizes.head_dim) for count in counts]


def _rotations(draw: Draw) -> Iterator[Call]:
    yield _op("split_and_rotate"), [_qkv(draw), *_tables(draw), draw.sizes.head_dim]


def _rotation_grads(draw: Draw) -> Iterator[Call]:
    yield _op("split_and_rotate_backward"), [*_heads(draw), *_tables(draw)]


def _normed(draw: Draw) -> Iterator[Call]:
    weights = draw.normal(draw.sizes.head_dim), draw.normal(draw.sizes.head_dim)
    head_dim = draw.sizes.head_dim
    yield _op("norm_and_rotate"), [_qkv(draw), *weights, *_tables(draw), head_dim, 1e-5]


def _normed_grads(draw: Draw) -> Iterator[Call]:
    sizes = draw.sizes
    weights = draw.normal(sizes.head_dim), draw.normal(sizes.head_dim)
    scale = draw.wide(sizes.tokens, 1, sizes.groups, sizes.q_per_kv + 1).abs() + 0.5
    arguments = [*_heads(draw), _qkv(draw), *weights, scale, *_tables(draw), True, True]
    yield _op("norm_and_rotate_backward"), arguments


def _dropout(draw: Draw) -> Iterator[Call]:
    tokens = draw.sizes.tokens
    positions = torch.arange(tokens, device=draw.device)
    x, sample = draw.normal(tokens, 1, draw.sizes.width), draw.scalar(4)[None]
    yield _op("counter_dropout"), [x, sample, positions, None, 7, 0.1]


def _routes(draw: Draw) -> Iterator[Call]:
    sizes = draw.sizes
    logits, bias = draw.grid(sizes.tokens, sizes.experts), draw.grid(1, sizes.experts)[0] * 99
    seen = torch.zeros(sizes.experts, dtype=torch.int64, device=draw.device)
    softmax = [1, False, False, True, 1.5, True, 0.1, 0.1]
    sigmoid = [1, True, False, True, 1.5, True, 0.1, 0.1]
    yield _op("route"), [logits, None, None, seen, sizes.choices, *softmax]
    yield _op("route"), [logits, bias, None, None, sizes.choices, *sigmoid]
    yield _op("route"), [logits, None, None, None, sizes.choices, 1, False, True, *sigmoid[3:]]


def _route_grads(draw: Draw) -> Iterator[Call]:
    sizes = draw.sizes
    logits = draw.grid(sizes.tokens, sizes.experts)
    ids = logits.argsort(1, descending=True)[:, : sizes.choices].contiguous()
    factor = draw.wide(1)[0]
    given = [draw.wide(sizes.tokens, sizes.choices), logits, ids]
    counts = draw.wide(1, sizes.experts).abs()
    for is_sigmoid in (False, True):
        rule = [1, is_sigmoid, False, True, 1.5, 0.1, 0.1]
        yield _op("route_backward"), [*given, counts, factor, factor[None], *rule]


def _choices(draw: Draw) -> Iterator[Call]:
    scores = draw.grid(draw.sizes.tokens, draw.sizes.experts).to(draw.dtype)  # narrow ones tie
    yield _op("top_k"), [scores, draw.sizes.choices]


def _sorts(draw: Draw) -> Iterator[Call]:
    yield _op("sort_by_expert"), [draw.ids(), draw.sizes.experts]


def _permutes(draw: Draw) -> Iterator[Call]:
    tokens, row_map = draw.normal(draw.sizes.tokens, draw.sizes.width), draw.row_map()
    yield _op("permute"), [tokens, row_map, draw.num_rows, None]
    yield _op("permute"), [tokens, row_map, draw.num_rows, draw.wide(*row_map.shape)]


def _unpermutes(draw: Draw) -> Iterator[Call]:
    rows, row_map = draw.normal(draw.num_rows, draw.sizes.width), draw.row_map()
    yield _op("unpermute"), [rows, row_map, None]
    yield _op("unpermute"), [rows, row_map, draw.wide(*row_map.shape)]


def _permutes_both(draw: Draw) -> Iterator[Call]:
    tokens, row_map = draw.normal(draw.sizes.tokens, draw.sizes.width), draw.row_map()
    yield _op("permute_both"), [tokens, draw.wide(*row_map.shape), row_map, draw.num_rows]


def _unpermutes_both(draw: Draw) -> Iterator[Call]:
    rows = draw.normal(draw.num_rows, draw.sizes.width)
    yield _op("unpermute_both"), [rows, draw.wide(draw.num_rows), draw.row_map()]


def _dots(draw: Draw) -> Iterator[Call]:
    tokens, width = draw.sizes.tokens, draw.sizes.width
    rows = draw.normal(draw.num_rows, width)
    yield _op("row_dots"), [draw.normal(tokens, width), rows, draw.row_map()]


def _grouped(draw: Draw) -> Iterator[Call]:
    sizes, splits = draw.sizes, draw.splits()
    x, grad = draw.normal(draw.num_rows, sizes.width), draw.normal(draw.num_rows, sizes.mlp)
    w = draw.normal(sizes.local_experts, sizes.mlp, sizes.width)
    main_grad = draw.wide(*w.shape)
    run = _op("grouped_product")
    yield run, [x, w, splits, 0]
    yield run, [grad, w, splits, 1]
    yield run, [grad, x, splits, 2, main_grad, None, None, True]
    yield run, [grad, x, splits, 2, main_grad]


def _fp8_products(draw: Draw) -> Iterator[Call]:
    sizes = draw.sizes
    x, grad = draw.normal(draw.num_rows, sizes.width), draw.normal(draw.num_rows, sizes.mlp)
    w = draw.normal(sizes.local_experts, sizes.mlp, sizes.width)
    yield _fp8_passes, [x, w, grad, draw.splits(), draw.wide(*w.shape)]


def _fp8_passes(
    x: Tensor, w: Tensor, grad: Tensor, splits: Tensor, main_grad: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = fp8_grouped_gemm(x, w, splits, main_grad=main_grad)
        y.backward(grad)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return y.detach(), x.grad


def _rounds_rows(draw: Draw) -> Iterator[Call]:
    rows = draw.num_rows
    yield _op("quantize_rows"), [draw.normal(rows, draw.sizes.width), draw.scalar(rows)]


def _rounds_columns(draw: Draw) -> Iterator[Call]:
    yield _op("quantize_columns"), [draw.normal(draw.num_rows, draw.sizes.width), None, False]


def _rounds_blocks(draw: Draw) -> Iterator[Call]:
    w = draw.normal(max(1, draw.sizes.local_experts), draw.sizes.mlp, draw.sizes.width)
    for transposed in (False, True):
        values, scales = block_buffers(w, transposed=transposed)
        yield _op("quantize_blocks_"), [w, transposed, values.view(torch.uint8), scales]


def _weight_grads(draw: Draw) -> Iterator[Call]:
    if draw.dtype == torch.float32:  # whose gradients go to autograd
        return
    tokens, width, mlp = draw.sizes.tokens, draw.sizes.width, draw.sizes.mlp
    arguments = [draw.wide(mlp, width), draw.normal(tokens, mlp), draw.normal(tokens, width)]
    yield _op("add_weight_grad_"), arguments


def _adamw(draw: Draw) -> Iterator[Call]:
    numel = draw.sizes.tokens * draw.sizes.width
    state = [draw.wide(numel), draw.wide(numel), draw.wide(numel), draw.wide(numel).abs()]
    copy = torch.zeros(numel, dtype=torch.bfloat16, device=draw.device)
    rule = [0.1, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.75, 2.0]
    yield _op("adamw_step_"), [*state, copy, None, *rule]
    numbers = [0.5, 0.5, 0.75, 1.0, 3.0, 0.1]
    control = torch.tensor(numbers, dtype=torch.float64, device=draw.device)
    yield _op("adamw_step_"), [*state, None, control, *rule]


def _decisions(draw: Draw) -> Iterator[Call]:
    for num_non_finite in (0.0, 1.0):
        rows = [1.0, 0.0, 2.0, 1.0], [draw.sizes.width, num_non_finite, 7.0], [0.5] * 6
        state = [torch.tensor(row, dtype=torch.float64, device=draw.device) for row in rows]
        yield _op("decide_step_"), [*state, 0.9, 0.99, 1.0, 2.0, 3.0]


def _squares(draw: Draw) -> Iterator[Call]:
    values = draw.normal(draw.sizes.tokens, draw.sizes.width)
    yield _op("sum_of_squares"), [values]
    yield _op("sum_of_squares"), [torch.full_like(values, torch.nan)]


def _plans(draw: Draw) -> Iterator[Call]:
    for is_balanced in (True, False):
        counts = draw.loads()
        yield _planned, [counts, len(counts) - 1, 2, is_balanced, 10_000, 10**6, 0]


def _planned(*arguments: Any) -> list[Tensor]:
    plan: list[Tensor] = list(_op("plan_offload")(*arguments))
    return plan[:-1]  # without the time that it took


def _plan(counts: Tensor) -> list[Tensor]:
    plan = _op("plan_offload")(counts.cpu(), 0, 2, True, 10_000, 10**6, 0)
    return [each.to(counts.device) for each in plan]


def _reroutes(draw: Draw) -> Iterator[Call]:
    ids, counts = draw.ids(), draw.loads()
    ones = torch.ones_like(ids).flatten()
    total = counts.new_zeros(draw.sizes.experts + 1).index_add_(0, ids.flatten() + 1, ones)
    counts[0] = total[1:]
    slot_expert, sent, *_ = _plan(counts)
    yield _op("reroute"), [ids, counts[0], torch.zeros_like(counts[0]), slot_expert, sent]


def _plan_counts(draw: Draw) -> Iterator[Call]:
    counts = draw.loads()
    slot_expert, _, _, load_before, _, summary, elapsed = _plan(counts)
    sums = torch.full((8,), 0.25, dtype=torch.float64, device=draw.device)
    places = torch.arange(counts.shape[1] + slot_expert.numel(), device=draw.device)
    plan = [slot_expert, load_before, summary, elapsed]
    yield _op("count_plan_"), [sums, *plan, places, draw.sizes.experts]


def _held_counts(draw: Draw) -> Iterator[Call]:
    sums = torch.full((8,), 0.25, dtype=torch.float64, device=draw.device)
    yield _op("count_held_"), [sums, _plan(draw.loads())[0], 0, draw.sizes.experts, 100]


# Queries, keys and values of a call of attention that is measured.
_ATTENTION_SHAPE = (1, 4, 256, 64)
# Of a weight of 9 MB in float32, which no cache of one core holds.
_FEW_ROWS_FEATURES = 1536


def measured_calls(name: str) -> Iterator[Call]:
    """Yield calls of an operation of `MEASURED`, of a typical size of their own."""
    kind, dtype, *rest = name.split(".")
    random = torch.Generator().manual_seed(1)
    run: Callable[..., Any]
    if kind == "linear":
        rows, features = linear_shape(name)
        run = _LINEAR[rest[-1]]
        drawn = [torch.randn(rows, features, generator=random)]
        second = rows if rest[-1] == "weight_grad" else features
        drawn.append(torch.randn(second, features, generator=random))
    else:
        run = _attention_passes
        drawn = [torch.randn(*_ATTENTION_SHAPE, generator=random) for _ in range(4)]
    yield run, [each.to(getattr(torch, dtype)) for each in drawn]


def linear_shape(name: str) -> tuple[int, int]:
    """Return the rows and features of the products that are measured for a name of linear layers.

    Cubes have four times the least multiply-adds of the name in float32, and in 16 bits, for which
    some processors need a hundred times as long, once. They are multiples of 16, as in models.
    """
    if ".few_rows." in name:
        return FEW_ROWS, _FEW_ROWS_FEATURES
    is_wide = name.split(".")[1] == "float32"
    side: float = (LINEAR_MACS[name] * (4 if is_wide else 1)) ** (1 / 3)
    side = 16 * math.ceil(side / 16 - 1e-6)
    return int(side), int(side)


def _attention_passes(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        mixed = attention(*leaves, is_causal=True)
        return [mixed.detach(), *torch.autograd.grad(mixed, leaves, grad)]


def _linear_forward(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_empty(len(x), len(w))
    multiply_(y, x, w)
    return y


def _linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    grad_w = x.new_empty(grad.shape[1], x.shape[1], dtype=torch.float32)
    if x.dtype == torch.float32:
        multiply_weight_grad_(grad_w, grad, x)
    else:
        add_weight_grad_(grad_w.zero_(), grad, x)
    return grad_w


# By the last word of a name.
_LINEAR: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "forward": _linear_forward,
        "input_grad": multiply_input_grad,
        "weight_grad": _linear_weight_grad,
    }
)


# By the name of the operation. Those of experts are last: `calls_of` leaves them out without.
_DENSE: Mapping[str, Callable[[Draw], Iterator[Call]]] = MappingProxyType(
    {
        "rms_norm": _norms,
        "add_rms_norm": _sum_norms,
        "rms_norm_backward": _norm_grads,
        "swiglu": _activation("swiglu"),
        "swiglu_backward": _activation_grad("swiglu"),
        "gelu": _activation("gelu"),
        "gelu_backward": _activation_grad("gelu"),
        "split_and_rotate": _rotations,
        "split_and_rotate_backward": _rotation_grads,
        "norm_and_rotate": _normed,
        "norm_and_rotate_backward": _normed_grads,
        "counter_dropout": _dropout,
        "add_weight_grad_": _weight_grads,
        "adamw_step_": _adamw,
        "decide_step_": _decisions,
        "sum_of_squares": _squares,
        "quantize_rows": _rounds_rows,
        "quantize_columns": _rounds_columns,
        "quantize_blocks_": _rounds_blocks,
    }
)
_EXPERTS: Mapping[str, Callable[[Draw], Iterator[Call]]] = MappingProxyType(
    {
        "route": _routes,
        "route_backward": _route_grads,
        "top_k": _choices,
        "sort_by_expert": _sorts,
        "permute": _permutes,
        "unpermute": _unpermutes,
        "permute_both": _permutes_both,
        "unpermute_both": _unpermutes_both,
        "row_dots": _dots,
        "grouped_product": _grouped,
        "fp8_product": _fp8_products,
        "plan_offload": _plans,
        "reroute": _reroutes,
        "count_plan_": _plan_counts,
        "count_held_": _held_counts,
    }
)


def operation_names(device_type: str) -> tuple[str, ...]:
    """Return the names of all operations that torch can compute in place of our kernels.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    own = MEASURED if device_type == "cpu" else ("fp8_product",)
    return (*_DENSE, *(name for name in _EXPERTS if name != "fp8_product"), *own)


def calls_of(name: str, draw: Draw) -> Iterator[Call]:
    """Yield calls of an operation with drawn arguments; none if the sizes have no experts."""
    if name in MEASURED or (name in _EXPERTS and draw.sizes.experts == 0):
        return iter(())
    return (_DENSE.get(name) or _EXPERTS[name])(draw)
