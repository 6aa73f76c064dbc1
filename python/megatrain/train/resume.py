"""Continuation of a run: weights, optimizer, order of data, history of losses, callbacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megacore.errors import CheckpointError, ConfigError
from megacore.optim.weight_average import AVERAGE
from megacore.qualification import keep_choice
from megatrain.checkpoint import FoundCheckpoint, TrainState, load_checkpoint
from megatrain.checkpoint.changes import changed_settings
from megatrain.checkpoint.format import read_index
from megatrain.data.loading import load_run_data, run_order_sizes
from megatrain.train.callbacks import Callback
from megatrain.train.control import RunControl
from megatrain.train.trainer import Trainer


def resume_run(
    trainer: Trainer, found: FoundCheckpoint, control: RunControl, callbacks: Sequence[Callback]
) -> tuple[Trainer, TrainState, tuple[str, ...]]:
    """Load the found checkpoint, if any. Collective.

    Returns:
        The trainer with the data of the run, the loaded state (step 0 without a checkpoint), and
        notes on everything that makes the run differ from an unbroken one.

    Raises:
        CheckpointError: As `load_checkpoint`, or if a state is invalid.
    """
    config = trainer.config
    if found.path is None:
        notes: tuple[str, ...] = ()
        if config.checkpoint.resume == "auto":
            place = config.checkpoint.dir
            notes = (f"checkpoint.resume = auto: no checkpoint in {place}, so this is a new run",)
        return trainer, TrainState(step=0, samples=0, tokens=0, optimizer={}), notes
    optimizer = trainer.optimizer
    index = read_index(found.path)
    has_average = index.config.get("optimizer", {}).get("ema_decay", 0.0) > 0.0
    state = load_checkpoint(
        found.path,
        [piece for piece in trainer.pieces() if has_average or AVERAGE not in piece.tensors],
        groups=trainer.groups,
        config=config.model_dump(),
        verified=found.verified,
    )
    try:
        optimizer.load_scalars(state.optimizer)
        control.load_state(state.control)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {found.path}: {error}") from error
    optimizer.finish_load(optimizer.step_count)
    if trainer.average is not None and not has_average:
        trainer.average.restart()
    _load_callbacks(config.train.callbacks, callbacks, state.callbacks)
    changed = changed_settings(found.path, config)
    kernels, changes = keep_choice(trainer.kernels, state.kernels)
    kernels.use()
    trainer = replace(trainer, kernels=kernels)
    trainer, notes = _continue_order(trainer, found.path, state)
    state = replace(state, tokens=index.tokens)
    return trainer, state, changed + changes + notes + _changed_sources(trainer, state)


def run_state(
    trainer: Trainer,
    control: RunControl,
    callbacks: Sequence[Callback],
    *,
    step: int,
    samples: int,
    tokens: int,
) -> TrainState:
    """Collect everything that a resumed run needs besides tensors.

    Raises:
        ConfigError: If the state of a callback is not JSON.
    """
    data = {"order_sizes": dict(trainer.data.order_sizes), "sources": _source_facts(trainer)}
    return TrainState(
        step=step,
        samples=samples,
        tokens=tokens,
        optimizer=trainer.optimizer.scalars(),
        control=control.state(),
        data=data,
        kernels=trainer.kernels.state(),
        callbacks=_callback_states(trainer.config.train.callbacks, callbacks),
        base={} if trainer.base is None else trainer.base.as_state(),
    )


# ---- data ----------------------------------------------------------------------------------------


def _continue_order(
    trainer: Trainer, found: Path, state: TrainState
) -> tuple[Trainer, tuple[str, ...]]:
    """Continue Megatron's order as it was built when the run started."""
    config, present = trainer.config, trainer.data.order_sizes
    if not present:
        return trainer, ()
    sizes = dict(state.data.get("order_sizes", {}))
    theirs = read_index(found).config
    if not state.data and theirs.get("data", {}).get("order") == "megatron":
        # Format version 2, whose runs built the order of the configuration.
        sizes = run_order_sizes(theirs["train"])
    train = config.train
    num_read = state.samples + max(0, train.steps - state.step) * train.global_batch_size
    if not sizes or (sizes == present and num_read <= sizes["train"]):
        return trainer, ()
    data = load_run_data(config, order_sizes=sizes, num_read=num_read)
    note = (
        f"data.order = megatron: the run goes on in the order built for {sizes['train']:,} samples "
        f"at its start, and reads {num_read:,}"
    )
    return replace(trainer, data=data, prefetched={}), (note,)


def _source_facts(trainer: Trainer) -> dict[str, list[int]]:
    return {name: source.facts() for name, source in trainer.data.sources.items()}


def _changed_sources(trainer: Trainer, state: TrainState) -> tuple[str, ...]:
    """Return notes on sources of the same name with other content."""
    before, now = state.data.get("sources", {}), _source_facts(trainer)
    return tuple(
        f"the data of {name} have changed since the checkpoint "
        f"({before[name][0]:,} tokens -> {now[name][0]:,}), and with them the order of samples"
        for name in sorted(before.keys() & now.keys())
        if list(before[name]) != now[name]
    )


# ---- callbacks -----------------------------------------------------------------------------------


def _callback_states(names: Sequence[str], callbacks: Sequence[Callback]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, callback in zip(names, callbacks, strict=True):
        if not hasattr(callback, "state_dict") or not (state := callback.state_dict()):
            continue
        try:
            # A copy, which the callback cannot change while it is written.
            states[name] = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'train.callbacks = "{name}": state_dict() must return JSON values, got {error}'
            ) from error
    return states


def _load_callbacks(
    names: Sequence[str], callbacks: Sequence[Callback], states: Mapping[str, Any]
) -> None:
    for name, callback in zip(names, callbacks, strict=True):
        if name in states and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(states[name])
