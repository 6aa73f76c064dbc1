"""The GPT: tensor-parallel layers, model chunks of pipeline stages, generation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.models.build import build_chunks
    from megacore.models.generate import Sampling, stream
    from megacore.models.gpt import GPTChunk
    from megacore.models.size import count_parameters

__all__ = [
    "GPTChunk",
    "Sampling",
    "build_chunks",
    "count_parameters",
    "stream",
]

# Module of each name.
_HOMES = {
    "GPTChunk": "gpt",
    "Sampling": "generate",
    "build_chunks": "build",
    "count_parameters": "size",
    "stream": "generate",
}


def __getattr__(name: str) -> Any:
    # Plans and the command line need parts without torch.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
