"""Settings that affect results and differ between a checkpoint and the run that continues it."""

from __future__ import annotations

import copy
import dataclasses
import filecmp
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.optim import RateOptions, learning_rate
from megatrain.checkpoint.format import read_index
from megatrain.checkpoint.model_files import tokenizer_beside
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, tokenizer_files
from megatrain.config import OptimizerConfig, ResolvedConfig

# The settings of a section that affect results.
_COMPARED: Mapping[str, frozenset[str]] = {
    "train": frozenset(
        {
            *("seed", "global_batch_size", "dtype", "fp8", "loss", "loss_normalization"),
            *("callbacks", "on_spike", "max_skipped_steps", "eval_steps"),
        }
    ),
    "debug": frozenset({"force_balanced", "replay_routing"}),
}
# In these sections, all others do: those named are used at the start of a fresh run only, or affect
# speed and memory.
_NOT_COMPARED: Mapping[str, frozenset[str]] = {
    "model": frozenset({"init_std"}),
    "moe": frozenset({"static_transport"}),
    "data": frozenset({"cache"}),
    "optimizer": frozenset(
        {
            *("overlap", "distributed", "num_instances", "loss_scale"),
            *("bucket_numel", "pad_for_ring", "average_in_collective"),
        }
    ),
}
# Those of [train] that a run has from its start to its end.
_IDENTITY = frozenset({"seed", "global_batch_size"})
# Settings that the learning rate is a function of, beside ``train.steps``; noted in one line.
_RATE = tuple(field.name for field in dataclasses.fields(RateOptions))
_LONGEST_VALUE = 60


def changed_settings(found: Path, config: ResolvedConfig) -> tuple[str, ...]:
    """List notes on settings that affect results and differ from the checkpoint.

    Args:
        found: The checkpoint that this run continues from.
        config: Resolved configuration of this run.
    """
    theirs, ours, step = _values(found, config)
    return compare_settings(theirs, ours, step=step)


def is_same_run(found: Path, config: ResolvedConfig) -> bool:
    """Check if a checkpoint is of the same model, data, seed and batch size.

    Such a run can be restarted with other settings of the optimizer, for example.
    """
    theirs, ours, _ = _values(found, config)
    return not any(
        _changes(key, theirs[section][key], ours[section][key])
        for section in ("model", "moe", "data", "train")
        for key in theirs.get(section, {}).keys() & ours[section].keys()
        if _is_compared(section, key) and (section != "train" or key in _IDENTITY)
    )


def _values(found: Path, config: ResolvedConfig) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the settings of a checkpoint and those of this run, and the next step."""
    index = read_index(found)
    ours = json.loads(config.model_dump_json())
    theirs = copy.deepcopy(dict(index.config))
    if _has_tokenizer_of(found, config.data.tokenizer):
        theirs = theirs | {"data": theirs.get("data", {}) | {"tokenizer": config.data.tokenizer}}
    return theirs, ours, index.state.step


def _has_tokenizer_of(found: Path, tokenizer: str) -> bool:
    """Check if the tokenizer beside a checkpoint has the content of the configured one."""
    beside = tokenizer_files(tokenizer_beside(tokenizer, found))
    mine = tokenizer_files(tokenizer)
    if TOKENIZER_NAME not in beside or TOKENIZER_NAME not in mine:
        return False
    return filecmp.cmp(beside[TOKENIZER_NAME], mine[TOKENIZER_NAME], shallow=False)


def compare_settings(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, step: int = 0
) -> tuple[str, ...]:
    """List the notes of `changed_settings` from plain values.

    Args:
        theirs: Sections of the checkpoint.
        ours: Sections of this run.
        step: The next step, from 0.

    Example:
        >>> compare_settings({"train": {"seed": 1, "steps": 9}}, {"train": {"seed": 2, "steps": 8}})
        ('train.seed 1 -> 2 since the checkpoint',)
    """
    notes = _rate_notes(theirs, ours, step)
    for section in ("optimizer", "model", "moe", "data", "train", "debug"):
        before, now = theirs.get(section, {}), ours.get(section, {})
        for key in sorted(set(before) & set(now)):
            if _is_compared(section, key):
                changes = _changes(f"{section}.{key}", before[key], now[key])
                notes += [f"{change} since the checkpoint" for change in changes]
    scales = [values.get("optimizer", {}).get("loss_scale") for values in (theirs, ours)]
    if scales[0] != scales[1] and ours.get("train", {}).get("dtype") == "float16":
        notes.append("optimizer.loss_scale is not used: the loss scale of the checkpoint goes on")
    return tuple(notes)


def _is_compared(section: str, key: str) -> bool:
    if section == "optimizer" and key in _RATE:
        return False
    if section in _COMPARED:
        return key in _COMPARED[section]
    return key not in _NOT_COMPARED[section]


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Return ``"name before -> now"`` for a value, or for each value of a table that differs."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        return [
            change
            for key in keys
            for change in _changes(f"{name}.{key}", before.get(key), now.get(key))
        ]
    shown = f"{_show(before)} -> {_show(now)}"
    return [f"{name} {shown}" if len(shown) <= _LONGEST_VALUE else f"{name} has changed"]


def _show(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return _show_number(value) if isinstance(value, float) else str(value)


def _show_number(value: float) -> str:
    """Format a number briefly.

    Example:
        >>> _show_number(6.38e-4), _show_number(0.1), _show_number(65536.0)
        ('6.38e-4', '0.1', '65536')
    """
    if value != 0 and abs(value) < 0.01:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


# ---- the learning rate ---------------------------------------------------------------------------


def _rate_notes(theirs: Mapping[str, Any], ours: Mapping[str, Any], step: int) -> list[str]:
    """Return a note on changes of the learning rate, with its jump at the next step if any."""
    before, now = _Rate.of(theirs), _Rate.of(ours)
    if before is None or now is None or not (changes := before.changes(now)):
        return []
    causes = ", ".join(changes)
    if math.isclose(before.at(step), now.at(step), rel_tol=1e-9):
        return [f"learning rate as before at step {step + 1:,}, but not later: {causes}"]
    last, first = _show_number(before.at(max(0, step - 1))), _show_number(now.at(step))
    return [f"learning rate {last} -> {first} at step {step + 1:,}: {causes}"]


class _Rate:
    """Learning rate of a resolved configuration.

    Args:
        config: The ``[optimizer]`` section, with derived values.
        steps: ``train.steps``.
    """

    def __init__(self, config: OptimizerConfig, steps: int) -> None:
        self._config = config
        self._steps = steps

    @classmethod
    def of(cls, sections: Mapping[str, Any]) -> _Rate | None:
        """Take the rate of a configuration as plain values; ``None`` if it is incomplete."""
        values, steps = sections.get("optimizer", {}), sections.get("train", {}).get("steps")
        if steps is None or any(key not in values for key in _RATE):
            return None
        return cls(OptimizerConfig(**{key: values[key] for key in _RATE}), steps)

    def at(self, step: int) -> float:
        """Compute the learning rate of a step."""
        return learning_rate(step, options=self._config.rate_options(), steps=self._steps)

    def changes(self, now: _Rate) -> list[str]:
        """List the settings that differ, without those that follow from others."""
        mine, other = self._facts(), now._facts()
        found = [change for key in mine for change in _changes(key, mine[key], other[key])]
        if self._steps == now._steps or self._length_facts() == now._length_facts():
            return found
        return [*_changes("train.steps", self._steps, now._steps), *found]

    def _facts(self) -> dict[str, Any]:
        config = self._config
        facts = {f"optimizer.{key}": getattr(config, key) for key in _RATE}
        if config.min_lr == config.lr / 10:
            facts["optimizer.min_lr"] = None
        if config.decay_steps == config.default_decay_steps(self._steps):
            facts["optimizer.decay_steps"] = None
        return facts

    def _length_facts(self) -> tuple[int | None, int | None]:
        """Return the numbers through which the steps of the run act on the rate."""
        config = self._config
        if config.schedule == "constant":
            return None, None
        return config.decay_steps, self._steps if config.schedule == "wsd" else None
