"""The writer of a run's checkpoints, as its settings and its size choose it."""

from __future__ import annotations

from megacore.errors import DiskFullError
from megatrain.checkpoint import CheckpointSaver, check_checkpoint_folder, choose_background
from megatrain.train.trainer import Trainer


def make_saver(trainer: Trainer, *, ranks_per_host: int) -> tuple[CheckpointSaver, tuple[str, ...]]:
    """Make the writer of checkpoints; returns a note if memory decides how it writes."""
    config, in_background = trainer.config, trainer.config.checkpoint.in_background
    notes: tuple[str, ...] = ()
    if in_background == "auto":
        in_background, notes = choose_background(
            trainer.pieces(), trainer.groups, ranks_per_host=ranks_per_host
        )
    saver = CheckpointSaver(
        config.checkpoint.dir,
        trainer.pieces,
        groups=trainer.groups,
        config=config.model_dump(),
        keep=config.checkpoint.keep,
        in_background=in_background,
        tolerant=config.checkpoint.on_failure == "continue",
    )
    return saver, notes


def check_room_to_save(trainer: Trainer, saver: CheckpointSaver) -> tuple[str, ...]:
    """Check that checkpoints can be written; returns a note on a tolerated lack of disk space.

    A full disk may have space again at the first checkpoint. An unwritable folder is an error
    regardless of ``checkpoint.on_failure``.
    """
    settings = trainer.config.checkpoint
    try:
        check_checkpoint_folder(settings.dir, num_bytes=saver.num_bytes(), groups=trainer.groups)
    except DiskFullError as error:
        if settings.on_failure == "stop":
            raise
        return (f"checkpoints cannot be saved now: {error}",)
    return ()
