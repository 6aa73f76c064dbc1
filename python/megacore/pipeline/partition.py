"""Which layers live on which pipeline stage."""

from __future__ import annotations

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
) -> list[range]:
    """Spread the layers of a model over pipeline stages.

    Layers are spread evenly over all stages, or, where ``first`` or ``last`` is given, over the
    stages of the other ranks. No layer is ever lost: the stages together hold exactly
    ``range(num_layers)``.

    Args:
        num_layers: Layers of the whole model.
        num_ranks: Pipeline ranks.
        num_chunks: Model chunks per rank. Stage ``s`` is chunk ``s // num_ranks`` of rank
            ``s % num_ranks``.
        first: Layers of the first rank, over all its chunks.
        last: Layers of the last rank, over all its chunks.
        account_for_embedding: Let the embedding take the place of one layer of the first stage.
        account_for_loss: Let head and loss take the place of one layer of the last stage.

    Returns:
        The layers of each stage, in stage order. A range is empty only where a stage holds nothing
        but the embedding or the head.

    Raises:
        ValueError: If the layers cannot be spread like this. The message names the rule and, for
            every setting that could be changed alone, the nearest legal values.

    Example:
        >>> partition_layers(8, num_ranks=2, num_chunks=2)
        [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
        >>> partition_layers(6, num_ranks=4, account_for_embedding=True, account_for_loss=True)
        [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
    """
    ranges = _core.partition_layers(
        num_layers,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        first=first,
        last=last,
        account_for_embedding=account_for_embedding,
        account_for_loss=account_for_loss,
    )
    return [range(begin, end) for begin, end in ranges]
