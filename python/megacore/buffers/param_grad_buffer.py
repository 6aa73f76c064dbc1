"""Parameters and gradients in contiguous memory, for bucketed collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megacore.buffers.bucket_plan import ShardPiece, plan_buckets
from megacore.buffers.param_checks import NamedParams, check_params, lost_text
from megacore.parallel.async_collectives import (
    PendingCollective,
    all_gather_async,
    reduce_scatter_async,
)
from megacore.parallel.collectives import all_gather, all_reduce_
from megacore.parallel.host.window import WindowTensor
from megacore.parallel.process_groups import Group

# Reductions in flight without a window, which may hold staging memory of their bucket each.
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class _BucketViews:
    """Views of a bucket in both buffers: the whole bucket and this rank's slice."""

    start: int
    end: int
    param: Tensor
    own_param: Tensor
    grad: Tensor
    own_grad: Tensor


class ParamGradBuffer:
    """One contiguous buffer of parameters and one of gradients, with the same layout.

    Every ``param.data`` becomes a view of ``param_data``. After each backward pass through a
    parameter, a hook adds its gradient to its :meth:`main_grad`, a view of ``grad_data``, and frees
    ``param.grad``; so microbatches accumulate in ``grad_dtype``, regardless of the parameter's
    dtype.

    Parameters of experts, and 16-bit ones with float32 gradients, have their ``main_grad`` as an
    attribute: an operation may add to it directly and return no gradient (see
    :func:`megacore.ops.grouped_gemm`). A backward pass that visits a parameter without a gradient
    signals this.

    Calls of a step: :meth:`zero_grads`, forward and backward passes, :meth:`reduce_scatter_grads`
    (this rank's slice of each bucket then holds the mean over ``dp_group``), an optimizer that
    updates this rank's slices of ``param_data``, :meth:`all_gather_params`.

    In a group that shares the memory of one host, both buffers are in memory that its ranks can
    read (see ``parallel/host/window.py``), so no collective needs additional memory.

    Args:
        params: Description and parameter, in forward (registration) order; one dtype, one device,
            all dense or all expert.
        dp_group: The ranks that hold the same parameters and average their gradients.
        bucket_numel: Elements that close a bucket; see :func:`megacore.buffers.plan_buckets`.
        pad_for_ring: Pad buckets to multiples of 2^16 elements.
        grad_dtype: Dtype of the accumulated gradients: float32, or the parameters' dtype.
        fp32_accumulation: Add 16-bit gradients in float32 on NCCL too: ranks exchange slices and
            add them locally. On the CPU this is always the case.
        distributed: Each rank optimizes its own slices only (ZeRO-1). Otherwise every rank gets all
            reduced gradients and optimizes everything; the reduced values have the same bits.
        grad_scale: Factor on every reduced gradient. Experts need it: their gradients are already
            sums over the tokens of all expert-parallel ranks.
        across: Ranks of other optimizer instances (hybrid sharding) with the same slices as this
            one; their gradients are averaged too. Default: one instance.
        average_in_collective: Divide summed gradients by the number of ranks. Otherwise gradients
            are scaled before the sum, which keeps sums small.
        positions: Position of each parameter in the registration order of the whole model, for the
            order of buckets of several buffers; increasing. Default: from 0.
        unit: Elements of parameters that ranks do not divide; see
            :func:`megacore.buffers.plan_buckets`.

    Attributes:
        plan: Layout of both buffers and the shards of ``dp_group``.
        shard_plan: The same layout with one shard per distinct optimizer state: ``plan`` itself, or
            a plan of one shard if not ``distributed``.
        shard_rank: Index of the shard of ``shard_plan`` that this rank optimizes.
        param_data: All parameters, ``(plan.numel,)``, their dtype. Padding is zero.

    Raises:
        ValueError: If a parameter is listed twice, needs no gradient, or does not match the others.

    Example:
        >>> from megacore.parallel import ParamInfo
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
        fp32_accumulation: bool = False,
        distributed: bool = True,
        grad_scale: float = 1.0,
        across: Group | None = None,
        average_in_collective: bool = True,
        positions: Sequence[int] | None = None,
        unit: int = 1,
    ) -> None:
        check_params(params, grad_dtype)
        self.params = tuple(params)
        self.positions = tuple(range(len(params)) if positions is None else positions)
        self.dp_group = dp_group
        self.distributed = distributed
        self.across = Group.solo(dp_group.rank) if across is None else across
        self._num_ranks = dp_group.size * self.across.size
        self._averages = average_in_collective
        self._grad_scale = grad_scale
        self._fp32_accumulation = fp32_accumulation
        numels = [param.numel() for _, param in self.params]
        shared = [info.shared is not None for info, _ in self.params]
        self.plan = plan_buckets(
            numels,
            dp_size=dp_group.size,
            bucket_numel=bucket_numel,
            shared=shared,
            pad_for_ring=pad_for_ring,
            unit=unit,
        )
        self.unit = unit
        self.shard_plan, self.shard_rank = self.plan, dp_group.position
        if not distributed:
            self.shard_rank = 0
            self.shard_plan = plan_buckets(
                numels,
                dp_size=1,
                bucket_numel=self.plan.bucket_numel,
                shared=shared,
                bucket_alignment=self.plan.bucket_alignment,
                unit=unit,
            )
        first = self.params[0][1]
        self._grad_window = self._make_window(grad_dtype)
        self._param_window = self._make_window(first.dtype) if distributed else None
        self.param_data = self._make_data(self._param_window, first.dtype)
        self._grads = self._make_data(self._grad_window, grad_dtype)
        # Products add to ``param.main_grad`` directly, so it must be zeroed in time.
        is_wider = grad_dtype == torch.float32 and first.dtype.itemsize == 2
        self._writes_directly = self.params[0][0].expert or is_wider
        # Stale entries hold values of an earlier step, which the first gradient overwrites.
        self._is_stale = [False] * len(self.params)
        self._has_grad = [False] * len(self.params)
        self._on_grad: list[Callable[[int], None]] = []
        for index in range(len(self.params)):
            self._adopt(index)
        self._addresses = [param.data_ptr() for _, param in self.params]
        self._buckets = self._bucket_views()

    @property
    def grad_data(self) -> Tensor:
        """All gradients, ``(plan.numel,)``, ``grad_dtype``. Padding is zero.

        Read this property again after :meth:`zero_grads`: gradients are zeroed lazily, on access or
        before the reduction.
        """
        self._clear_stale(range(len(self.params)))
        return self._grads

    def main_grad(self, index: int) -> Tensor:
        """Return the accumulated gradient of parameter ``index``, a view in its shape.

        Read it again after :meth:`zero_grads`, as with :attr:`grad_data`.
        """
        self._clear_stale([index])
        return self._view(self._grads, index)

    def zero_grads(self) -> None:
        """Set all gradients to zero; call it before the first backward pass of a step.

        Raises:
            ValueError: If a parameter is no longer in this buffer, or no longer needs a gradient:
                it would not be trained.
        """
        for (info, param), address in zip(self.params, self._addresses, strict=True):
            if param.data_ptr() != address or not param.requires_grad:
                raise ValueError(lost_text(info.name, param))
        if self._writes_directly:
            self._grads.zero_()
        else:
            self._is_stale[:] = [True] * len(self._is_stale)
        self._has_grad[:] = [False] * len(self._has_grad)

    def missing_grads(self) -> list[str]:
        """Return the names of parameters without a gradient since :meth:`zero_grads`.

        Their gradients count as 0.
        """
        return [
            info.name
            for (info, _), has_grad in zip(self.params, self._has_grad, strict=True)
            if not has_grad
        ]

    def grad_state(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return the bookkeeping of gradients (stale, present); see :meth:`load_grad_state`."""
        return tuple(self._is_stale), tuple(self._has_grad)

    def load_grad_state(self, grad_state: tuple[tuple[bool, ...], tuple[bool, ...]]) -> None:
        """Restore the bookkeeping after a CUDA graph has replayed backward passes.

        A graph adds to the gradients without running the hooks that update the bookkeeping.
        """
        self._is_stale[:], self._has_grad[:] = grad_state

    def on_grad(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(index)`` whenever parameter ``index`` has received a gradient.

        The callback runs inside the backward pass, after the gradient was added to ``main_grad``.
        """
        self._on_grad.append(callback)

    @torch.no_grad()
    def reduce_scatter_grads(self) -> None:
        """Average the gradients over ``dp_group``, bucket by bucket, in place.

        Afterwards, this rank's slice of each bucket holds the mean times ``grad_scale``; the rest
        is undefined. Without ``distributed`` the whole bucket holds the mean.

        Sync:
            Collective over ``dp_group``. Waits for the device on gloo only.
        """
        in_flight: deque[tuple[int, PendingCollective]] = deque()
        for index in range(len(self._buckets)):
            if len(in_flight) >= _MAX_IN_FLIGHT and self._grad_window is None:
                self._complete(*in_flight.popleft())
            in_flight.append((index, self.start_reduce(index)))
        for index, pending in in_flight:
            self._complete(index, pending)
        self.wait_until_grads_free()

    def _complete(self, bucket: int, pending: PendingCollective) -> None:
        pending.wait()
        self.finish_reduce(bucket)

    def start_reduce(self, bucket: int) -> PendingCollective:
        """Start the reduce-scatter of one bucket; wait for it, then call :meth:`finish_reduce`.

        Over all buckets, this is bitwise equal to :meth:`reduce_scatter_grads`.
        Call :meth:`wait_until_grads_free` before gradients are written again.
        """
        views = self._buckets[bucket]
        self._prepare(bucket)
        if views.grad.numel() == 0 or self.dp_group.size == 1:
            return PendingCollective()
        name = f"megacore::reduce_scatter bucket {bucket}"
        if self._grad_window is not None:
            return self._grad_window.start_reduce_scatter(
                bucket, views.start, views.end, op=self._op, name=name
            )
        with record_function(name):
            return reduce_scatter_async(
                views.own_grad,
                views.grad,
                self.dp_group,
                op=self._op,
                fp32_accumulation=self._fp32_accumulation,
            )

    def wait_until_grads_free(self) -> None:
        """Wait until no other rank reads this rank's gradients."""
        _wait_until_free(self._grad_window, len(self._buckets))

    @torch.no_grad()
    def finish_reduce(self, bucket: int) -> None:
        """Sum a reduced bucket across instances, scale it, all-gather it if not ``distributed``.

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
    def _prepare(self, bucket: int) -> None:
        """Zero the stale gradients of a bucket and scale it, before the sum."""
        self._clear_stale(self.plan.buckets[bucket].param_indices)
        if not self._averages:
            self._buckets[bucket].grad.mul_(self._grad_scale / self._num_ranks)

    @torch.no_grad()
    def _clear_stale(self, params: Iterable[int]) -> None:
        for index in params:
            if self._is_stale[index]:
                self._is_stale[index] = False
                self._view(self._grads, index).zero_()

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """All-gather the slices that other ranks updated; a no-op if not ``distributed``.

        Sync:
            Collective over ``dp_group``. Waits for the device on gloo only.
        """
        if not self.distributed or self.dp_group.size == 1:
            return
        for collective in [self.start_gather(index) for index in range(len(self._buckets))]:
            collective.wait()
        self.wait_until_params_free()

    def start_gather(self, bucket: int) -> PendingCollective:
        """Start the all-gather of one bucket of updated parameters.

        Call :meth:`wait_until_params_free` before this rank's parameters are written again.
        """
        views = self._buckets[bucket]
        if not self.distributed or self.dp_group.size == 1 or views.param.numel() == 0:
            return PendingCollective()
        name = f"megacore::all_gather bucket {bucket}"
        if self._param_window is not None:
            return self._param_window.start_all_gather(bucket, views.start, views.end, name=name)
        with record_function(name):
            return all_gather_async(views.param, views.own_param, self.dp_group)

    def wait_until_params_free(self) -> None:
        """Wait until no other rank reads this rank's parameters."""
        _wait_until_free(self._param_window, len(self._buckets))

    @property
    def starts_are_free(self) -> bool:
        """True if a started collective takes no memory, and no time before its wait."""
        return self._grad_window is not None

    def owned_pieces(self) -> list[ShardPiece]:
        """Return the pieces this rank optimizes, in buffer order; positions by shard plan."""
        return self.shard_plan.shard(self.shard_rank)

    def reduced_pieces(self) -> list[ShardPiece]:
        """Return the pieces that this rank reduces: each element once over ``dp_group``."""
        return self.plan.shard(self.dp_group.position)

    def _adopt(self, index: int) -> None:
        """Move a parameter into the buffer and install its gradient hook."""
        param = self.params[index][1]
        home = self._view(self.param_data, index)
        home.copy_(param.data)
        param.data = home
        param.grad = None
        main_grad = self._view(self._grads, index)
        if self._writes_directly:
            param.main_grad = main_grad  # type: ignore[attr-defined]
        else:
            param.__dict__.pop("main_grad", None)  # of a previous buffer
        hook = _Accumulate(
            main_grad=main_grad,
            index=index,
            is_stale=self._is_stale,
            has_grad=self._has_grad,
            callbacks=self._on_grad,
            writes_directly=self._writes_directly,
        )
        _remove_hook(param)
        param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _make_window(self, dtype: torch.dtype) -> WindowTensor | None:
        if self.params[0][1].device.type != "cpu" or self.dp_group.size == 1:
            return None
        return WindowTensor.zeros(
            self.plan.numel, dtype=dtype, group=self.dp_group, num_parts=len(self.plan.buckets)
        )

    def _make_data(self, window: WindowTensor | None, dtype: torch.dtype) -> Tensor:
        if window is not None:
            return window.data
        return torch.zeros(self.plan.numel, dtype=dtype, device=self.params[0][1].device)

    def _view(self, data: Tensor, index: int) -> Tensor:
        start, end = self.plan.param_range(index)
        return data[start:end].view(self.params[index][1].shape)

    def _bucket_views(self) -> list[_BucketViews]:
        views = []
        for index, bucket in enumerate(self.plan.buckets):
            start, end = self.plan.shard_range(index, dp_rank=self.dp_group.position)
            views.append(
                _BucketViews(
                    start=bucket.start,
                    end=bucket.end,
                    param=self.param_data[bucket.start : bucket.end],
                    own_param=self.param_data[start:end],
                    grad=self._grads[bucket.start : bucket.end],
                    own_grad=self._grads[start:end],
                )
            )
        return views


def _wait_until_free(window: WindowTensor | None, num_parts: int) -> None:
    if window is not None:
        for part in range(num_parts):
            window.wait_until_free(part)


@dataclass(frozen=True, kw_only=True)
class _Accumulate:
    """Gradient hook of one parameter: runs when its gradient of a backward pass is complete.

    The hook has no reference to the parameter or the buffer, which would be a reference cycle.
    """

    main_grad: Tensor
    index: int
    is_stale: list[bool]
    has_grad: list[bool]
    callbacks: list[Callable[[int], None]]
    writes_directly: bool

    def __call__(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None:
            if not self.writes_directly:
                return
        elif self.is_stale[self.index]:
            self.main_grad.copy_(grad.to_dense() if grad.is_sparse else grad)
            self.is_stale[self.index] = False
        else:
            self.main_grad.add_(grad)
        param.grad = None
        self.has_grad[self.index] = True
        for callback in self.callbacks:
            callback(self.index)


def _remove_hook(param: nn.Parameter) -> None:
    """Remove the gradient hook installed by a previous buffer."""
    hooks = param._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Accumulate)]:
        del hooks[key]
