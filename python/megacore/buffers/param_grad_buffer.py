"""Parameters and their gradients in contiguous memory, ready for bucketed collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from megacore.buffers.bucket_plan import ShardPiece, plan_buckets
from megacore.config import OptimizerConfig
from megacore.parallel.async_collectives import (
    PendingCollective,
    all_gather_async,
    reduce_scatter_async,
)
from megacore.parallel.collectives import all_gather, all_reduce_, reduce_scatter
from megacore.parallel.instances import InstanceGroups
from megacore.parallel.params import ParamInfo
from megacore.parallel.process_groups import Group, ProcessGroups

NamedParams = Sequence[tuple[ParamInfo, nn.Parameter]]

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class _BucketViews:
    """A bucket in both buffers, whole and the slice that this rank reduces."""

    param: Tensor
    own_param: Tensor
    grad: Tensor
    own_grad: Tensor


class ParamGradBuffer:
    """One contiguous buffer of parameters and one of gradients, with the same layout.

    Every ``param.data`` becomes a view of ``param_data``. After each backward pass through a
    parameter, a hook adds its gradient to its ``main_grad``, a view of ``grad_data``, and frees
    ``param.grad``; so microbatches accumulate in ``grad_dtype`` whatever the parameter's dtype.

    An operation may also add to ``param.main_grad`` itself and return no gradient (see
    :func:`megacore.ops.grouped_gemm`): a backward pass that reaches a parameter without a gradient
    counts as that.

    Life of a step: :meth:`zero_grads`, forward and backward passes, :meth:`reduce_scatter_grads`
    (the own slice of each bucket then holds the mean over ``dp_group``), an optimizer that updates
    the own slices of ``param_data``, :meth:`all_gather_params`.

    Args:
        params: Description and parameter, in forward (registration) order; one dtype, one device,
            all dense or all expert.
        dp_group: The ranks that hold the same parameters and average their gradients.
        bucket_numel: Elements that close a bucket; see :func:`megacore.buffers.plan_buckets`.
        pad_for_ring: Pad buckets to multiples of 2^16 elements.
        grad_dtype: Dtype of the accumulated gradients: float32, or the parameters' dtype.
        distributed: Each rank optimizes its own slices only (ZeRO-1). Otherwise every rank gets all
            reduced gradients and optimizes everything; the reduced values have the same bits.
        grad_scale: Every reduced gradient is multiplied by this. Experts need it: their gradients
            already are sums over the tokens of all expert-parallel ranks.
        across: Ranks of other optimizer instances (hybrid sharding) with the same slices as this
            one; their gradients are averaged too. Default: one instance.
        average_in_collective: Divide sums of gradients by the number of ranks. Otherwise gradients
            are scaled before they are summed, which keeps sums small.
        positions: Place of each parameter in the whole model's registration order, for the order of
            buckets of several buffers; increasing. Default: from 0.

    Attributes:
        plan: Layout of both buffers and the shards of ``dp_group``.
        shard_plan: The same layout with as many shards as there are different optimizer states:
            ``plan`` itself, or a plan of one shard if not ``distributed``.
        shard_rank: Which shard of ``shard_plan`` this rank optimizes.
        param_data: All parameters, ``(plan.numel,)``, their dtype. Padding is zero.
        grad_data: All gradients, ``(plan.numel,)``, ``grad_dtype``. Padding is zero.

    Raises:
        ValueError: If a parameter is listed twice, needs no gradient, or does not fit the others.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> info = ParamInfo(name="w", full_shape=(2, 3), tp_dim=None)
        >>> buffer = ParamGradBuffer([(info, weight)], dp_group=Group.solo())
        >>> (2 * weight).sum().backward()
        >>> buffer.main_grad(0).tolist(), weight.grad
        ([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]], None)
    """

    def __init__(
        self,
        params: NamedParams,
        *,
        dp_group: Group,
        bucket_numel: int | None = None,
        pad_for_ring: bool = False,
        grad_dtype: torch.dtype = torch.float32,
        distributed: bool = True,
        grad_scale: float = 1.0,
        across: Group | None = None,
        average_in_collective: bool = True,
        positions: Sequence[int] | None = None,
    ) -> None:
        _check_params(params, grad_dtype)
        self.params = tuple(params)
        self.positions = tuple(range(len(params)) if positions is None else positions)
        self.dp_group = dp_group
        self.distributed = distributed
        self.across = Group.solo(dp_group.rank) if across is None else across
        self._num_ranks = dp_group.size * self.across.size
        self._averages = average_in_collective
        self._grad_scale = grad_scale
        numels = [param.numel() for _, param in self.params]
        shared = [info.shared is not None for info, _ in self.params]
        self.plan = plan_buckets(
            numels,
            dp_size=dp_group.size,
            bucket_numel=bucket_numel,
            shared=shared,
            pad_for_ring=pad_for_ring,
        )
        self.shard_plan, self.shard_rank = self.plan, dp_group.position
        if not distributed:
            self.shard_rank = 0
            self.shard_plan = plan_buckets(
                numels,
                dp_size=1,
                bucket_numel=self.plan.bucket_numel,
                shared=shared,
                bucket_alignment=self.plan.bucket_alignment,
            )
        first = self.params[0][1]
        self.param_data = torch.zeros(self.plan.numel, dtype=first.dtype, device=first.device)
        self.grad_data = torch.zeros(self.plan.numel, dtype=grad_dtype, device=first.device)
        self._has_grad = [False] * len(self.params)
        self._on_grad: list[Callable[[int], None]] = []
        self._hooks = [self._adopt(index) for index in range(len(self.params))]
        self._buckets = self._bucket_views()

    def main_grad(self, index: int) -> Tensor:
        """Return the accumulated gradient of parameter ``index``, a view in its shape."""
        return self._view(self.grad_data, index)

    def zero_grads(self) -> None:
        """Set all gradients to zero; call it before the first backward pass of a step."""
        self.grad_data.zero_()
        self._has_grad[:] = [False] * len(self._has_grad)

    def missing_grads(self) -> list[str]:
        """Names of parameters that got no gradient since :meth:`zero_grads`; theirs counts as 0."""
        return [
            info.name
            for (info, _), has_grad in zip(self.params, self._has_grad, strict=True)
            if not has_grad
        ]

    def on_grad(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(index)`` whenever parameter ``index`` has got a gradient from autograd.

        The callback runs inside the backward pass, after the gradient was added to ``main_grad``.
        """
        self._on_grad.append(callback)

    @torch.no_grad()
    def reduce_scatter_grads(self) -> None:
        """Average the gradients over ``dp_group``, bucket by bucket, in place.

        Afterwards the own slice of each bucket holds the mean times ``grad_scale``, and the rest is
        undefined; without ``distributed`` the whole bucket holds it.

        Sync:
            Collective over ``dp_group``. Waits for the device on gloo only.
        """
        for index, views in enumerate(self._buckets):
            self._scale_before(views)
            if views.grad.numel() > 0 and self.dp_group.size > 1:
                reduce_scatter(views.own_grad, views.grad, self.dp_group, op=self._op)
            self.finish_reduce(index)

    def start_reduce(self, bucket: int) -> PendingCollective:
        """Start the reduce-scatter of one bucket; wait for it, then call :meth:`finish_reduce`.

        Together, over all buckets, this does what :meth:`reduce_scatter_grads` does, to the bit.
        """
        views = self._buckets[bucket]
        self._scale_before(views)
        if views.grad.numel() == 0 or self.dp_group.size == 1:
            return PendingCollective()
        with record_function(f"megacore::reduce_scatter bucket {bucket}"):
            return reduce_scatter_async(views.own_grad, views.grad, self.dp_group, op=self._op)

    @torch.no_grad()
    def finish_reduce(self, bucket: int) -> None:
        """Sum a reduced bucket across instances, scale it, share it if not ``distributed``.

        Sync:
            Collective over ``across``, and over ``dp_group`` without ``distributed``.
        """
        views = self._buckets[bucket]
        if views.grad.numel() == 0:
            return
        all_reduce_(views.own_grad, self.across)
        if self._averages and self.across.size > 1:
            views.own_grad.div_(self._num_ranks)
        if self._averages and self._grad_scale != 1.0:
            views.own_grad.mul_(self._grad_scale)
        if not self.distributed and self.dp_group.size > 1:
            all_gather(views.grad, views.own_grad, self.dp_group)

    @property
    def _op(self) -> Literal["sum", "avg"]:
        return "avg" if self._averages and self.across.size == 1 else "sum"

    @torch.no_grad()
    def _scale_before(self, views: _BucketViews) -> None:
        if not self._averages:
            views.grad.mul_(self._grad_scale / self._num_ranks)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Collect the slices that the other ranks updated; nothing to do if not ``distributed``.

        Sync:
            Collective over ``dp_group``. Waits for the device on gloo only.
        """
        if not self.distributed or self.dp_group.size == 1:
            return
        for bucket in self._buckets:
            if bucket.param.numel() > 0:
                all_gather(bucket.param, bucket.own_param, self.dp_group)

    def start_gather(self, bucket: int) -> PendingCollective:
        """Start to collect one bucket of updated parameters."""
        views = self._buckets[bucket]
        if not self.distributed or self.dp_group.size == 1 or views.param.numel() == 0:
            return PendingCollective()
        with record_function(f"megacore::all_gather bucket {bucket}"):
            return all_gather_async(views.param, views.own_param, self.dp_group)

    def owned_pieces(self) -> list[ShardPiece]:
        """Pieces that this rank optimizes, in buffer order, positions by ``shard_plan``."""
        return self.shard_plan.shard(self.shard_rank)

    def reduced_pieces(self) -> list[ShardPiece]:
        """Pieces that this rank alone reduces: over ``dp_group`` each element once."""
        return self.plan.shard(self.dp_group.position)

    def remove_hooks(self) -> None:
        """Detach from the parameters' autograd; they stay views of the buffer."""
        for hook in self._hooks:
            hook.remove()

    def _adopt(self, index: int) -> RemovableHandle:
        """Move a parameter into the buffer and collect its gradients from now on."""
        param = self.params[index][1]
        home = self._view(self.param_data, index)
        home.copy_(param.data)
        param.data = home
        param.grad = None
        param.main_grad = self.main_grad(index)  # type: ignore[attr-defined]
        hook = _accumulate_into(self.main_grad(index), self._has_grad, index, self._on_grad)
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def _view(self, data: Tensor, index: int) -> Tensor:
        start, end = self.plan.param_range(index)
        return data[start:end].view(self.params[index][1].shape)

    def _bucket_views(self) -> list[_BucketViews]:
        views = []
        for index, bucket in enumerate(self.plan.buckets):
            start, end = self.plan.shard_range(index, dp_rank=self.dp_group.position)
            views.append(
                _BucketViews(
                    param=self.param_data[bucket.start : bucket.end],
                    own_param=self.param_data[start:end],
                    grad=self.grad_data[bucket.start : bucket.end],
                    own_grad=self.grad_data[start:end],
                )
            )
        return views


def make_buffers(
    params: NamedParams,
    *,
    groups: ProcessGroups,
    optimizer: OptimizerConfig,
    instances: InstanceGroups | None = None,
) -> list[ParamGradBuffer]:
    """Sort parameters into buffers, one per dtype and kind (see :func:`buffer_kind`).

    Dense parameters are averaged over ``groups.dp_cp``, expert parameters over
    ``groups.expert_dp``. An expert's gradient is a sum over the tokens of every rank that sent it
    some, so its mean is scaled down to that of a dense parameter. Sequence-parallel copies need a
    sum over tp before that; in a buffer of their own they hold up no other parameter.

    Args:
        params: Description and parameter of every parameter of this rank, in forward order.
        groups: Process groups of this rank.
        optimizer: For ``bucket_numel``, ``pad_buckets``, ``distributed`` and
            ``average_in_collective``.
        instances: Groups of hybrid sharding. Default: one instance.

    Raises:
        ValueError: If a parameter cannot be optimized; see :class:`ParamGradBuffer`.
    """
    if instances is None:
        instances = InstanceGroups.split(groups, 1)
    by_key: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for position, (info, param) in enumerate(params):
        by_key.setdefault((param.dtype, *buffer_kind(info)), []).append(position)
    return [
        ParamGradBuffer(
            [params[position] for position in positions],
            dp_group=instances.expert if expert else instances.dense,
            across=instances.expert_across if expert else instances.dense_across,
            average_in_collective=optimizer.average_in_collective,
            bucket_numel=optimizer.bucket_numel,
            pad_for_ring=optimizer.pad_buckets,
            distributed=optimizer.distributed,
            grad_scale=groups.expert_dp.size / groups.dp_cp.size if expert else 1.0,
            positions=positions,
        )
        for (_, expert, _), positions in by_key.items()
    ]


def buffer_kind(info: ParamInfo) -> tuple[bool, bool]:
    """Return ``(expert, sequence parallel)``: parameters of one dtype and kind share a buffer."""
    return info.expert, info.sequence_parallel


def _accumulate_into(
    main_grad: Tensor, has_grad: list[bool], index: int, callbacks: list[Callable[[int], None]]
) -> Callable[[Tensor], None]:
    # The hook holds no reference to the parameter or the buffer, so it makes no reference cycle.
    def accumulate(param: Tensor) -> None:
        # Without a gradient, the operation has added to main_grad itself.
        if param.grad is not None:
            main_grad.add_(param.grad)
            param.grad = None
        has_grad[index] = True
        for callback in callbacks:
            callback(index)

    return accumulate


def _check_params(params: NamedParams, grad_dtype: torch.dtype) -> None:
    if not params:
        raise ValueError("a buffer needs at least one parameter")
    first_info, first = params[0]
    if first.dtype not in _PARAM_DTYPES:
        raise ValueError(f"{first_info.name} is {first.dtype}; use float32, bfloat16 or float16")
    if grad_dtype not in (torch.float32, first.dtype):
        raise ValueError(
            f"grad_dtype is {grad_dtype}; use torch.float32 or the parameters' {first.dtype}"
        )
    seen: dict[int, str] = {}
    for info, param in params:
        if not param.requires_grad:
            raise ValueError(f"{info.name} needs no gradient; leave it out of the buffer")
        if id(param) in seen:
            raise ValueError(f"{info.name} is the same tensor as {seen[id(param)]}; list it once")
        seen[id(param)] = info.name
        if (param.dtype, param.device, info.expert) != (
            first.dtype,
            first.device,
            first_info.expert,
        ):
            raise ValueError(
                f"{info.name} ({param.dtype}, {param.device}, expert={info.expert}) cannot share a "
                f"buffer with {first_info.name} ({first.dtype}, {first.device}, "
                f"expert={first_info.expert}); use one buffer per kind, see make_buffers"
            )
