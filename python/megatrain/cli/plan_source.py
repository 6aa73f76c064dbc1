"""Configuration that ``megacore plan`` plans: a TOML file, or a model of Hugging Face."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from megacore.errors import MegacoreError
from megatrain.cli.train import load_with_nproc
from megatrain.config import Config, ModelConfig, config_from_values

# Sequences of a batch for each process unless set: config.json has no batch.
_PER_PROCESS = 4


def load_planned(args: argparse.Namespace) -> Config:
    """Load the configuration of a plan.

    ``args.config`` is a TOML file; or a ``config.json`` or its folder, without need of weights:
    then the configuration is that of an import, and a note on the standard error stream names what
    was chosen.

    Raises:
        MegacoreError: As in `load_config` and `sections_from_hf`.
    """
    path: Path = args.config
    is_folder = path.is_dir()
    if not is_folder and path.suffix != ".json":  # without torch, which the rest imports
        return load_with_nproc(args, option="--world-size")
    from megatrain.hf.common_keys import MTP_COUNT
    from megatrain.hf.settings import import_values, sections_from_hf
    from megatrain.hf_folder import ADAPTER_NAME, is_model_folder, read_config, read_object

    if not is_folder and path.name == ADAPTER_NAME:
        is_model_folder(path.parent)  # raises
    if is_folder and not is_model_folder(path):
        return load_with_nproc(args, option="--world-size")
    hf_config = read_config(path) if is_folder else read_object(path)
    model, moe = sections_from_hf(hf_config)
    given = {key.replace("-", "_") for key, _ in args.settings}
    if model.num_mtp_layers and "model.num_mtp_layers" not in given:
        count = _predicting_layers(path if is_folder else path.parent, model)
        hf_config |= {MTP_COUNT: count}
        model, moe = sections_from_hf(hf_config)
    values = import_values(model, moe)
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    # As in an import: float16 would need a loss scale.
    dtype = "float32" if dtype == "float32" else "bfloat16"
    chosen = {"model.seq_length": model.seq_length, "train.dtype": dtype, **_batch(args)}
    chosen = {key: value for key, value in chosen.items() if key not in given}
    for key, value in chosen.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    if chosen:
        shown = ", ".join(f"{key} = {value}" for key, value in chosen.items())
        print(
            f"note: chosen for this plan: {shown}; --{next(iter(chosen))}=... sets another value",
            file=sys.stderr,
        )
    settings = [*args.settings, *([] if args.nproc is None else [("run.nproc", args.nproc)])]
    return config_from_values(values, source=str(path), overrides=settings)


def _predicting_layers(folder: Path, model: ModelConfig) -> int:
    """Return the layers for multi-token prediction that an import has, and print a note on them."""
    from megatrain.hf.common_keys import MTP_COUNT
    from megatrain.hf.import_hf import absent_layers
    from megatrain.hf_folder import TensorFiles

    number = model.num_mtp_layers
    try:
        absent = absent_layers(model, TensorFiles(folder).keys())
    except MegacoreError:  # a plan needs no weights
        print(
            f"note: counts the layers for multi-token prediction, {MTP_COUNT} = {number} in "
            "config.json; for files without them: --model.num_mtp_layers=0",
            file=sys.stderr,
        )
        return number
    if absent:
        print(
            f"note: without layers for multi-token prediction, {MTP_COUNT} = {number} in "
            "config.json, of which the files have no tensors",
            file=sys.stderr,
        )
    return number - absent


def _batch(args: argparse.Namespace) -> dict[str, int]:
    """Return a batch that every layout can deal out to the processes of a plan."""
    counts = (args.gpus if args.gpus is not None else args.nproc or "").split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        return {}
    number = math.lcm(*map(int, counts))
    return {"train.global_batch_size": _PER_PROCESS * number, "train.microbatch_size": 1}
