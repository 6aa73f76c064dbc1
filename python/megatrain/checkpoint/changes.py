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

from megacore.optim import RateOptions
from megatrain.checkpoint.format import CheckpointIndex, read_index
from megatrain.checkpoint.model_files import tokenizer_beside
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, tokenizer_files
from megatrain.config import OptimizerConfig, ResolvedConfig
from megatrain.config.optimizer import RunRate

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
    "preference": frozenset({"reference_dir", "any_reference"}),
    "lora": frozenset({"init"}),
    "optimizer": frozenset(
        {
            *("overlap", "distributed", "num_instances", "loss_scale"),
            *("bucket_numel", "pad_for_ring", "average_in_collective"),
        }
    ),
}
# Those of [train] that a run has from its start to its end.
_IDENTITY = frozenset({"seed", "global_batch_size"})
# Settings that the learning rate is a function of, beside the length of the run; noted in one line.
_RATE = (*(field.name for field in dataclasses.fields(RateOptions)), "schedule_unit")
# Settings that the length of a run depends on, by the unit in which it is counted.
_LENGTHS = {
    "steps": ("train.steps",),
    "samples": ("train.steps", "train.global_batch_size"),
    "tokens": ("train.steps", "train.global_batch_size", "model.seq_length"),
}
_LONGEST_VALUE = 60


def changed_settings(found: Path, config: ResolvedConfig) -> tuple[str, ...]:
    """List notes on settings that affect results and differ from the checkpoint.

    Args:
        found: The checkpoint that this run continues from.
        config: Resolved configuration of this run.
    """
    theirs, ours, index = _values(found, config)
    state = index.state
    return compare_settings(
        theirs, ours, step=state.step, samples=state.samples, tokens=index.tokens
    )


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


def _values(
    found: Path, config: ResolvedConfig
) -> tuple[dict[str, Any], dict[str, Any], CheckpointIndex]:
    """Return the settings of a checkpoint and those of this run, and the index."""
    index = read_index(found)
    ours = json.loads(config.model_dump_json())
    theirs = copy.deepcopy(dict(index.config))
    if _has_tokenizer_of(found, config.data.tokenizer):
        theirs = theirs | {"data": theirs.get("data", {}) | {"tokenizer": config.data.tokenizer}}
    return theirs, ours, index


def _has_tokenizer_of(found: Path, tokenizer: str) -> bool:
    """Check if the tokenizer beside a checkpoint has the content of the configured one."""
    beside = tokenizer_files(tokenizer_beside(tokenizer, found))
    mine = tokenizer_files(tokenizer)
    if TOKENIZER_NAME not in beside or TOKENIZER_NAME not in mine:
        return False
    return filecmp.cmp(beside[TOKENIZER_NAME], mine[TOKENIZER_NAME], shallow=False)


def compare_settings(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    step: int = 0,
    samples: int = 0,
    tokens: int = 0,
) -> tuple[str, ...]:
    """List the notes of `changed_settings` from plain values.

    Args:
        theirs: Sections of the checkpoint.
        ours: Sections of this run.
        step: The next step, from 0.
        samples: Samples consumed so far.
        tokens: Tokens consumed so far.

    Example:
        >>> compare_settings({"train": {"seed": 1, "steps": 9}}, {"train": {"seed": 2, "steps": 8}})
        ('train.seed 1 -> 2 since the checkpoint',)
    """
    notes = _rate_notes(theirs, ours, step=step, samples=samples, tokens=tokens)
    for section in ("optimizer", "lora", "model", "moe", "data", "train", "debug"):
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


def _rate_notes(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, step: int, samples: int, tokens: int
) -> list[str]:
    """Return a note on changes of the learning rate, with its jump at the next step if any."""
    before = _Rate.of(theirs, step=step, samples=samples, tokens=tokens)
    now = _Rate.of(ours, step=step, samples=samples, tokens=tokens)
    if before is None or now is None or not (changes := before.changes(now)):
        return []
    causes = ", ".join(changes)
    if math.isclose(before.at(step), now.at(step), rel_tol=1e-9):
        return [f"learning rate as before at step {step + 1:,}, but not later: {causes}"]
    last, first = _show_number(before.at(max(0, step - 1))), _show_number(now.at(step))
    return [f"learning rate {last} -> {first} at step {step + 1:,}: {causes}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rate:
    """Learning rate of a resolved configuration, from a point of a run.

    Attributes:
        config: The ``[optimizer]`` section, with derived values.
        lengths: Settings that the length of the run depends on.
        run: The rate by step.
    """

    config: OptimizerConfig
    lengths: Mapping[str, int]
    run: RunRate

    @classmethod
    def of(
        cls, sections: Mapping[str, Any], *, step: int, samples: int, tokens: int
    ) -> _Rate | None:
        """Take the rate of a configuration as plain values; ``None`` if it is incomplete."""
        values = {name: sections.get(name, {}) for name in ("optimizer", "train", "model")}
        if any(key not in values["optimizer"] for key in _RATE):
            return None
        config = OptimizerConfig(**{key: values["optimizer"][key] for key in _RATE})
        lengths: dict[str, int] = {}
        for key in _LENGTHS[config.schedule_unit]:
            section, _, name = key.partition(".")
            if name not in values[section]:
                return None
            lengths[key] = values[section][name]
        batch, seq_length = (
            lengths.get("train.global_batch_size", 1),
            lengths.get("model.seq_length", 1),
        )
        run = config.rate_of_run(
            steps=lengths["train.steps"],
            global_batch_size=batch,
            seq_length=seq_length,
            sample_offset=samples - step * batch,
            token_offset=tokens - step * batch * seq_length,
        )
        return cls(config=config, lengths=lengths, run=run)

    def at(self, step: int) -> float:
        """Compute the learning rate of a step."""
        return self.run.at(step)

    def changes(self, now: _Rate) -> list[str]:
        """List the settings that differ, without those that follow from others."""
        mine, other = self._facts(), now._facts()
        found = [change for key in mine for change in _changes(key, mine[key], other[key])]
        if not (self._follows_length or now._follows_length) or self.run.total == now.run.total:
            return found
        lengths = [
            change
            for key in self.lengths.keys() & now.lengths.keys()
            for change in _changes(key, self.lengths[key], now.lengths[key])
        ]
        return [*sorted(lengths, reverse=True), *found]

    @property
    def _follows_length(self) -> bool:
        """Whether the length of the run has an effect on the rate."""
        has_end = self.config.schedule not in ("constant", "inverse_sqrt")
        return has_end and self.config.decay_end is None

    def _facts(self) -> dict[str, Any]:
        facts = {f"optimizer.{key}": getattr(self.config, key) for key in _RATE}
        if self.config.min_lr == self.config.lr / 10:
            facts["optimizer.min_lr"] = None
        return facts
