"""Partition of layers into pipeline stages."""

from __future__ import annotations

from typing import Literal

from megacore import _core


def partition_layers(
    num_layers: int,
    *,
    num_ranks: int,
    num_chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    placement: Literal["loop", "v"] = "loop",
    layout: str | None = None,
) -> list[range]:
    """Spread the layers of a model over pipeline stages.

    Layers are spread evenly over all stages, or, where ``first`` or ``last`` is given, over the
    stages of the other ranks, or just as ``layout`` says. No layer is ever lost: the stages
    together hold exactly ``range(num_layers)``.

    Args:
        num_layers: Layers of the whole model.
        num_ranks: Pipeline ranks.
        num_chunks: Model chunks per rank.
        first: Layers of the first rank, over all its chunks.
        last: Layers of the last rank, over all its chunks.
        account_for_embedding: Let the embedding take the place of one layer of the first stage.
        account_for_loss: Let head and loss take the place of one layer of the last stage.
        placement: Which rank holds stage ``s``: ``s % num_ranks`` in a loop; in a V the second
            half goes back up, so that rank ``r`` holds ``r`` and ``2 * num_ranks - 1 - r``.
        layout: All stages as a text, instead of the four settings before: ``E`` embedding, ``t`` a
            layer, ``L`` output layer and loss, ``|`` next stage, ``x*3`` for ``xxx``, parentheses
            for groups; commas and blanks mean nothing.

    Returns:
        The layers of each stage, in stage order. A range is empty where a stage holds nothing but
        the embedding or the head, or where the layout leaves a stage empty.

    Raises:
        ValueError: If the layers cannot be spread like this. The message names the rule and, for
            every setting that could be changed alone, the nearest legal values; or marks the
            offending character of the layout as ``>x<``.

    Source: the layout notation is that of Megatron-LM's ``pipeline_model_parallel_layout``.

    Example:
        >>> partition_layers(8, num_ranks=2, num_chunks=2)
        [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
        >>> partition_layers(6, num_ranks=4, account_for_embedding=True, account_for_loss=True)
        [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
        >>> partition_layers(7, num_ranks=2, num_chunks=2, layout="Et*3|(tt|)*2L")
        [range(0, 3), range(3, 5), range(5, 7), range(7, 7)]
    """
    if placement not in ("loop", "v"):
        raise ValueError(f"placement must be 'loop' or 'v', got {placement!r}")
    ranges = _core.partition_layers(
        num_layers,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        first=first,
        last=last,
        account_for_embedding=account_for_embedding,
        account_for_loss=account_for_loss,
        is_v=placement == "v",
        layout=layout,
    )
    return [range(begin, end) for begin, end in ranges]
