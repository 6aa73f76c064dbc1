"""``megacore generate CHECKPOINT --prompt TEXT``: continue a text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megacore.cli.values import number, seed_number, whole_number
from megacore.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a text with a trained checkpoint",
        description="Continue a text with a trained checkpoint, on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a checkpoint folder, a folder of checkpoints, or a run's folder",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        default=argparse.SUPPRESS,  # or help would name None as its default
        help="text to continue",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole_number, default=200, help="tokens to append"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=number, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=number,
        default=0.95,
        help="draw from the likeliest tokens that together reach this probability",
    )
    parser.add_argument(
        "--seed", metavar="N", type=seed_number, default=0, help="seed of the draws"
    )


def run(args: argparse.Namespace) -> int:
    """Load the checkpoint in this process and print the prompt with its continuation."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

    import torch

    from megacore.checkpoint.restore import restore_model
    from megacore.models.generate import check_sampling, generate

    sampling = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
    }
    check_sampling(**sampling)  # before a large model is loaded
    _require_text(args.prompt)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    restored = restore_model(args.checkpoint, device=device)
    ids = restored.tokenizer.encode(args.prompt)
    if len(ids) == 0:
        raise ConfigError("--prompt is empty; give at least one character to continue")
    tokens = generate(
        restored.model,
        torch.tensor(ids, dtype=torch.int64, device=device)[None],
        **sampling,
    )
    _print_text(restored.tokenizer.decode(tokens[0].tolist()))
    return 0


def _require_text(prompt: str) -> None:
    """Raise an error for command-line bytes that are not text."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--prompt is no text in UTF-8: character {error.start + 1} is {prompt[error.start]!r}"
        ) from None


def _print_text(text: str) -> None:
    """Print generated text; characters outside of the terminal's encoding become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
