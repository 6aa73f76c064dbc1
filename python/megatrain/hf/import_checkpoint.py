"""Import of a Hugging Face model folder as a checkpoint and a configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups
from megatrain.checkpoint import TrainState, save_checkpoint
from megatrain.checkpoint.chunks import MAIN_PARAM, Chunk, tensor_key
from megatrain.checkpoint.model_files import FOLDER_NAME, files_of_model, keep_files
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME
from megatrain.config import (
    Config,
    ModelConfig,
    MoEConfig,
    ResolvedConfig,
    resolve,
    with_folder_of_file,
)
from megatrain.data import load_tokenizer
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf import HFWeights, training_note
from megatrain.hf.import_hf import open_folder
from megatrain.hf.settings import import_values
from megatrain.hf_folder import TensorFiles, dtype_name

CONFIG_NAME = "config.toml"

# Far below the learning rate for training from scratch, which would destroy the weights.
_LEARNING_RATE = 2e-5


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """Result of an import.

    Attributes:
        config_path: Configuration file for further training.
        checkpoint: The checkpoint's folder.
        config: The settings, resolved for one process.
        num_params: Parameters of the model, without padding.
        num_mtp_params: Those of layers for multi-token prediction.
        not_finite: A tensor of the model with a NaN or infinite value: the first that was found.
        absent_layers: Layers for multi-token prediction that ``config.json`` counts, but of which
            the files have no tensors.
        notes: Settings that the files imply, one sentence each.
    """

    config_path: Path
    checkpoint: Path
    config: ResolvedConfig
    num_params: int
    num_mtp_params: int
    not_finite: str | None = None
    absent_layers: int = 0
    notes: tuple[str, ...] = ()


def import_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    seq_length: int | None = None,
    ignore: Collection[str] = (),
) -> ImportedRun:
    """Read a model and write it as a checkpoint of step 0 with weights only, in this process.

    ``config.json``, ``generation_config.json`` and the tokenizer's files are kept in ``hf_files``.
    Nothing is written before names, shapes and dtypes
    of all tensors have been checked. Weights keep their number format; quantized ones become
    bfloat16. Memory: blocks of 1 MB, 16 MB of quantized tensors; for parameters whose values are
    reordered, one parameter and its tensors.

    Args:
        folder: Folder with ``config.json``, ``*.safetensors`` and optionally ``tokenizer.json``.
        out: Output folder for ``config.toml``, ``checkpoints`` and ``hf_files``; must be new or
            empty.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        ignore: Names of entries of ``config.json`` that megacore does not know, and that do not
            change what the model computes.

    Raises:
        MegacoreError: If the model cannot be imported, or ``out`` is not empty or not writable.
    """
    folder, out = Path(folder), Path(out)
    check_new(out)
    found = open_folder(folder, seq_length=seq_length, ignore=ignore)
    model, moe = found.model, found.moe
    weights = HFWeights(found.files, found.config, model, moe)
    tokenizer = folder / TOKENIZER_NAME
    has_tokenizer = tokenizer.is_file()
    if has_tokenizer:
        load_tokenizer(str(tokenizer))
    name = out.absolute().name
    settings = run_settings(model, moe, out, tokenizer=has_tokenizer, name=name)
    dtype, notes = train_dtype(found.files)
    settings["train"] = {"dtype": dtype}
    note = training_note(found.config, model, moe)
    notes = (*found.notes, *notes, *(() if note is None else (note,)))
    if ignore:
        notes += (f"ignored in config.json: {', '.join(sorted(set(ignore)))}",)
    config = resolve(Config.model_validate(settings), 1, cuda=False)
    weights.check()
    pieces = _pieces(weights)
    reader = _Reader(weights)
    try:
        with filled_folder(out):
            keep_files(files_of_model(folder), out)
            write_settings(settings, out, folder)
            checkpoint = save_checkpoint(
                out / "checkpoints",
                pieces,
                state=TrainState(step=0, samples=0, optimizer={}),
                config=config.model_dump(),
                groups=ProcessGroups.single(),
                read=reader.blocks,
            )
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ImportedRun(
        config_path=out / CONFIG_NAME,
        checkpoint=checkpoint,
        config=config,
        num_params=weights.num_params(),
        num_mtp_params=weights.num_params(only_mtp=True),
        not_finite=reader.not_finite,
        absent_layers=found.absent_layers,
        notes=notes,
    )


def check_new(out: Path) -> None:
    """Check that an import can write into a folder.

    Raises:
        MegacoreError: If it is a file, or not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds files already" if out.is_dir() else "is a file"
        raise MegacoreError(f"{out} {what}; name a new folder to import into")


def run_settings(
    model: ModelConfig, moe: MoEConfig, out: Path, *, tokenizer: bool, name: str
) -> dict[str, dict[str, Any]]:
    """Return the settings of a configuration file: the model, and the few others it needs.

    Args:
        model: A ``[model]`` section.
        moe: A ``[moe]`` section.
        out: The folder of the file and of the weights.
        tokenizer: Whether `keep_files` of the folder have a tokenizer.
        name: Name of the run.
    """
    path = {"tokenizer": str((out / FOLDER_NAME / TOKENIZER_NAME).absolute())} if tokenizer else {}
    settings: dict[str, dict[str, Any]] = {
        **import_values(model, moe),
        "optimizer": {"lr": _LEARNING_RATE},
        # The default source is for models from scratch.
        "data": {"source": "", **path},
        "checkpoint": {"load_weights": str(out.absolute())},
        "run": {"dir": f"runs/{name}"},
    }
    return {section: values for section, values in settings.items() if values}


def write_settings(settings: dict[str, dict[str, Any]], out: Path, origin: Path) -> None:
    """Write the configuration file of an import into its folder.

    Raises:
        OSError: If it cannot be written.
    """
    header = f"# Imported from {origin.absolute()}; for `megacore train`, with data.source set.\n\n"
    portable = with_folder_of_file(settings, out.absolute())
    (out / CONFIG_NAME).write_text(header + tomli_w.dumps(portable), encoding="utf-8")


def train_dtype(files: TensorFiles) -> tuple[str, tuple[str, ...]]:
    """Return ``train.dtype`` for the number format of the files, with a note if it differs."""
    dtype = dtype_name(files.dtype())
    if dtype != "float16":
        return dtype, ()
    # float16 needs a loss scale, and overflows in models that were trained in bfloat16.
    return "bfloat16", (
        'the weights are float16, but train.dtype = "bfloat16", whose range is that of float32; '
        "the checkpoint keeps float16, and so does export-hf",
    )


class _Reader:
    """Values of the model by chunk; finds a tensor that is not finite on the way.

    Attributes:
        not_finite: The first tensor with a NaN or infinite value.
    """

    def __init__(self, weights: HFWeights) -> None:
        self.not_finite: str | None = None
        self._weights = weights

    def blocks(self, chunk: Chunk) -> Iterator[Tensor]:
        """Yield the values of a chunk, which is a range of a flattened parameter."""
        strides = [math.prod(chunk.full_shape[dim + 1 :]) for dim in range(len(chunk.full_shape))]
        start = sum(at * stride for at, stride in zip(chunk.offsets, strides, strict=True))
        name = chunk.key.removeprefix(tensor_key(MAIN_PARAM, ""))
        for block in self._weights.blocks(name, start, start + chunk.tensor.numel()):
            # The sum is not finite if a value is not, or if it overflows, as those of float16
            # would often do; `not_finite` looks at the values. No other pass over a block, which is
            # in the processor's cache, is as fast.
            wide = torch.float32 if block.dtype == torch.float16 else None
            if self.not_finite is None and not block.sum(dtype=wide).isfinite():
                self.not_finite = self._weights.not_finite(name)
            yield block


def _pieces(weights: HFWeights) -> list[ParamPiece]:
    """Return pieces without values, which are read while the checkpoint is written."""
    return [
        ParamPiece(
            info=info,
            start=0,
            end=math.prod(info.full_shape),
            tensors={
                MAIN_PARAM: torch.empty(
                    math.prod(info.full_shape), dtype=weights.dtype(info.name), device="meta"
                )
            },
        )
        for info in weights.infos.values()
    ]
