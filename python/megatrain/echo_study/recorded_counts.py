"""Conversion of recorded routing decisions to the token counts that clone planners use.

Beside the synthetic workloads, because it needs torch, which takes a second to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from megacore.errors import MegacoreError
from megacore.moe.echo.plan import Counts
from megatrain.routing_trace import read_recorded, step_files


def recorded_counts(folder: Path, *, num_ranks: int) -> tuple[int, Iterator[Counts]]:
    """Load the counts of a run with ``debug.record_routing``, for any number of ranks.

    Tokens of a step, by sample and position, are divided into equal contiguous ranges per rank.

    Args:
        folder: Folder of the recording.
        num_ranks: R.

    Returns:
        The number of experts E, and one matrix ``(R, E)`` for each step and layer, steps first.

    Raises:
        MegacoreError: If the folder does not contain a recording or a file cannot be read.
        ValueError: If the number of experts is not a multiple of the number of ranks.
    """
    num_experts = read_recorded(folder).settings.get("moe.num_experts")
    if not isinstance(num_experts, int) or num_experts < 1:
        raise MegacoreError(
            f"the recording {folder} says moe.num_experts = {num_experts!r}; it must be a whole "
            "number of at least 1: the file is damaged, record again"
        )
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} recorded experts do not divide over {num_ranks} ranks; choose a divisor"
        )
    by_step: dict[int, list[Path]] = {}
    for step, path in step_files(folder):
        by_step.setdefault(step, []).append(path)
    return num_experts, (
        counts
        for step in sorted(by_step)
        for counts in _counts_of_step(by_step[step], num_ranks, num_experts)
    )


def _counts_of_step(paths: list[Path], num_ranks: int, num_experts: int) -> Iterator[Counts]:
    choices: dict[int, dict[int, list[Counts]]] = {}
    for path in paths:
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise MegacoreError(f"cannot read the recording {path}: {error}") from error
        for name, ids in tensors.items():
            _, layer, sample = (int(part) for part in name.split("."))
            choices.setdefault(layer, {}).setdefault(sample, []).append(ids)
    for layer in sorted(choices):
        # Ranks that share a sample recorded -1 where the tokens are not theirs.
        samples = [np.concatenate(parts) for _, parts in sorted(choices[layer].items())]
        ids = np.concatenate(samples)
        ids = ids[(ids >= 0).all(axis=1)]
        yield np.stack(
            [
                np.bincount(part.reshape(-1), minlength=num_experts)
                for part in np.array_split(ids, num_ranks)
            ]
        )
