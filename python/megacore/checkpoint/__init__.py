"""Saving and loading a run, from any layout to any layout.

The format is that of `torch.distributed.checkpoint`: tensors of full shape, no ranks. A checkpoint
appears under its name only when it is complete: all ranks write into ``step_00000100.partial``,
flush to disk, read back and meet; then rank 0 writes the index, renames the folder and points
``latest`` at it. Whatever goes wrong on one rank is raised on all of them, so none is left waiting.
"""

from __future__ import annotations

from megacore.checkpoint.find import FoundCheckpoint, find_checkpoint, resolve_checkpoint
from megacore.checkpoint.format import CheckpointIndex, TrainState, read_index
from megacore.checkpoint.load import load_checkpoint, load_full_weights
from megacore.checkpoint.publish import check_checkpoint_folder
from megacore.checkpoint.save import CheckpointSaver, save_checkpoint

__all__ = [
    "CheckpointIndex",
    "CheckpointSaver",
    "FoundCheckpoint",
    "TrainState",
    "check_checkpoint_folder",
    "find_checkpoint",
    "load_checkpoint",
    "load_full_weights",
    "read_index",
    "resolve_checkpoint",
    "save_checkpoint",
]
