"""Configs of small trainings: a base of sections, and changes under dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from megatrain.config import Config, resolve
from megatrain.launch.stopping import StopRequest

# Four layers: enough for pipelines of four ranks or of two with two chunks.
FOUR_LAYERS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "seq_length": 16,
        "vocab_size": 256,
        "vocab_pad_multiple": 64,
    }
)


def rank_context(rank: int, world_size: int) -> Any:
    """What the training loop needs of a rank's context, without a launcher."""
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        device=torch.device("cpu"),
        launched_by="megacore",
        restarts=0,
        stop=StopRequest(),
        calls=None,
    )


def changed_config(
    world_size: int, base: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any]
) -> Config:
    """Sections with some of their fields changed, resolved for a number of CPU ranks.

    Args:
        world_size: Number of ranks.
        base: Fields by section; left as it is.
        changes: By dotted key: ``"parallel.tp"``, ``"moe.echo.num_spare_slots"``.
    """
    sections: dict[str, Any] = {name: dict(values) for name, values in base.items()}
    for key, value in changes.items():
        *path, name = key.split(".")
        table = sections
        for part in path:
            table[part] = dict(table.get(part, {}))
            table = table[part]
        table[name] = value
    return resolve(Config(**sections), world_size, vocab_size=256, cuda=False)
