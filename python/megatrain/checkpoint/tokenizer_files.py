"""Files of a tokenizer in the formats of Hugging Face and Mistral."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_NAME = "tokenizer.json"
# Everything that describes a tokenizer and its templates, below a model's folder.
_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",  # named by tokenizer_config.json
)


def files_of_folder(folder: Path) -> dict[str, Path]:
    """Return the tokenizer files of a folder by their path below it."""
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def tokenizer_files(name: str) -> dict[str, Path]:
    """Return the files of a tokenizer by name; empty for bytes or if the files are gone.

    Args:
        name: As ``data.tokenizer``.
    """
    path = Path(name)
    path = path / TOKENIZER_NAME if path.is_dir() else path
    if name == "bytes" or not path.is_file():
        return {}
    return files_of_folder(path.parent) | {TOKENIZER_NAME: path}
