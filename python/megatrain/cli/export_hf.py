"""``megacore export-hf RUN FOLDER``: a Hugging Face folder from a checkpoint."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from megacore.errors import MegacoreError
from megatrain.cli.values import require_at_least, whole_number

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "export-hf",
        description="Write the weights of a checkpoint, of any layout, as a Hugging Face model "
        "folder: safetensors, config.json, generation_config.json and the tokenizer. Of a run with "
        "adapters (lora.rank), write the adapters for PEFT, or merged weights.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="RUN",
        type=Path,
        help="a run's folder, a folder of checkpoints, or a checkpoint",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder for the model")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a run alone, as adapter_model.safetensors and "
        "adapter_config.json, which PEFT loads",
    )
    form.add_argument(
        "--merge",
        action="store_true",
        help="write the weights of the base with the adapters of a run merged into them, in "
        "float32 with one rounding",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="the base of adapters: with --adapter, its name or folder for adapter_config.json; "
        "with --merge, its folder (default: the folder that the run started from)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="number format of the weights (default: that of the imported files, else train.dtype; "
        "of adapters float32)",
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

    if args.base is not None and not (args.adapter or args.merge):
        raise MegacoreError(f"--base {args.base} is the base of adapters; add --adapter or --merge")
    return _export_adapter(args) if args.adapter else _export_model(args)


def _export_adapter(args: argparse.Namespace) -> int:
    from megatrain.hf.export_adapter import export_adapter

    done = export_adapter(
        args.checkpoint,
        args.folder,
        base=args.base,
        dtype=args.dtype,
        step=args.step,
        family=args.family,
        averaged=args.ema,
    )
    base = done.config["base_model_name_or_path"]
    print(
        f"{done.checkpoint}: {done.num_params:,} parameters in adapters of rank "
        f"{done.config['r']}{f' of {base}' if base else ''}: {args.folder}"
    )
    for note in done.notes:
        print(f"note: {note}")
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _export_model(args: argparse.Namespace) -> int:
    from megatrain.hf.export_checkpoint import export_checkpoint

    done = export_checkpoint(
        args.checkpoint,
        args.folder,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard_size,
        step=args.step,
        family=args.family,
        averaged=args.ema,
        merged=args.merge,
        base=args.base,
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
