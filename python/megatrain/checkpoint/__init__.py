"""Checkpoint save and load, between arbitrary layouts.

The format is that of `torch.distributed.checkpoint`: tensors of full shape, independent of ranks. A
checkpoint gets its name only when it is complete: all ranks write into ``step_00000100.partial``,
flush to disk, read back and synchronize; then rank 0 writes the index, renames the folder and
updates ``latest``. An error on one rank is raised on all ranks, so no rank blocks.
"""

from __future__ import annotations

from megatrain.checkpoint.background import choose_background
from megatrain.checkpoint.find import FoundCheckpoint, find_checkpoint, resolve_checkpoint
from megatrain.checkpoint.format import CheckpointIndex, TrainState, read_index
from megatrain.checkpoint.load import StoredWeights, load_checkpoint, load_full_weights
from megatrain.checkpoint.publish import check_checkpoint_folder
from megatrain.checkpoint.save import CheckpointSaver, save_checkpoint

__all__ = [
    "CheckpointIndex",
    "CheckpointSaver",
    "FoundCheckpoint",
    "StoredWeights",
    "TrainState",
    "check_checkpoint_folder",
    "choose_background",
    "find_checkpoint",
    "load_checkpoint",
    "load_full_weights",
    "read_index",
    "resolve_checkpoint",
    "save_checkpoint",
]
