"""Fill derived settings; check rules that span sections or concern the number of processes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megacore._core import ScheduleInfo, schedule_catalog
from megacore.config.base import filled, nearest_divisors, nearest_multiples
from megacore.config.graph_rules import default_scopes, graph_problems
from megacore.config.layers import (
    layers_fit,
    layers_of_stages,
    mtp_stage,
    nearest_fits,
    stages_of_ranks,
)
from megacore.config.load import join_problems
from megacore.config.parallel import AXES
from megacore.config.sections import Config
from megacore.errors import ConfigError


def resolve(
    config: Config,
    world_size: int,
    *,
    vocab_size: int | None = None,
    cuda: bool | None = None,
    launcher: str = "--nproc",
) -> Config:
    """Fill every derived setting and check the whole, for a run on ``world_size`` processes.

    Resolving a resolved configuration changes nothing.

    Args:
        config: As loaded.
        world_size: Number of processes.
        vocab_size: Tokens of the tokenizer; fills an empty ``model.vocab_size``, which stays empty
            without it.
        cuda: Whether ranks use GPUs; ``None`` asks torch.
        launcher: What set the process count, for messages.

    Raises:
        ConfigError: One error for all rules that are broken, each with values, their places and the
            nearest fix.

    Example:
        >>> done = resolve(Config(), world_size=2, vocab_size=256, cuda=False)
        >>> done.model.ffn_hidden_size, done.run.dir, done.checkpoint.dir
        (384, 'runs/default', 'runs/default/checkpoints')
    """
    problems = _Problems(config=config, world_size=world_size, launcher=launcher)
    filled_in = _fill(config, world_size, vocab_size, cuda)
    for check in _CHECKS:
        check(problems, filled_in)
    if problems.found:
        raise ConfigError(join_problems(problems.found))
    return filled_in


# ---- derived settings ----------------------------------------------------------------------------


def _fill(config: Config, world_size: int, vocab_size: int | None, cuda: bool | None) -> Config:
    model, parallel, run = config.model, config.parallel, config.run
    ffn_hidden_size = model.ffn_hidden_size or -(-8 * model.hidden_size // 192) * 64
    steps = config.train.steps
    run_dir = run.dir or f"runs/{run.name}"
    sections = {
        "model": _filling(
            model,
            num_kv_heads=model.num_heads,
            head_dim=model.hidden_size // model.num_heads,
            ffn_hidden_size=ffn_hidden_size,
            vocab_size=vocab_size,
        ),
        "moe": _filling(config.moe, ffn_hidden_size=ffn_hidden_size),
        "parallel": _filling(parallel, etp=parallel.tp),
        "pipeline": _filling(config.pipeline, num_chunks=config.pipeline.chunks),
        "optimizer": _filling(
            config.optimizer,
            min_lr=config.optimizer.lr / 10,
            decay_steps={"cosine": steps, "wsd": max(1, steps // 5), "constant": 0}[
                config.optimizer.schedule
            ],
        ),
        "graphs": _filling(config.graphs, scopes=default_scopes(config)),
        "checkpoint": _filling(config.checkpoint, dir=f"{run_dir}/checkpoints"),
        "run": _filling(
            run,
            dir=run_dir,
            nproc=world_size,
            backend=run.backend or default_backend(cuda),
            trace_step=steps // 2,
        ),
    }
    derived = (
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section
        if value is not None and getattr(getattr(config, name), key) is None
    )
    return config.model_copy(update=sections).with_derived(derived)


def _filling(section: Any, **defaults: Any) -> Any:
    """The section with its empty fields among ``defaults`` filled."""
    empty = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return section.model_copy(update=empty)


def default_backend(cuda: bool | None) -> str:
    """``"nccl"`` where torch sees a GPU, else ``"gloo"``; ``cuda`` given saves the look."""
    if cuda is None:
        import torch

        cuda = torch.cuda.is_available()
    return "nccl" if cuda else "gloo"


# ---- rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Problems:
    """Collects broken rules; knows how to show a setting with its place."""

    config: Config
    world_size: int
    launcher: str
    found: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def shown(self, key: str, value: Any = None) -> str:
        """``"parallel.tp = 2 (demo.toml:9)"``; a derived value is given by the caller."""
        set_value = operator.attrgetter(key)(self.config)
        shown = set_value if set_value is not None else value
        return f"{key} = {shown} ({self.config.origin(key)})"


def _check_experts(problems: _Problems, config: Config) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts == 0:
        for key, needs in (("ep", parallel.ep > 1), ("etp", parallel.etp not in (1, parallel.tp))):
            if needs:
                problems.add(
                    f"{problems.shown(f'parallel.{key}')} is for experts, but "
                    f"{problems.shown('moe.num_experts')}; leave {key} out, or set num_experts"
                )
        return
    for key, axis in (("num_experts", "ep"), ("ffn_hidden_size", "etp")):
        value, size = filled(getattr(moe, key)), filled(getattr(parallel, axis))
        if value % size:
            problems.add(
                f"{problems.shown(f'moe.{key}', value)} is not a multiple of "
                f"{problems.shown(f'parallel.{axis}', size)}; nearest: "
                f"{axis}={nearest_divisors(size, value)}, or {key}={nearest_multiples(value, size)}"
            )
    if moe.shared_ffn_hidden_size % parallel.tp:
        problems.add(
            f"{problems.shown('moe.shared_ffn_hidden_size')} is not a multiple of "
            f"{problems.shown('parallel.tp')}; nearest: "
            f"{nearest_multiples(moe.shared_ffn_hidden_size, parallel.tp)}"
        )
    if moe.echo.domain is not None and parallel.ep % moe.echo.domain:
        problems.add(
            f"{problems.shown('moe.echo.domain')} does not divide {problems.shown('parallel.ep')}; "
            f"nearest: domain={nearest_divisors(moe.echo.domain, parallel.ep)}"
        )
    _check_shares_of_tokens(problems, config)
    if not moe.moe_layers(config.model.num_layers):
        problems.add(
            f"{problems.shown('moe.num_experts')}, but none of the {config.model.num_layers} "
            f"layers has experts: {problems.shown('moe.first_dense_layers')}, "
            f"{problems.shown('moe.layer_interval')}; lower one of them"
        )
    _check_expert_layout(problems, config)


def _check_shares_of_tokens(problems: _Problems, config: Config) -> None:
    """Ranks of tp that hold the same tokens route equal shares of them."""
    parallel, length = config.parallel, config.model.seq_length
    slices = 2 * parallel.cp if parallel.cp > 1 else 1
    unit = parallel.tp * slices
    # What the slices alone do not fit is the business of _check_sequence_fits_cp.
    if parallel.sequence_parallel or length % slices or length % unit == 0:
        return
    factors = problems.shown("parallel.tp") + (
        f" * 2 * {problems.shown('parallel.cp')} = {unit}" if slices > 1 else ""
    )
    problems.add(
        f"{problems.shown('model.seq_length')} is not a multiple of {factors}: the ranks of tp "
        f"share the tokens that they route; nearest: {nearest_multiples(length, unit)}"
    )


def _check_expert_layout(problems: _Problems, config: Config) -> None:
    parallel, world = config.parallel, problems.world_size
    etp = filled(parallel.etp)
    most = max(1, world // (etp * parallel.pp))
    product = etp * parallel.ep * parallel.pp
    if world % (parallel.tp * parallel.cp * parallel.pp) == 0 and world % product:
        problems.add(
            f"the experts do not fit {_count(world, 'process')} ({problems.launcher}): "
            f"{problems.shown('parallel.etp', etp)} x {problems.shown('parallel.ep')} x "
            f"{problems.shown('parallel.pp')} = {product}, and {world} is not a multiple of it; "
            f"nearest: ep={nearest_divisors(parallel.ep, most)}, or start "
            f"{nearest_multiples(world, product)} processes"
        )


def _check_layout(problems: _Problems, config: Config) -> None:
    parallel, world = config.parallel, problems.world_size
    product = parallel.tp * parallel.cp * parallel.pp
    if world % product == 0:
        if world > product and "dp" not in parallel.order.split("-"):
            problems.add(
                f"{problems.shown('parallel.order')} leaves out dp, which has size "
                f'{world // product} on {world} processes; for example "{"-".join(AXES)}"'
            )
        return
    factors = " x ".join(
        f"{axis} {getattr(parallel, axis)} ({config.origin(f'parallel.{axis}')})"
        for axis in ("tp", "cp", "pp")
    )
    fixes = [f"start {nearest_multiples(world, product)} processes"]
    fixes += [f"use {layout}" for layout in _nearest_layouts(config, world)]
    problems.add(
        f"the layout does not fit {_count(world, 'process')} ({problems.launcher}): {factors} = "
        f"{product}, and {world} is not a multiple of it; nearest: {', or '.join(fixes)}"
    )


def _nearest_layouts(config: Config, world: int) -> list[str]:
    """Up to two settings of tp and pp that fit the world and the model, fewest changes first."""
    tp, pp, model = config.parallel.tp, config.parallel.pp, config.model
    stages_per_rank = config.pipeline.chunks
    fitting = [
        (new_tp, new_pp)
        for new_tp in _divisors(world)
        for new_pp in _divisors(world // new_tp)
        if filled(model.num_kv_heads) % new_tp == 0 and new_pp * stages_per_rank <= model.num_layers
    ]

    def distance(layout: tuple[int, int]) -> tuple[int, float]:
        changed = (layout[0] != tp) + (layout[1] != pp)
        return changed, abs(layout[0] - tp) / tp + abs(layout[1] - pp) / pp

    best = sorted(fitting, key=distance)[:2]
    return [f"tp={new_tp} pp={new_pp}" for new_tp, new_pp in best]


def _check_model_fits_tp(problems: _Problems, config: Config) -> None:
    tp = config.parallel.tp
    keys = ["num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_pad_multiple"]
    if config.parallel.sequence_parallel:
        keys.append("seq_length")
    for key in keys:
        value = getattr(config.model, key)
        if value % tp:
            shown = problems.shown(f"model.{key}", value)
            problems.add(
                f"{shown} is not a multiple of {problems.shown('parallel.tp')}; nearest: "
                f"tp={nearest_divisors(tp, value)}, or {key}={nearest_multiples(value, tp)}"
            )


def _check_sequence_fits_cp(problems: _Problems, config: Config) -> None:
    """Context parallelism cuts a sequence into two slices per rank, to balance causal attention."""
    parallel, length = config.parallel, config.model.seq_length
    slices = parallel.tp if parallel.sequence_parallel else 1
    unit = 2 * parallel.cp * slices
    if parallel.cp > 1 and length % unit:
        factors = f"2 * {problems.shown('parallel.cp')}" + (
            f" * {problems.shown('parallel.tp')}" if slices > 1 else ""
        )
        problems.add(
            f"{problems.shown('model.seq_length')} is not a multiple of {factors} = {unit}, the "
            f"slices of a sequence; nearest seq_length: {nearest_multiples(length, unit)}"
        )


def _check_pipeline(problems: _Problems, config: Config) -> None:
    pipeline, pp, info = config.pipeline, config.parallel.pp, config.pipeline.schedule_info
    schedule = problems.shown("pipeline.schedule")
    chunks = problems.shown("pipeline.num_chunks", pipeline.chunks)
    own_chunks = info.num_chunks if info is not None else 2 * pipeline.is_v
    if info is not None and info.placement == "bidirectional":
        problems.add(
            f"{schedule} keeps two copies of the model on different ranks, whose gradients "
            "training does not add up; use dualpipe_v, which overlaps the same passes with one copy"
        )
    elif own_chunks and pipeline.chunks != own_chunks:
        problems.add(
            f"{chunks} does not fit {schedule}, which has {own_chunks}; leave num_chunks out, or "
            f"use one of {_names(lambda other: other.num_chunks == 0)}"
        )
    elif pipeline.schedule == "no_pipelining":
        if pp > 1:
            problems.add(
                f"{schedule} runs on one pipeline rank, but {problems.shown('parallel.pp')}; set "
                "parallel.pp to 1, or use 1f1b"
            )
    elif pipeline.schedule.startswith("interleaved") and pipeline.chunks == 1:
        problems.add(f"{schedule} needs pipeline.num_chunks > 1; set it to 2, or use 1f1b")
    if pipeline.schedule.startswith("interleaved") and pp == 1:
        problems.add(f"{schedule} needs parallel.pp > 1; set it to 2, or use 1f1b")
    if pipeline.group_size is not None and (info is None or not info.takes_group_size):
        problems.add(
            f"{problems.shown('pipeline.group_size')} needs one of the schedules "
            f"{_names(lambda other: other.takes_group_size)}, but {schedule}; leave group_size out "
            "or change the schedule"
        )
    for key, is_set in (
        ("placement", pipeline.placement != "loop"),
        ("memory_limit", pipeline.memory_limit is not None),
    ):
        if info is not None and is_set:
            problems.add(
                f"{problems.shown(f'pipeline.{key}')} is for the schedule auto, but {schedule}; "
                f"leave {key} out or change the schedule"
            )
    if pipeline.overlap_moe:
        _check_overlap_moe(problems, config)
    if pipeline.split_weight_grads and (
        not pipeline.overlap_moe or info is None or not info.takes_pairs
    ):
        key = "pipeline.overlap_moe" if not pipeline.overlap_moe else "pipeline.schedule"
        problems.add(
            f"{problems.shown('pipeline.split_weight_grads')} fills the exchanges of overlap_moe "
            f"with {_names(lambda other: other.takes_pairs)}, but {problems.shown(key)}; change "
            "that, or turn split_weight_grads off"
        )
    if own_chunks in (0, pipeline.chunks):  # else the stages are not known
        _check_layers(problems, config)


def _check_overlap_moe(problems: _Problems, config: Config) -> None:
    place, pipeline = problems.shown("pipeline.overlap_moe"), config.pipeline
    info = pipeline.schedule_info
    if pipeline.schedule != "dualpipe_v" and (info is None or not info.takes_pairs):
        problems.add(
            f"{place} needs a schedule that pairs a forward with the backward of another "
            f"microbatch, but {problems.shown('pipeline.schedule')}; use "
            f"{_names(lambda other: other.takes_pairs)} or dualpipe_v, or turn it off"
        )
    if config.moe.num_experts == 0 or config.parallel.ep == 1:
        key = "moe.num_experts" if config.moe.num_experts == 0 else "parallel.ep"
        problems.add(
            f"{place} hides the way of rows between ranks that share experts, but "
            f"{problems.shown(key)}; turn it off"
        )
    elif config.moe.dispatcher == "allgather":
        problems.add(
            f"{place} needs exchanges that can be started and waited for, but "
            f"{problems.shown('moe.dispatcher')}; use alltoall or static, or turn it off"
        )
    if config.moe.echo.spare_slots > 0:
        problems.add(
            f"{place} computes two microbatches in turns, but clones of one at a time fit "
            f"{problems.shown('moe.echo.spare_slots')}; set spare_slots = 0, or turn it off"
        )
    if config.graphs.mode != "off":
        problems.add(
            f"{place} runs parts of two passes in turns, but graphs share memory in the order of "
            f'whole passes: {problems.shown("graphs.mode")}; set mode = "off", or turn it off'
        )


def _names(matches: Callable[[ScheduleInfo], bool]) -> str:
    return ", ".join(info.name for info in schedule_catalog() if matches(info))


def _check_layers(problems: _Problems, config: Config) -> None:
    pipeline, pp, layers = config.pipeline, config.parallel.pp, config.model.num_layers
    if pipeline.layout is not None:
        _check_pipeline_layout(problems, config)
        return
    stages = pp * pipeline.chunks
    units = layers + pipeline.account_for_embedding + pipeline.account_for_loss
    if stages > units:
        problems.add(
            f"{problems.shown('model.num_layers')} cannot fill the {stages} stages of "
            f"{problems.shown('parallel.pp')} x "
            f"{problems.shown('pipeline.num_chunks', pipeline.chunks)}; "
            f"use at least {stages} layers, or at most {units} stages"
        )
        return
    fixed = (pipeline.first_layers or 0) + (pipeline.last_layers or 0)
    if fixed > layers:
        problems.add(
            f"pipeline.first_layers + pipeline.last_layers = {fixed} is more than "
            f"{problems.shown('model.num_layers')}"
        )
    elif not layers_fit(config):
        settings = [problems.shown("parallel.pp")]
        if pipeline.chunks > 1:
            settings.append(problems.shown("pipeline.num_chunks", pipeline.chunks))
        for key in ("first_layers", "last_layers", "account_for_embedding", "account_for_loss"):
            if getattr(pipeline, key) not in (None, False):
                settings.append(problems.shown(f"pipeline.{key}"))
        fixes = nearest_fits(config, problems.world_size)
        nearest = f"; nearest, changing one setting: {', or '.join(fixes)}" if fixes else ""
        problems.add(
            f"{problems.shown('model.num_layers')} cannot be dealt to pipeline stages with "
            f"{', '.join(settings)}: all stages but those of first_layers and last_layers hold "
            f"equally many{nearest}"
        )


def _check_pipeline_layout(problems: _Problems, config: Config) -> None:
    place = f"pipeline.layout ({config.origin('pipeline.layout')})"
    try:
        stages, further = layers_of_stages(config), mtp_stage(config)
    except ValueError as error:
        problems.add(f"{place}: {error}")
        return
    for rank, mine in enumerate(stages_of_ranks(config)):
        # The first stage has the embedding and the last one the head, with or without layers.
        if not any(stages[stage] or stage in (0, further, len(stages) - 1) for stage in mine):
            problems.add(
                f"{place}: pipeline rank {rank} gets neither layers nor embedding nor head, so it "
                f"has nothing to train; give one of its stages ({', '.join(map(str, mine))}) a "
                "layer, a t"
            )


def _check_batch(problems: _Problems, config: Config) -> None:
    dp = config.dp(problems.world_size)
    if dp == 0 or problems.world_size % dp:
        return  # The layout itself is wrong and already reported.
    unit = config.train.microbatch_size * dp
    batch = config.train.global_batch_size
    if batch % unit:
        problems.add(
            f"{problems.shown('train.global_batch_size')} is not a multiple of "
            f"{problems.shown('train.microbatch_size')} x dp {dp} "
            f"({_count(problems.world_size, 'process')} / tp*cp*pp) = {unit}; "
            f"nearest: {nearest_multiples(batch, unit)}"
        )


def _check_instances(problems: _Problems, config: Config) -> None:
    dp, count = config.dp(problems.world_size), config.optimizer.num_instances
    if dp > 0 and dp % count:
        problems.add(
            f"{problems.shown('optimizer.num_instances')} does not divide dp {dp} "
            f"({_count(problems.world_size, 'process')} / tp*cp*pp); "
            f"nearest: {nearest_divisors(count, dp)}"
        )
    parallel = config.parallel
    expert_dp = problems.world_size // (filled(parallel.etp) * parallel.ep * parallel.pp)
    if config.moe.num_experts > 0 and expert_dp > 0 and expert_dp % count:
        problems.add(
            f"{problems.shown('optimizer.num_instances')} does not divide edp {expert_dp} "
            f"({_count(problems.world_size, 'process')} / etp*ep*pp); "
            f"nearest: {nearest_divisors(count, expert_dp)}"
        )


def _check_recompute(problems: _Problems, config: Config) -> None:
    if "moe" in config.train.recomputed and config.moe.num_experts == 0:
        problems.add(
            f"{problems.shown('train.recompute_modules')} names moe, but the model has no experts "
            "(moe.num_experts = 0); leave it out"
        )


def _check_graphs(problems: _Problems, config: Config) -> None:
    for problem in graph_problems(
        config, lambda key: problems.shown(key, operator.attrgetter(key)(config))
    ):
        problems.add(problem)


def _check_decay(problems: _Problems, config: Config) -> None:
    steps, optimizer = config.train.steps, config.optimizer
    set_decay = problems.config.optimizer.decay_steps
    decay = problems.shown("optimizer.decay_steps", optimizer.decay_steps)
    warmup = problems.shown("optimizer.warmup_steps")
    if optimizer.schedule == "cosine" and set_decay is not None:
        if set_decay <= optimizer.warmup_steps:
            problems.add(
                f"{decay} is not above {warmup}: the decay would end before it begins; "
                f"use at least {optimizer.warmup_steps + 1}"
            )
    elif optimizer.schedule == "wsd":
        room = max(0, steps - optimizer.warmup_steps)
        if filled(optimizer.decay_steps) > room:
            problems.add(
                f"{decay} plus {warmup} is more than {problems.shown('train.steps')}; use at most "
                f"{room} decay steps"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


_CHECKS: tuple[Callable[[_Problems, Config], None], ...] = (
    _check_layout,
    _check_experts,
    _check_model_fits_tp,
    _check_sequence_fits_cp,
    _check_pipeline,
    _check_batch,
    _check_instances,
    _check_recompute,
    _check_graphs,
    _check_decay,
)
