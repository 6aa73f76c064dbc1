"""``megacore import-hf FOLDER OUT``: a checkpoint from a model or adapter of Hugging Face."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megatrain.cli.values import require_at_least, whole_number


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "import-hf",
        description="Make a checkpoint and a configuration from a model in the folder format of "
        "Hugging Face, or from a LoRA adapter of PEFT and its base. Nothing is downloaded.",
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="holds config.json and *.safetensors; the tokenizer's files are taken along. Or holds "
        "adapter_config.json and adapter_model.safetensors",
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="a new folder for config.toml and the checkpoint"
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        type=Path,
        help="the model that an adapter belongs to (default: base_model_name_or_path, if that is "
        "a folder); it is not copied, so it must stay there",
    )
    parser.add_argument(
        "--seq-length",
        metavar="N",
        type=whole_number,
        help="tokens per sequence (default: the longest the model was made for)",
    )
    parser.add_argument(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="an unknown entry of config.json or adapter_config.json that does not change what the "
        "model computes; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Import in this process, and print the next commands."""
    require_at_least(args, seq_length=1)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

    from megacore.errors import MegacoreError
    from megatrain.hf.import_adapter import import_adapter
    from megatrain.hf.import_checkpoint import import_checkpoint
    from megatrain.hf_folder import is_adapter_folder

    options = {"seq_length": args.seq_length, "ignore": args.ignore}
    is_adapter = is_adapter_folder(args.folder)
    if is_adapter:
        done = import_adapter(args.folder, args.out, base=args.base, **options)
    elif args.base is not None:
        raise MegacoreError(
            f"{args.folder} has no adapter_config.json; leave --base out, which is for adapters"
        )
    else:
        done = import_checkpoint(args.folder, args.out, **options)
    model = done.config.model
    number, layers = f"{done.num_params:,} parameters", f"{model.num_layers} layers"
    if is_adapter:
        number += f" in adapters of rank {done.config.lora.rank}"
    if model.num_mtp_layers:
        number += f" ({done.num_mtp_params:,} of them for multi-token prediction)"
    if done.absent_layers:
        layers += f" (without {done.absent_layers} for multi-token prediction)"
    print(f"{number}, {layers}, sequence {model.seq_length}: {done.checkpoint}")
    if done.not_finite is not None:
        print(
            f"warning: {done.not_finite} has NaN or infinite values, so the model cannot train; "
            "get the file again, or save the model again",
            file=sys.stderr,
        )
    for note in done.notes:
        print(f"note: {note}")
    if done.config.data.tokenizer == "bytes":
        print(
            "The folder has no tokenizer.json: set data.tokenizer, or train on tokens that were "
            "made before (a .bin/.idx pair as data.source)."
        )
    print(f"megacore train {done.config_path} --data.source=PATH")
    print(f'megacore generate {args.out} --prompt "..."')
    return 0
