"""The GPT: tensor-parallel layers, model chunks of pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import lazy_names

if TYPE_CHECKING:
    from megatrain.models.build import build_chunks
    from megatrain.models.gpt import GPTChunk
    from megatrain.models.size import count_parameters

__all__ = [
    "GPTChunk",
    "build_chunks",
    "count_parameters",
]

# Module of each name: plans and the command line need parts without torch.
_HOMES = {
    "GPTChunk": "gpt",
    "build_chunks": "build",
    "count_parameters": "size",
}

__getattr__ = lazy_names(__name__, _HOMES)
