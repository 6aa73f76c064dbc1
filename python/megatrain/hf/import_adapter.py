"""Import of an adapter of PEFT and its base as a checkpoint and a configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megacore.errors import MegacoreError
from megacore.optim import ParamPiece
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo
from megatrain.checkpoint import TrainState, save_checkpoint
from megatrain.checkpoint.base_weights import BaseWeights
from megatrain.checkpoint.chunks import MAIN_PARAM
from megatrain.checkpoint.model_files import files_of_model, keep_files
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME, files_of_folder
from megatrain.config import Config, LoraConfig, resolve
from megatrain.data import load_tokenizer
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf import training_note
from megatrain.hf.adapter_files import AdapterFiles
from megatrain.hf.import_checkpoint import (
    CONFIG_NAME,
    ImportedRun,
    check_new,
    run_settings,
    train_dtype,
    write_settings,
)
from megatrain.hf.import_hf import open_folder
from megatrain.hf.peft_config import PeftConfig, endings
from megatrain.hf.peft_names import Adapter, BaseParam, widened
from megatrain.hf_folder import ADAPTER_NAME, is_model_folder, read_object
from megatrain.models.adapter_infos import describe_adapters

# Ten times that of whole models: B starts at zero, and the factors are small.
_LEARNING_RATE = 2e-4


def import_adapter(
    folder: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    seq_length: int | None = None,
    ignore: Collection[str] = (),
) -> ImportedRun:
    """Read an adapter of PEFT and write it as a checkpoint of step 0, in this process.

    The checkpoint has the adapters, and the modules that are saved whole, but not the weights of
    the base, which stay where they are. Nothing is written before names and shapes of all tensors
    have been checked. Memory: the adapters.

    Args:
        folder: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        out: Output folder for ``config.toml``, ``checkpoints`` and ``hf_files``; must be new or
            empty.
        base: Hugging Face folder of the base. Default: ``base_model_name_or_path``, if that is one.
        seq_length: Tokens per sequence. Default: the maximum of the model.
        ignore: Names of entries of ``adapter_config.json`` without effect.

    Raises:
        MegacoreError: If the adapter cannot be imported or does not fit the base, or ``out`` is
            not empty or not writable.
    """
    folder, out = Path(folder), Path(out)
    check_new(out)
    peft = PeftConfig.read(read_object(folder / ADAPTER_NAME), ignore=ignore)
    base = _base_folder(folder, base, peft)
    found = open_folder(base, seq_length=seq_length)
    read = AdapterFiles(folder, found, peft)
    lora, values = _params(read, peft)
    files = {**files_of_model(base), **files_of_folder(folder)}
    has_tokenizer = TOKENIZER_NAME in files
    if has_tokenizer:
        load_tokenizer(str(files[TOKENIZER_NAME]))
    dtype, notes = train_dtype(found.files)
    training = training_note(found.config, found.model, found.moe)
    settings = run_settings(
        found.model, found.moe, out, tokenizer=has_tokenizer, name=out.absolute().name
    )
    settings |= {"train": {"dtype": dtype}, "optimizer": {"lr": _LEARNING_RATE}, "lora": lora}
    config = resolve(Config.model_validate(settings), 1, cuda=False)
    state = TrainState(step=0, samples=0, optimizer={}, base=BaseWeights.of(base).as_state())
    try:
        with filled_folder(out):
            keep_files(files, out)
            write_settings(settings, out, folder)
            checkpoint = save_checkpoint(
                out / "checkpoints",
                _pieces(values),
                state=state,
                config=config.model_dump(),
                groups=ProcessGroups.single(),
            )
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    not_finite = (info.name for info, value in values if not value.isfinite().all())
    return ImportedRun(
        config_path=out / CONFIG_NAME,
        checkpoint=checkpoint,
        config=config,
        num_params=read.num_params(),
        num_mtp_params=0,
        not_finite=next(not_finite, None),
        absent_layers=found.absent_layers,
        notes=(*found.notes, *notes, *(() if training is None else (training,))),
    )


def _params(
    read: AdapterFiles, peft: PeftConfig
) -> tuple[dict[str, Any], list[tuple[ParamInfo, Tensor]]]:
    """Return the ``[lora]`` section, and the parameters of a checkpoint with descriptions."""
    lora, adapters = _uniform(read.adapters(), read.scales, peft)
    every = {each.name for param in read.names.params for each in param.projections}
    if adapters.keys() != every:
        lora["targets"] = endings(adapters.keys(), every)
    saved = read.saved()
    if saved:
        lora["modules_to_save"] = sorted(saved)
    values = _described(read.names.params, adapters, LoraConfig.model_validate(lora))
    whole = saved | read.buffers()
    return lora, values + [(read.infos[name], value) for name, value in whole.items()]


def _pieces(values: Iterable[tuple[ParamInfo, Tensor]]) -> list[ParamPiece]:
    return [
        ParamPiece(
            info=info,
            start=0,
            end=value.numel(),
            tensors={MAIN_PARAM: value.float().reshape(-1)},
        )
        for info, value in values
    ]


def _base_folder(folder: Path, base: str | Path | None, peft: PeftConfig) -> Path:
    named = Path(base or peft.base or "")
    if base is None and not (peft.base and named.is_dir()):
        what = f"is {peft.base}, which is not a folder here" if peft.base else "is empty"
        raise MegacoreError(
            f"{folder} is an adapter, and its base_model_name_or_path {what}; name the Hugging "
            "Face folder of its base with --base FOLDER"
        )
    if not is_model_folder(named):
        raise MegacoreError(
            f"--base must be a Hugging Face folder with config.json, got {named}"
            if base
            else f"base_model_name_or_path is {named}, a folder without config.json; name the "
            "Hugging Face folder of the base with --base FOLDER"
        )
    return named.absolute()


def _uniform(
    adapters: dict[str, Adapter], scales: Mapping[str, float], peft: PeftConfig
) -> tuple[dict[str, Any], dict[str, Adapter]]:
    """Give all adapters one rank, by zeros, and one factor, which is folded into B."""
    rank = max(each.a.shape[-2] for each in adapters.values())
    scale = Counter(scales[name] for name in adapters).most_common(1)[0][0]
    alpha = scale * (math.sqrt(rank) if peft.rs else rank)
    if rank == peft.rank and scale == peft.scale_of(""):
        alpha = peft.alpha
    same = {}
    for name, each in adapters.items():
        b = each.b if scales[name] == scale else each.b * (scales[name] / scale)
        same[name] = replace(each, a=widened(each.a, -2, rank), b=widened(b, -1, rank))
    lora = {"rank": rank, "alpha": alpha}
    others = {"rs": peft.rs, "dora": peft.dora, "dropout": peft.dropout}
    return lora | {name: value for name, value in others.items() if value}, same


def _described(
    params: Iterable[BaseParam], adapters: Mapping[str, Adapter], lora: LoraConfig
) -> list[tuple[ParamInfo, Tensor]]:
    """Return the adapters as parameters, with their descriptions."""
    values = []
    for base in params:
        infos = describe_adapters(base.info, lora)
        for projection in base.projections:
            adapter = adapters.get(projection.name)
            if adapter is not None:
                parts = {"lora_a": adapter.a, "lora_b": adapter.b}
                if adapter.magnitude is not None:
                    parts["lora_magnitude"] = adapter.magnitude
                values += [
                    (infos[f"{projection.name}.{part}"], each) for part, each in parts.items()
                ]
    return values
