"""Files of a Hugging Face model folder: selection and reading."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.errors import MegacoreError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json``.

    Raises:
        MegacoreError: If the file is missing, unreadable or not an object.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise MegacoreError(f"{folder} {found}; name the folder that holds config.json")
    return _read_object(folder / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MegacoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MegacoreError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise MegacoreError(f"{path} holds a {type(content).__name__}; expected an object, {{...}}")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the files that belong to the model.

    The folder may have other files: an older version of the weights, or the same weights in the
    publisher's format.

    Raises:
        MegacoreError: If a file is missing, unreadable or contradicts another one.
    """
    single = folder / WEIGHTS_NAME
    if (folder / INDEX_NAME).is_file():
        return _read_indexed(folder / INDEX_NAME)
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise MegacoreError(f"{folder} holds no *.safetensors file; save the model in that format")
    return {name: tensor for name, (tensor, _) in _placed_tensors(files).items()}


def _read_indexed(index: Path) -> dict[str, Tensor]:
    """Return the tensors of all files that an index names."""
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MegacoreError(f"{index} has no weight_map, from tensors to files; copy it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise MegacoreError(
                f"{index} places {name} in {file!r}, which is no name of a file beside it"
            )
        if not (index.parent / file).is_file():
            raise MegacoreError(
                f"{index} places {name} in {file}, which does not exist; copy that file too, or "
                "remove the index if it belongs to other files"
            )
    single = index.parent / WEIGHTS_NAME
    if single.is_file() and WEIGHTS_NAME not in weight_map.values():
        raise MegacoreError(
            f"{index.parent} holds both {WEIGHTS_NAME} and {INDEX_NAME}, which names other files; "
            "remove the one that does not count"
        )
    placed = _placed_tensors(index.parent / file for file in sorted(set(weight_map.values())))
    for name, file in weight_map.items():
        if name not in placed or placed[name][1].name != file:
            raise MegacoreError(
                f"{index} places {name} in {file}, which does not hold it; copy both again"
            )
    return {name: tensor for name, (tensor, _) in placed.items()}


def _placed_tensors(files: Iterable[Path]) -> dict[str, tuple[Tensor, Path]]:
    """Return the tensors of files by name, with the file of each."""
    placed: dict[str, tuple[Tensor, Path]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in placed:
                        raise MegacoreError(
                            f"{name} is in both {placed[name][1]} and {path.name}; keep the files "
                            "of one model only"
                        )
                    placed[name] = opened.get_tensor(name), path
        except (OSError, SafetensorError) as error:
            raise MegacoreError(f"cannot read {path}: {error}") from error
    return placed
