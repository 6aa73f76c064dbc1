"""Files of a model beside its weights, kept with a run: they come back at an export.

``hf_files`` in the folder of a run has the tokenizer, and of an imported model ``config.json``,
``generation_config.json`` and ``dtypes.json``, the number formats of its tensors. A checkpoint
folder outside of the run's has a copy.
"""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from megatrain.checkpoint.format import step_folders
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, files_of_folder, tokenizer_files
from megatrain.data.tokenizer import special_tokens_of
from megatrain.data.training_data import TrainingData
from megatrain.hf_folder import (
    CONFIG_NAME,
    json_text,
    read_object,
)
from megatrain.hf_quantized import open_tensors

FOLDER_NAME = "hf_files"
GENERATION_NAME = "generation_config.json"
DTYPES_NAME = "dtypes.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_MODEL = (CONFIG_NAME, GENERATION_NAME, DTYPES_NAME)
# Documents whose last tokens are compared.
_NUM_ENDS = 65
# Says that the ids of a file were derived, here and in `transformers`.
_DERIVED = "_from_model_config"

Files = Mapping[str, Path | str]
"""Files, or the text of files, by their path below a folder."""


def model_folder(path: Path) -> Path | None:
    """Return the folder with the files of a model, or ``None``.

    Args:
        path: A Hugging Face folder, a run's folder, a folder of checkpoints or a checkpoint.
    """
    path = path.absolute()
    if (path / CONFIG_NAME).is_file():
        return path
    for folder in (path, path.parent, path.parent.parent):
        if folder != path and not (step_folders(folder) or (folder / "config.toml").is_file()):
            continue  # anything may be above a run
        if (folder / FOLDER_NAME).is_dir():
            return folder / FOLDER_NAME
        if (folder / TOKENIZER_NAME).is_file():
            return folder  # of version 0.2.0
    return None


def tokenizer_beside(tokenizer: str, checkpoint: Path) -> str:
    """Return the tokenizer that is kept with a checkpoint's run, else the given one.

    Args:
        tokenizer: ``data.tokenizer`` of the run; bytes are kept nowhere.
        checkpoint: A folder of the run.
    """
    folder = model_folder(checkpoint)
    if folder is None or tokenizer == "bytes" or not (folder / TOKENIZER_NAME).is_file():
        return tokenizer
    return str(folder / TOKENIZER_NAME)


def files_of_model(folder: Path) -> Files:
    """Return the files of a model beside its weights: those kept with a run, or of Hugging Face.

    Raises:
        MegacoreError: If the tensors of a Hugging Face folder cannot be read, or its
            ``generation_config.json`` is not an object, which an export would refuse.
    """
    files: dict[str, Path | str] = {
        name: folder / name for name in _OF_MODEL if (folder / name).is_file()
    }
    if folder.name != FOLDER_NAME and CONFIG_NAME in files:
        if GENERATION_NAME in files:
            read_object(folder / GENERATION_NAME)
        files[DTYPES_NAME] = json_text(
            open_tensors(folder, read_object(folder / CONFIG_NAME)).dtypes()
        )
    return {**files, **files_of_folder(folder)}


def files_of_run(tokenizer: str, origin: Path | None, ends: Callable[[Path], int | None]) -> Files:
    """Return the files to keep with a run.

    Args:
        tokenizer: ``data.tokenizer``.
        origin: Checkpoint or Hugging Face folder that the run starts from.
        ends: Returns the token that ends the documents of the data, if it is known; its argument is
            the folder of the tokenizer.
    """
    folder = None if origin is None else model_folder(origin)
    files = {} if folder is None else dict(files_of_model(folder))
    own = tokenizer_files(tokenizer)
    if own:
        of_model = {name: each for name, each in files.items() if name in _OF_MODEL}
        files = {**of_model, **own}
    if TOKENIZER_NAME in own and CONFIG_NAME not in files and _is_derived(files):
        home = own[TOKENIZER_NAME].parent
        ids = token_ids(home, eos=ends(home))
        files[GENERATION_NAME] = json_text({_DERIVED: True, **ids})
    return files


def keep_files(files: Files, folder: Path) -> None:
    """Replace the files in ``hf_files`` of a folder, unless they are the same.

    Raises:
        OSError: If they cannot be written.
    """
    target, partial = folder / FOLDER_NAME, folder / f"{FOLDER_NAME}.partial"
    if not files or _has_files(target, files):
        if not files and target.is_dir():
            shutil.rmtree(target)  # of another model
        return
    shutil.rmtree(partial, ignore_errors=True)
    write_files(files, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def write_files(files: Files, folder: Path) -> None:
    """Write files into a folder.

    Raises:
        OSError: If they cannot be written.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_text(content, encoding="utf-8")


def copy_kept_files(run: Path, target: Path) -> None:
    """Copy the files kept with a run to another folder.

    Raises:
        OSError: If they cannot be copied.
    """
    folder = model_folder(run)
    if folder is not None:
        keep_files(files_of_model(folder), target)


def token_ids(folder: Path, *, eos: int | None = None) -> dict[str, int | None]:
    """Return the ids of special tokens that tokenizer files state.

    Args:
        folder: Folder with a ``tokenizer.json``.
        eos: The end of documents, if it is known. Default: that of the tokenizer.

    Raises:
        DataError: If the tokenizer cannot be read.
    """
    special = special_tokens_of(folder)
    ids = (special.bos_id, special.eos_id if eos is None else eos, special.pad_id)
    return dict(zip(TOKEN_IDS, ids, strict=True))


def end_of_documents(data: TrainingData, tokenizer: Path, *, eod: str | None) -> int | None:
    """Return the special token that ends every document of the first source, else ``data.eod``.

    Args:
        data: The data of the run, whose files may have another end than that of the tokenizer.
        tokenizer: Folder with a ``tokenizer.json``.
        eod: As ``data.eod``.
    """
    source = next(iter(data.sources.values()))
    starts = [start for start in source.document_starts[1:_NUM_ENDS] if start > 0]
    ends = {int(source.tokens[start - 1]) for start in starts}
    added = read_object(tokenizer / TOKENIZER_NAME).get("added_tokens") or []
    special = {token["id"] for token in added if token.get("special")}
    if len(ends) == 1 and ends <= special:
        return ends.pop()
    return data.tokenizer.token_id(eod) if eod else None


def _is_derived(files: Files) -> bool:
    content = files.get(GENERATION_NAME)
    return content is None or (isinstance(content, Path) and _DERIVED in read_object(content))


def _has_files(folder: Path, files: Files) -> bool:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return found == files.keys() and all(
        filecmp.cmp(folder / name, content, shallow=False)
        if isinstance(content, Path)
        else (folder / name).read_text(encoding="utf-8") == content
        for name, content in files.items()
    )
