"""Import of a Hugging Face model folder as a checkpoint and a configuration."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from megacore.checkpoint import TrainState, save_checkpoint
from megacore.config import Config, ModelConfig, MoEConfig, resolve
from megacore.data import load_tokenizer
from megacore.errors import MegacoreError
from megacore.files import describe_os_error
from megacore.models.hf import HFWeights, sections_from_hf
from megacore.models.hf.files import TensorFiles, read_config
from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "config.toml"

# Files that an export copies from the folder of the tokenizer.
COMPANION_NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Far below the learning rate for training from scratch, which would destroy the weights.
_LEARNING_RATE = 2e-5


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """Result of an import.

    Attributes:
        config_path: Configuration file for further training.
        checkpoint: The checkpoint's folder.
        config: The settings, resolved for one process.
        num_params: Parameters of the model.
    """

    config_path: Path
    checkpoint: Path
    config: Config
    num_params: int


def import_checkpoint(
    folder: str | Path, out: str | Path, *, seq_length: int | None = None
) -> ImportedRun:
    """Read a model and write it as a checkpoint of step 0 with weights only, in this process.

    The tokenizer is copied if there is one. Nothing is written before the model has been read.
    Memory: the float32 weights and the tensors of one parameter.

    Args:
        folder: Folder with ``config.json``, ``*.safetensors`` and optionally ``tokenizer.json``.
        out: Output folder for ``config.toml``, ``checkpoints`` and the tokenizer; must be new or
            empty.
        seq_length: Tokens per sequence. Default: the maximum of the model.

    Raises:
        MegacoreError: If the model cannot be imported, or ``out`` is not empty or not writable.
    """
    folder, out = Path(folder), Path(out)
    _check_free(out)
    hf_config = read_config(folder)
    model, moe = sections_from_hf(hf_config, seq_length=seq_length)
    files = TensorFiles(folder)
    weights = HFWeights(files, hf_config, model, moe)
    tokenizer = folder / TOKENIZER_NAME
    has_tokenizer = tokenizer.is_file()
    if has_tokenizer:
        load_tokenizer(str(tokenizer))
    name = out.absolute().name
    settings = _settings(model, moe, out, tokenizer=has_tokenizer, name=name)
    # bfloat16 weights are trained, and exported again, in bfloat16.
    settings["train"] = {"dtype": str(files.dtype()).removeprefix("torch.")}
    config = resolve(Config.model_validate(settings), 1, cuda=False)
    pieces = _pieces(weights)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if has_tokenizer:
            shutil.copyfile(tokenizer, out / TOKENIZER_NAME)
            for companion in COMPANION_NAMES:
                if (folder / companion).is_file():
                    shutil.copyfile(folder / companion, out / companion)
        header = f"# Imported from {folder.absolute()}; trains it further.\n\n"
        (out / CONFIG_NAME).write_text(header + tomli_w.dumps(settings), encoding="utf-8")
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    checkpoint = save_checkpoint(
        out / "checkpoints",
        pieces,
        state=TrainState(step=0, samples=0, optimizer={}),
        config=config.model_dump(),
        groups=ProcessGroups.single(),
    )
    return ImportedRun(
        config_path=out / CONFIG_NAME,
        checkpoint=checkpoint,
        config=config,
        num_params=sum(piece.end for piece in pieces),
    )


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds files already" if out.is_dir() else "is a file"
        raise MegacoreError(f"{out} {what}; name a new folder to import into")


def _settings(
    model: ModelConfig, moe: MoEConfig, out: Path, *, tokenizer: bool, name: str
) -> dict[str, dict[str, Any]]:
    """Build the settings of the configuration file: the model, and the few others it needs."""
    settings: dict[str, dict[str, Any]] = {
        "model": model.model_dump(exclude_none=True),
        "moe": moe.model_dump(exclude_none=True, exclude_defaults=True),
        "optimizer": {"lr": _LEARNING_RATE},
        "data": {"tokenizer": str((out / TOKENIZER_NAME).absolute())} if tokenizer else {},
        "checkpoint": {"load_weights": str(out.absolute())},
        "run": {"name": name},
    }
    return {section: values for section, values in settings.items() if values}


def _pieces(weights: HFWeights) -> list[ParamPiece]:
    return [
        ParamPiece(
            info=info,
            start=0,
            end=math.prod(info.full_shape),
            tensors={"main_param": weights[info.name].float().contiguous().view(-1)},
        )
        for info in weights.infos.values()
    ]
