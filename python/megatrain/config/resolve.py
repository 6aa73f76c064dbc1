"""Fill derived settings; check rules that span sections or concern the number of processes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from megacore.errors import ConfigError
from megatrain.config import resolved
from megatrain.config.base import Section, require_section
from megatrain.config.graph_rules import default_transport, graph_problems
from megatrain.config.layout_rules import LAYOUT_RULES
from megatrain.config.load import join_problems
from megatrain.config.pipeline import DEFAULT_SCHEDULE
from megatrain.config.pipeline_rules import check_pipeline
from megatrain.config.preference_rules import check_preference
from megatrain.config.problems import ConfigErrors
from megatrain.config.resolved import ResolvedConfig
from megatrain.config.schedule_file import COPY_NAME, read_schedule_file
from megatrain.config.sections import Config
from megatrain.config.unused import surprise_notes, unused_notes

S = TypeVar("S", bound=Section)


def resolve(
    config: Config,
    world_size: int,
    *,
    vocab_size: int | Callable[[], int] | None = None,
    cuda: bool | None = None,
    launcher: str = "--nproc",
) -> ResolvedConfig:
    """Fill every derived setting and check the configuration for ``world_size`` processes.

    Resolving a resolved configuration changes nothing.

    Args:
        config: The loaded configuration.
        world_size: Number of processes.
        vocab_size: Tokens of the tokenizer, the default of ``model.vocab_size``. A function is
            called when all rules hold, because a tokenizer may have to be loaded.
        cuda: Whether ranks use GPUs; default: ``torch.cuda.is_available()``. torch is imported
            when all rules hold; before, if they depend on it, as those of graphs do.
        launcher: The option or environment that set the process count, for messages.

    Raises:
        TypeError: If ``config`` is not a configuration.
        ConfigError: One error for all violated rules, each with values, their places and the
            nearest fix.

    Example:
        >>> done = resolve(Config(), world_size=2, vocab_size=256, cuda=False)
        >>> done.model.ffn_hidden_size, done.run.dir, done.checkpoint.dir
        (384, 'runs/default', 'runs/default/checkpoints')
    """
    require_section(config, Config, "config")
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, got {world_size}")
    if vocab_size is None and config.model.vocab_size is None:
        raise ConfigError("model.vocab_size must be set if no tokenizer is loaded, got none")
    config = _with_schedule(config)
    backend = config.run.backend
    if backend is None and config.graphs.mode != "off":
        backend = default_backend(cuda)
    # No rule depends on the vocabulary: its rows are padded.
    fill = functools.partial(_fill, vocab_size=1, backend=backend or "gloo")
    filled = fill(config, world_size)
    problems = ConfigErrors(
        config=config,
        filled=filled,
        world_size=world_size,
        launcher=launcher,
        accepts=functools.partial(_accepts, config, fill),
    )
    for check in _CHECKS:
        check(problems, filled)
    if problems.found:
        raise ConfigError(join_problems(problems.found))
    done = _fill(
        config,
        world_size,
        vocab_size=vocab_size() if callable(vocab_size) else vocab_size,
        backend=backend or default_backend(cuda),
    )
    return done.with_notes((*unused_notes(config, done), *surprise_notes(done)))


def _accepts(
    config: Config, fill: Callable[..., ResolvedConfig], world_size: int, **sizes: int
) -> bool:
    """Return whether the layout rules hold with other processes and sizes of parallel axes."""
    parallel = config.parallel.model_copy(update=sizes)
    config = config.model_copy(update={"parallel": parallel})
    filled = fill(config, world_size)
    problems = ConfigErrors(
        config=config,
        filled=filled,
        world_size=world_size,
        launcher="",
        accepts=lambda *_, **__: False,
    )
    for check in (*LAYOUT_RULES, check_pipeline):
        check(problems, filled)
    return not problems.found


# ---- derived settings ----------------------------------------------------------------------------


def _fill(
    config: Config,
    world_size: int,
    *,
    vocab_size: int | None,
    backend: Literal["gloo", "nccl"],
) -> ResolvedConfig:
    model, parallel, run = config.model, config.parallel, config.run
    latent = model.mla.nope_head_dim + model.mla.rope_head_dim if model.mla.kv_rank else None
    ffn_hidden_size = model.ffn_hidden_size or model.default_ffn_hidden_size
    steps, has_pairs = config.train.steps, config.preference.loss is not None
    sections = {
        "model": _filling(
            resolved.ResolvedModelConfig,
            model,
            num_kv_heads=model.num_heads,
            head_dim=latent or model.hidden_size // model.num_heads,
            ffn_hidden_size=ffn_hidden_size,
            vocab_size=vocab_size,
        ),
        "moe": _filling(
            resolved.ResolvedMoEConfig, config.moe, ffn_hidden_size=ffn_hidden_size
        ).model_copy(update={"static_transport": default_transport(config)}),
        "parallel": _filling(resolved.ResolvedParallelConfig, parallel, etp=parallel.tp),
        "pipeline": _filling(
            resolved.ResolvedPipelineConfig,
            config.pipeline,
            schedule=DEFAULT_SCHEDULE if config.pipeline.schedule_file is None else None,
            num_chunks=config.pipeline.chunks,
        ).with_file(config.pipeline.file),
        # Answers of a pair do not see each other.
        "data": config.data.model_copy(
            update={"document_mask": config.data.document_mask or has_pairs}
        ),
        "train": _filling(
            resolved.ResolvedTrainConfig,
            config.train,
            dtype="bfloat16" if backend == "nccl" else "float32",
        ),
        "optimizer": _filling(
            resolved.ResolvedOptimizerConfig,
            config.optimizer,
            overlap="all" if backend == "nccl" else "none",
            min_lr=config.optimizer.lr / 10,
        ),
        "checkpoint": _filling(
            resolved.ResolvedCheckpointConfig, config.checkpoint, dir=f"{run.dir}/checkpoints"
        ),
        "run": _filling(resolved.ResolvedRunConfig, run, nproc=world_size, backend=backend),
        "debug": _filling(
            resolved.ResolvedDebugConfig, config.debug, trace_step=max(1, steps // 2)
        ),
    }
    derived = (
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section
        if getattr(getattr(config, name), key) != value
    )
    values = {**dict(config), **sections}
    return ResolvedConfig.model_construct(**values).with_origins_of(config, derived)


def _with_schedule(config: Config) -> Config:
    """Read the schedule of `pipeline.schedule_file`, unless that was done."""
    pipeline, place = config.pipeline, config.origin("pipeline.schedule_file")
    if pipeline.schedule_file is None or pipeline.has_read_file:
        return config
    try:
        file = read_schedule_file(pipeline.schedule_file, place=place)
    except ConfigError as error:
        kept = Path(config.run.dir) / COPY_NAME
        if Path(pipeline.schedule_file).exists() or not kept.is_file():
            raise
        raise ConfigError(f"{error}; {config.run.dir} keeps a copy, {kept}") from None
    return config.model_copy(update={"pipeline": pipeline.with_file(file)})


def _filling(resolved_class: type[S], section: Section, **defaults: Any) -> S:
    """Return the section as its resolved class, with the defaults where it has no value."""
    values = dict(section)
    values |= {name: value for name, value in defaults.items() if values[name] is None}
    return resolved_class.model_construct(**values)


def default_backend(cuda: bool | None) -> Literal["gloo", "nccl"]:
    """Return ``"nccl"`` if torch has a GPU, else ``"gloo"``; a given ``cuda`` skips the query."""
    if cuda is None:
        import torch

        cuda = torch.cuda.is_available()
    return "nccl" if cuda else "gloo"


# ---- rules of the other sections -----------------------------------------------------------------


def _check_recompute(problems: ConfigErrors, config: ResolvedConfig) -> None:
    if "moe" in config.train.recomputed and config.moe.num_experts == 0:
        problems.add(
            f"{problems.shown('train.recompute')} names moe, but the model has no experts "
            "(moe.num_experts = 0); leave it out"
        )


def _check_fp8(problems: ConfigErrors, config: ResolvedConfig) -> None:
    if config.train.fp8 != "off" and config.has_clones:
        problems.add(
            'train.fp8 must be "off" where experts have clones '
            f"({problems.shown('moe.echo.num_spare_slots')}), got {problems.shown('train.fp8')}; "
            "set one of them to its default"
        )


def _check_lora(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check that dropout of adapters knows the tokens of its inputs."""
    if config.lora.dropout == 0.0:
        return
    shown = problems.shown("lora.dropout")
    if config.model.mla.kv_rank and config.parallel.cp > 1:
        problems.add(
            f"{shown} needs parallel.cp = 1 with latent attention, whose latents are those of all "
            f"cp ranks, got {problems.shown('parallel.cp')}; set one of them to its default"
        )
    if config.model.factory is not None:
        problems.add(
            f"{shown} must be 0.0 with {problems.shown('model.factory')}, whose layers do not know "
            "the tokens of their inputs; leave it out"
        )


def _check_own_model(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check that a model of the user's own needs nothing that only megacore's GPT has."""
    if config.model.factory is None:
        if config.model.options:
            problems.add(
                f"{problems.shown('model.options')} are settings of model.factory, which is not "
                "set; set it, or leave them out"
            )
        return
    only = {
        "model.num_mtp_layers": (0, "multi-token prediction is part of"),
        "train.recompute": ([], "it recomputes layers of"),
        "graphs.mode": ("off", "it captures layers of"),
        "run.calibration": (None, "predictions count operations of"),
    }
    for key, (allowed, reason) in only.items():
        if operator.attrgetter(key)(config) != allowed:
            problems.add(
                f"{problems.shown(key)} cannot be combined with {problems.shown('model.factory')}: "
                f"{reason} megacore's GPT; leave {key} out"
            )


def _check_graphs(problems: ConfigErrors, config: ResolvedConfig) -> None:
    for problem in graph_problems(config, problems.shown):
        problems.add(problem)


def _check_transport(problems: ConfigErrors, config: ResolvedConfig) -> None:
    if config.moe.static_transport != "auto" and config.moe.dispatcher != "static":
        problems.add(
            f'{problems.shown("moe.static_transport")} is for moe.dispatcher = "static", but '
            f"{problems.shown('moe.dispatcher')}; set that, or leave static_transport out"
        )


def _check_decay(problems: ConfigErrors, config: ResolvedConfig) -> None:
    optimizer, warmup = config.optimizer, problems.shown("optimizer.warmup")
    if optimizer.schedule == "constant":
        return
    if optimizer.decay_end is not None and optimizer.decay_end <= optimizer.warmup:
        problems.add(
            f"{problems.shown('optimizer.decay_end')} is not above {warmup}: the decay would end "
            f"before it begins; use at least {optimizer.warmup + 1}"
        )
    elif optimizer.schedule == "wsd" and optimizer.tail_length is not None:
        total = optimizer.rate_of_run(
            steps=config.train.steps,
            global_batch_size=config.train.global_batch_size,
            seq_length=config.model.seq_length,
        ).total
        is_set = optimizer.decay_end is not None
        end = total if optimizer.decay_end is None else optimizer.decay_end
        room = max(0, end - optimizer.warmup)
        if optimizer.tail_length > room:
            last = problems.shown("optimizer.decay_end" if is_set else "train.steps")
            problems.add(
                f"{problems.shown('optimizer.tail_length')} plus {warmup} is more than {last}; "
                f"use a tail of at most {room} {optimizer.schedule_unit}"
            )


def _check_traced_steps(problems: ConfigErrors, config: ResolvedConfig) -> None:
    profiled = config.debug.profiled
    if config.debug.profile_steps is not None and not (
        0 <= profiled.start < profiled.stop <= config.train.steps
    ):
        problems.add(
            "debug.profile_steps must be one step or an ascending range of steps from 1 to "
            f"{config.train.steps}, as in 10-12, got {problems.shown('debug.profile_steps')}; "
            "change it or train.steps"
        )
    steps, traced = config.train.steps, config.debug.trace_step
    if traced == 0 or traced > steps:
        legal = f"1 to {steps}" if steps > 1 else "1"
        problems.add(
            f"debug.trace_step must be {legal}, a step of {problems.shown('train.steps')}, or -1 "
            f"for no timeline, got {problems.shown('debug.trace_step')}"
        )


_CHECKS: tuple[Callable[[ConfigErrors, ResolvedConfig], None], ...] = (
    *LAYOUT_RULES,
    check_pipeline,
    check_preference,
    _check_recompute,
    _check_own_model,
    _check_lora,
    _check_fp8,
    _check_graphs,
    _check_transport,
    _check_decay,
    _check_traced_steps,
)
