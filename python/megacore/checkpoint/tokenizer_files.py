"""Tokenizer files in the folder of a run, so that the folder can be moved to another machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from megacore.config import Config

TOKENIZER_NAME = "tokenizer.json"
# Files beside the tokenizer that an import and an export copy with it.
COMPANION_NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def tokenizer_files(name: str) -> dict[str, Path]:
    """Return the files of a tokenizer by name; empty for bytes or if the files are gone."""
    path = Path(name)
    path = path / TOKENIZER_NAME if path.is_dir() else path
    if name == "bytes" or not path.is_file():
        return {}
    companions = {each: path.parent / each for each in COMPANION_NAMES}
    return {TOKENIZER_NAME: path} | {
        each: source for each, source in companions.items() if source.is_file()
    }


def copy_tokenizer(name: str, run_dir: Path) -> bool:
    """Copy the files of a tokenizer into the folder of a run; returns whether it has files."""
    files = tokenizer_files(name)
    for each, source in files.items():
        target = run_dir / each
        if not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)
    return bool(files)


def with_tokenizer_beside(config: Config, checkpoint: Path) -> Config:
    """Return the configuration with the tokenizer that is in the folder of a checkpoint's run."""
    folder = checkpoint.absolute()
    for run_dir in (folder, folder.parent, folder.parent.parent):
        found = run_dir / TOKENIZER_NAME
        if config.data.tokenizer != "bytes" and found.is_file():
            data = config.data.model_copy(update={"tokenizer": str(found)})
            return config.model_copy(update={"data": data})
    return config
