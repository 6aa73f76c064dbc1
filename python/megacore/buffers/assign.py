"""Assignment of parameters to buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from megacore.buffers.options import BufferOptions
from megacore.buffers.param_checks import NamedParams, require_pairs
from megacore.buffers.param_grad_buffer import ParamGradBuffer
from megacore.options import check_options
from megacore.parallel.instances import HybridShardGroups
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups


def make_buffers(
    params: NamedParams,
    *,
    groups: ProcessGroups,
    options: BufferOptions | None = None,
    instances: HybridShardGroups | None = None,
    kind_of: Callable[[ParamInfo], Hashable] | None = None,
    unit_of: Callable[[ParamInfo], int] | None = None,
) -> list[ParamGradBuffer]:
    """Assign parameters to buffers, one per dtype and kind (see :func:`buffer_kind`).

    Gradients are averaged over ``groups.dp_cp``. An expert's gradient is a sum over the tokens of
    all ranks that send to the expert, so its mean over the replicas of the expert is scaled down
    to that of a dense parameter. With two copies of the model, each has the gradient of half the
    microbatches; the mean over both is doubled, which makes it their sum. Gradients that are
    partial over tp first need a sum; in a separate buffer, they delay no other parameter.

    Args:
        params: Description and parameter of every parameter of this rank, in forward order.
        groups: Process groups of this rank.
        options: Layout of the buffers. Default: ``BufferOptions()``.
        instances: Groups of hybrid sharding. Default: one instance.
        kind_of: Parameters for which this differs get buffers of their own. With that of their
            update rules, every rank has an equal share of each rule's state.
        unit_of: Elements of a parameter that ranks do not divide, such as the blocks of a rule; a
            power of two. Default: 1.

    Raises:
        TypeError: If ``params`` holds no pairs, or ``options`` is not a ``BufferOptions``.
        ValueError: If a parameter cannot be optimized; see :class:`ParamGradBuffer`.
    """
    params = require_pairs(params)
    options = BufferOptions() if options is None else options
    check_options(options, BufferOptions, "options")
    if instances is None:
        instances = HybridShardGroups.split(groups, 1)
    by_key: dict[tuple[torch.dtype, bool, bool, int, Hashable], list[int]] = {}
    for position, (info, param) in enumerate(params):
        kind = None if kind_of is None else kind_of(info)
        unit = 1 if unit_of is None else unit_of(info)
        by_key.setdefault((param.dtype, *buffer_kind(info), unit, kind), []).append(position)
    return [
        ParamGradBuffer(
            [params[position] for position in positions],
            dp_group=instances.expert if expert else instances.dense,
            across=instances.expert_across if expert else instances.dense_across,
            average_in_collective=options.average_in_collective,
            bucket_numel=options.bucket_numel,
            pad_for_ring=options.pad_for_ring,
            distributed=options.distributed,
            grad_dtype=dtype if options.grads_like_params else torch.float32,
            fp32_accumulation=options.grad_dtype == "param_fp32_sum",
            grad_scale=(groups.expert_holders if expert else groups.holders).size
            / groups.dp_cp.size,
            positions=positions,
            unit=unit,
        )
        for (dtype, expert, _, unit, _), positions in by_key.items()
    ]


def buffer_kind(info: ParamInfo) -> tuple[bool, bool]:
    """Return ``(expert, sequence parallel)``: parameters of one dtype and kind share a buffer."""
    return info.expert, info.sequence_parallel
