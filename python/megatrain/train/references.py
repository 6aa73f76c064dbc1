"""Check that the log-probs of the reference are those of the model that a run starts from."""

from __future__ import annotations

from megacore.errors import DataError
from megatrain.checkpoint.agreement import on_every_rank
from megatrain.data.pairs import read_header, reference_path
from megatrain.train.trainer import Trainer
from megatrain.train.weight_stream import weights_checksums


def check_references(trainer: Trainer) -> None:
    """Compare the weights with those of the files of reference log-probs. Collective.

    Args:
        trainer: A trainer with the weights that the run starts from.

    Raises:
        DataError: On every rank, if they are others and ``preference.any_reference`` is not set.
    """
    config = trainer.config
    preference = config.preference
    if not preference.needs_reference or preference.any_reference:
        return
    # As the run computes with them: frozen weights have no other format.
    dtype = config.train.dtype
    ours = weights_checksums(trainer)[dtype]

    def check() -> None:
        for source in (*config.data.training_sources, *config.data.validation):
            path = reference_path(source.path, preference)
            header = read_header(path)
            if header["weights"][dtype] != ours:
                raise DataError(
                    f"{path} has the log-probs of {header['model']}, whose weights differ from "
                    f"those of checkpoint.load_weights = {config.checkpoint.load_weights}; write "
                    f"it again with megacore eval {config.checkpoint.load_weights} --reference "
                    f"{source.path}, or set preference.any_reference = true"
                )

    on_every_rank(check, trainer.groups)
