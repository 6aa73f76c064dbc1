"""``megacore export-hf RUN FOLDER``: a Hugging Face model folder from a checkpoint."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from megatrain.cli.values import require_at_least, whole_number

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "export-hf",
        description="Write the weights of a checkpoint, of any layout, as a Hugging Face model "
        "folder: safetensors, config.json, generation_config.json and the tokenizer.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="RUN",
        type=Path,
        help="a run's folder, a folder of checkpoints, or a checkpoint",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder for the model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="number format of the weights (default: that of the imported files, else train.dtype)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_num_bytes,
        default=_num_bytes("5GB"),
        help="largest file of weights, such as 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--step", metavar="N", type=whole_number, help="step of the checkpoint (default: latest)"
    )
    parser.add_argument(
        "--family",
        metavar="TYPE",
        help="model_type to export as (default: that of the import, else the first that fits)",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="export the moving average of the weights, of a run with optimizer.ema_decay",
    )


def run(args: argparse.Namespace) -> int:
    """Export in this process, and print the files."""
    require_at_least(args, step=0)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

    from megatrain.hf.export_checkpoint import export_checkpoint

    done = export_checkpoint(
        args.checkpoint,
        args.folder,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        step=args.step,
        family=args.family,
        averaged=args.ema,
    )
    count = len(done.files)
    print(
        f"{done.checkpoint}: {done.num_params:,} parameters, {done.dtype}, as "
        f"{done.config['architectures'][0]} in {count} file{'s' if count > 1 else ''}: "
        f"{args.folder}"
    )
    for note in done.notes:
        print(f"note: {note}")
    if not done.has_tokenizer:
        print("The run has no tokenizer.json, so the folder has no tokenizer: pass token ids.")
    return 0


def _num_bytes(text: str) -> int:
    """Parse a size with a decimal unit.

    Example:
        >>> _num_bytes("5GB"), _num_bytes("100")
        (5000000000, 100)
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a positive number of bytes with a unit, such as 500MB or 5GB, got {text!r}"
        )
    return int(match[1]) * _UNITS[(match[2] or "").upper().removeprefix("B") or ""]
