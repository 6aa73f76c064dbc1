"""Model folders of Hugging Face: configuration and tensors that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.hf.settings import sections_from_hf
from megatrain.hf_folder import TensorFiles, read_config
from megatrain.hf_quantized import QuantizedFiles, open_tensors

MTP_ENTRY = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """Content of a folder.

    Attributes:
        config: Content of ``config.json``, without layers that the files lack.
        tensors: The tensors, dequantized.
        notes: Differences between ``config.json`` and the tensors, one sentence each.
    """

    config: dict[str, Any]
    tensors: TensorFiles
    notes: tuple[str, ...]


def open_folder(folder: str | Path) -> ModelFolder:
    """Open a folder with ``config.json`` and ``*.safetensors``; no values are read.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one, the folder is
            that of an adapter, or the model uses an unsupported feature.
    """
    folder = Path(folder)
    config = read_config(folder)
    sections_from_hf(config)  # an unsupported model is refused whether or not there are weights
    tensors = open_tensors(folder, config)
    notes = [tensors.note()] if isinstance(tensors, QuantizedFiles) else []
    number, first = config.get(MTP_ENTRY), config.get("num_hidden_layers")
    if isinstance(number, int) and isinstance(first, int) and number > 0:
        prefixes = tuple(f"model.layers.{first + index}." for index in range(number))
        names = tensors.keys()
        if not any(name.startswith(prefixes) for name in names):
            config[MTP_ENTRY] = 0
            what = "1 layer" if number == 1 else f"{number} layers"
            notes.append(
                f"config.json has {MTP_ENTRY} = {number}, but the files have no tensor of {what} "
                "for multi-token prediction: the model is imported without"
            )
    return ModelFolder(config=config, tensors=tensors, notes=tuple(notes))
