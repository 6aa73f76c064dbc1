"""Partition of layers into pipeline stages, and the nearest settings that make it possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from megatrain.config.pipeline import PipelineConfig
from megatrain.config.sections import Config


def layers_of_stages(config: Config) -> list[range]:
    """Return the layers of each pipeline stage.

    Raises:
        ValueError: If the layers cannot be partitioned; the message has the legal values.

    Example:
        >>> layers_of_stages(Config())
        [range(0, 4)]
    """
    from megacore._core import partition_layers

    pipeline = config.pipeline
    ranges = partition_layers(
        config.model.num_layers,
        num_ranks=config.parallel.pp,
        num_chunks=pipeline.stages_per_rank,
        first=None,
        last=None,
        account_for_embedding=False,
        account_for_loss=False,
        is_v=config.pipeline.is_v,
        layout=pipeline.layout,
    )
    return [range(begin, end) for begin, end in ranges]


def mtp_stage(config: Config) -> int | None:
    """Return the stage with the layers for multi-token prediction; ``None`` if there are none.

    Raises:
        ValueError: If the layout has another number of such layers than the model.

    Example:
        >>> config = Config(model={"num_mtp_layers": 1}, parallel={"pp": 2})
        >>> mtp_stage(config)  # with the output layer and loss, unless the layout says otherwise
        1
    """
    from megacore._core import predictions_of_layout

    count, layout = config.model.num_mtp_layers, config.pipeline.layout
    if layout is None or "m" not in layout:
        return config.parallel.pp * config.pipeline.stages_per_rank - 1 if count > 0 else None
    by_stage = predictions_of_layout(layout)
    if sum(by_stage) != count:
        raise ValueError(
            f'layout "{layout}" has {sum(by_stage)} m (layers for multi-token prediction), but '
            f"model.num_mtp_layers is {count}; make them equal, or leave m out to have such layers "
            "on the last stage"
        )
    return next(stage for stage, number in enumerate(by_stage) if number > 0)


def stages_of_ranks(pipeline: PipelineConfig, pp: int) -> list[list[int]]:
    """Return the stages of the model that each of ``pp`` pipeline ranks holds, in chunk order.

    Example:
        >>> stages_of_ranks(PipelineConfig(schedule="dualpipe"), 4)
        [[0, 3], [1, 2], [2, 1], [3, 0]]
    """
    if pipeline.file is not None:
        return [list(mine) for mine in pipeline.file.stages]
    num_stages = pp * pipeline.stages_per_rank
    if pipeline.is_v or pipeline.copies > 1:
        return [[rank, num_stages - 1 - rank] for rank in range(pp)]
    return [list(range(rank, num_stages, pp)) for rank in range(pp)]


def stage_text(stages: Sequence[int], mtp: int = 0) -> str:
    """Return ``pipeline.layout`` of stages with these numbers of layers.

    Args:
        stages: Layers of each stage, at least two.
        mtp: Layers for multi-token prediction, on the last stage.

    Example:
        >>> stage_text([4, 4, 4, 3, 0], mtp=1)
        'Et*4|(t*4|)*2t*3|mL'
    """
    *inner, last = [f"t*{count}" if count else "" for count in stages[1:]]
    runs = [(text, len(list(group))) for text, group in groupby(inner)]
    middle = "".join(f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in runs)
    first = f"Et*{stages[0]}" if stages[0] else "E"
    return f"{first}|{middle}{last}{'m' * mtp}L"


def _near_even(num_layers: int, num_stages: int) -> list[int]:
    """Return layers per stage that differ by one at most, fewest beside embedding and head."""
    share, rest = divmod(num_layers, num_stages)
    return [share + (1 <= stage <= rest) for stage in range(num_stages)]


def layers_fit(config: Config) -> bool:
    """Return whether the layers can be partitioned into the stages.

    Example:
        >>> layers_fit(Config())
        True
    """
    try:
        layers_of_stages(config)
    except ValueError:
        return False
    return True


def nearest_fits(config: Config, world_size: int) -> list[str]:
    """Return changes of one setting that make the layers fit, as ``"num_layers=4 or 6"``.

    Args:
        config: A configuration with layers that do not fit.
        world_size: Number of processes; only pipeline sizes that divide it are considered.
    """
    pipeline, layers = config.pipeline, config.model.num_layers
    stages = config.parallel.pp * pipeline.stages_per_rank
    others = config.parallel.tp * config.parallel.cp
    sizes = [pp for pp in range(1, layers + 1) if world_size % (others * pp) == 0]

    found = [_nearest(config, "model.num_layers", layers, range(1, layers + stages + 1))]
    if pipeline.schedule_file is None:  # which is for one number of ranks and stages
        found.append(_nearest(config, "parallel.pp", config.parallel.pp, sizes))
    if pipeline.schedule_file is None and pipeline.stages_per_rank > 1:
        chunks = range(2, layers + 1)
        found.append(_nearest(config, "pipeline.num_chunks", pipeline.chunks, chunks))
    layout = stage_text(_near_even(layers, stages))
    return [*filter(None, found), f"--pipeline.layout='{layout}'"]


def _nearest(config: Config, key: str, value: int, candidates: Iterable[int]) -> str:
    """Return ``"num_layers=4 or 6"``: the nearest candidates below and above, or ``""``."""
    section, _, name = key.partition(".")

    def fits(candidate: int) -> bool:
        changed = getattr(config, section).model_copy(update={name: candidate})
        return layers_fit(config.model_copy(update={section: changed}))

    ordered = sorted(candidates, key=lambda candidate: abs(candidate - value))
    below = _first((number for number in ordered if number <= value), fits)
    above = _first((number for number in ordered if number > value), fits)
    closest = sorted(below + above, key=lambda number: abs(number - value))[:2]
    return f"--{key}={' or '.join(map(str, sorted(closest)))}" if closest else ""


def _first(numbers: Iterable[int], fits: Callable[[int], bool]) -> list[int]:
    return next(([number] for number in numbers if fits(number)), [])
