"""Checks of ``debug.record_routing`` and ``debug.replay_routing`` before a run."""

from __future__ import annotations

from pathlib import Path

from megatrain.config import ResolvedConfig
from megatrain.routing_trace import Recorded, check_recording_folder, check_replay

# Settings that determine token identifiers, token contents, and experts.
_KEYS = (
    "moe.num_experts",
    "moe.top_k",
    "moe.layer_pattern",
    "model.num_layers",
    "model.seq_length",
    "train.global_batch_size",
    "train.seed",
    "data.source",
    "data.tokenizer",
    "data.split",
)


def check_routing(config: ResolvedConfig) -> None:
    """Check the folders of both settings, without reading or writing decisions.

    Raises:
        MegacoreError: If a recording does not match the run, a folder cannot be used for a
            recording.
    """
    debug = config.debug
    if debug.record_routing is not None:
        check_recording_folder(Path(debug.record_routing))
    if debug.replay_routing is not None:
        check_replay(
            Path(debug.replay_routing), recorded_settings(config), steps=config.train.steps
        )


def recorded_settings(config: ResolvedConfig) -> Recorded:
    """Select the settings of a run that a replay must match."""
    values = config.model_dump()
    return Recorded(
        settings={key: values[section][name] for key in _KEYS for section, name in [key.split(".")]}
    )
