"""Loss and perplexity of the weights of a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megacore.errors import ConfigError, DataError
from megatrain.checkpoint import StoredWeights, read_index
from megatrain.checkpoint.base_weights import check_base_option
from megatrain.checkpoint.model_files import tokenizer_beside
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME
from megatrain.config import Config, ResolvedConfig, config_from_values
from megatrain.data.indexed import indexed_prefix
from megatrain.data.pairs import (
    PairDataset,
    load_pairs,
    reference_header,
    reference_line,
    reference_path,
)
from megatrain.hf.import_hf import open_folder
from megatrain.hf_folder import dtype_name, is_model_folder
from megatrain.launch.context import RankContext
from megatrain.train.console import EvaluationConsole
from megatrain.train.initial_weights import load_base, load_initial_weights
from megatrain.train.logprobs import LogprobFile, LogprobRecorder
from megatrain.train.trainer import Trainer, build_trainer
from megatrain.train.weight_stream import weights_checksums

# Limit of the default sequence length of Hugging Face models, many of which take far longer ones.
MAX_SEQ_LENGTH = 2048
# Sections of a run that its evaluation uses; layout and files are chosen for the evaluation.
_KEPT = ("model", "moe", "lora", "data", "train", "preference")
# Settings in them that an evaluation has no use for.
_OF_TRAINING = {
    "moe": ("echo", "static_transport"),
    "train": ("recompute", "recompute_keep", "callbacks"),
}


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """Weights to evaluate.

    Attributes:
        path: Checkpoint folder, or Hugging Face folder.
        step: Steps of the checkpoint; ``None`` for a Hugging Face folder.
        config: The settings to evaluate with, not resolved.
        whole: Whether every sample of a set counts once, instead of ``train.eval_steps`` batches.
        pairs: File or folder of pairs, for the log-probs of their answers; ``None``: the loss.
        base: Base of a checkpoint of adapters; ``None``: the place that the checkpoint names.
    """

    path: Path
    step: int | None
    config: Config
    whole: bool
    pairs: str | None = None
    base: str | None = None


def open_source(
    path: str | Path,
    settings: Sequence[tuple[str, str]] = (),
    *,
    data: str | None = None,
    whole: bool = False,
    pairs: str | None = None,
    base: str | None = None,
) -> EvalSource:
    """Find weights, and the settings of their evaluation: those of the run, on one process.

    Args:
        path: A run's folder, a folder of checkpoints, a checkpoint or a Hugging Face folder.
        settings: Settings of the user, which override those of the run.
        data: Data to evaluate on, as ``data.source``. Default: the validation sets.
        whole: As in `EvalSource`; also if ``data`` is given and ``train.eval_steps`` is not.
        pairs: As in `EvalSource`.
        base: As in `EvalSource`.

    Raises:
        CheckpointError: If there is no checkpoint, or a base is given for a whole model.
        MegacoreError: If the Hugging Face model is not supported, or a setting is invalid.
    """
    path, step = Path(path), None
    keys = {key for key, _ in settings}
    if "checkpoint.load_weights" in keys:
        raise ConfigError(
            f"checkpoint.load_weights must be left out: the weights of {path} are evaluated; "
            "--base names the base of adapters"
        )
    data, whole = (data, whole) if pairs is None else (pairs, True)
    if is_model_folder(path):
        values = _hf_values(path, data, keys)
    else:
        stored = StoredWeights(path)
        path, step = stored.folder, read_index(stored.folder).state.step
        values = _run_values(stored.config)
    if data is not None:
        values["data"] |= {
            "factory": None,
            "source": data,
            "sources": [],
            "validation": [{"path": data}],
            "order": "megacore",
        }
        whole = whole or "train.eval_steps" not in keys
    values.setdefault("train", {})
    if pairs is not None:
        # The loss of a run of pairs would need the reference that is computed here.
        values["data"] |= {"split": "1,0", "validation": [], "document_mask": True}
        values["train"] |= {"loss": None}
        values["preference"] = {**values.get("preference", {}), "loss": None}
    if whole:
        values["train"]["loss_normalization"] = "token"
    if values["train"].get("eval_interval") == 0:
        values["train"]["eval_interval"] = 1  # or too little validation data would be left out
    config = config_from_values(values, source=str(path), overrides=settings)
    if step is not None and "data.tokenizer" not in keys:
        tokenizer = tokenizer_beside(config.data.tokenizer, path)
        data_section = config.data.model_copy(update={"tokenizer": tokenizer})
        config = config.model_copy(update={"data": data_section})
    check_base_option(path, base)
    return EvalSource(path=path, step=step, config=config, whole=whole, pairs=pairs, base=base)


def _run_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    values = {section: dict(stored[section]) for section in _KEPT if section in stored}
    for section, names in _OF_TRAINING.items():
        for name in names:
            values.get(section, {}).pop(name, None)
    return values


def _hf_values(folder: Path, data: str | None, keys: set[str]) -> dict[str, Any]:
    found = open_folder(folder)
    model, moe = found.model, found.moe
    values: dict[str, Any] = {
        "model": model.model_dump() | {"seq_length": min(model.seq_length, MAX_SEQ_LENGTH)},
        "moe": moe.model_dump(),
        "train": {"dtype": dtype_name(found.files.dtype())},
        "data": {},
    }
    if (folder / TOKENIZER_NAME).is_file():
        values["data"]["tokenizer"] = str(folder / TOKENIZER_NAME)
    elif "data.tokenizer" not in keys and (data is None or indexed_prefix(data) is None):
        raise ConfigError(
            f"{folder} has no {TOKENIZER_NAME}; set --data.tokenizer, or give tokens as --data, "
            "the prefix of a .bin/.idx pair"
        )
    return values


def evaluate(
    source: EvalSource,
    config: ResolvedConfig,
    context: RankContext,
    *,
    logprobs: Path | None = None,
) -> dict[str, Any]:
    """Load the weights and compute the loss of each validation set. Collective.

    Args:
        source: The weights.
        config: ``source.config``, resolved.
        context: Rank, world size and device of this process.
        logprobs: File for the log-probs of all labels, a line of JSON per sample.

    Returns:
        ``path``, ``step``, ``parameters``, ``loss`` and ``perplexity`` (the mean over the sets by
        weight, nats per token), and ``sets`` with ``loss``, ``perplexity`` and ``tokens`` of each:
        the labels that the loss is a mean of; with a loss of groups ``groups``, their number,
        and their metrics instead.
    """
    trainer = build_trainer(
        config, world_size=context.world_size, device=context.device, initialize=False
    )
    trainer = _loaded(trainer, source)
    counts = trainer.validation_samples(whole=source.whole)
    file = None if logprobs is None else LogprobFile(logprobs, trainer)
    recorder = None if file is None else LogprobRecorder(trainer)

    def on_batch(name: str) -> None:
        if file is not None and recorder is not None:
            samples = [one for one in recorder.take() if one.sample < counts[name]]
            file.write([one.to_json(name) for one in samples])
        console.batch()

    with EvaluationConsole(
        num_batches=sum(-(-count // config.train.global_batch_size) for count in counts.values()),
        num_tokens=sum(counts.values()) * config.model.seq_length,
        silent=context.rank != 0,
        file=sys.stderr,
    ) as console:
        found = trainer.evaluate(whole=source.whole, on_batch=on_batch)
    if file is not None:
        file.finish()
    for name, each in found.items():
        if each.num_labels == 0:
            raise DataError(f"no label of the validation set {name} counts, so it has no loss")
    mean = trainer.mean_validation_loss(found)
    return {
        "path": str(source.path),
        "step": source.step,
        "parameters": trainer.num_params,
        "loss": mean,
        "perplexity": perplexity(mean),
        "sets": {
            name: {"loss": each.loss, "groups": each.num_labels, **each.groups}
            if each.groups
            else {
                "loss": each.loss,
                "perplexity": perplexity(each.loss),
                "tokens": each.num_labels,
            }
            for name, each in found.items()
        },
    }


def _loaded(trainer: Trainer, source: EvalSource) -> Trainer:
    """Fill the weights of a trainer. Collective."""
    if source.base is not None:
        base, _ = load_base(trainer, source.base, adapters=source.path)
        trainer = replace(trainer, base=base)
    load_initial_weights(trainer, source.path)
    return trainer


def evaluate_pairs(
    source: EvalSource, config: ResolvedConfig, context: RankContext
) -> dict[str, Any]:
    """Load the weights and write the log-probs of the answers of all pairs. Collective.

    Args:
        source: The weights, and the pairs.
        config: ``source.config``, resolved.
        context: Rank, world size and device of this process.

    Returns:
        ``path``, ``step``, ``parameters``, ``pairs``, ``notes``, ``file``, and the means ``chosen``
        and ``rejected`` of the log-probs of the answers.

    Raises:
        DataError: If there are no pairs.
    """
    assert source.pairs is not None
    data = load_pairs(config, with_reference=False)
    found = data.train
    assert isinstance(found, PairDataset)
    every = PairDataset.in_order(found)
    data = replace(data, train=every, validation={"pairs": every}, validation_weights={"pairs": 1})
    trainer = build_trainer(config, world_size=context.world_size, device=context.device, data=data)
    trainer = _loaded(trainer, source)
    checksums = weights_checksums(trainer)
    path = reference_path(source.pairs, config.preference)
    file, recorder = LogprobFile(path, trainer), LogprobRecorder(trainer)
    model = str(source.path) if source.step is None else f"{source.path}, step {source.step:,}"
    limit = config.preference.limit(config.model.seq_length)
    header = reference_header(
        model=model, weights=checksums, num_pairs=len(every.pairs), max_length=limit
    )
    file.write([header])
    totals = [0.0, 0.0]

    def on_batch(_: str) -> None:
        lines = []
        for one in recorder.take():
            if one.sample < every.num_rows:
                sums = np.add.reduceat(one.logprobs.astype(np.float64), one.starts).tolist()
                for number, pair in enumerate(every.pairs_of(one.sample)):
                    logps = sums[2 * number], sums[2 * number + 1]
                    lines.append(reference_line(every.pairs, pair, logps))
                    totals[0], totals[1] = totals[0] + logps[0], totals[1] + logps[1]
        file.write(lines)
        console.batch()

    with EvaluationConsole(
        num_batches=-(-every.num_rows // config.train.global_batch_size),
        num_tokens=every.num_tokens,
        silent=context.rank != 0,
        file=sys.stderr,
    ) as console:
        trainer.evaluate(whole=True, on_batch=on_batch)
    file.finish()
    chosen, rejected = (total / len(every.pairs) for total in totals)
    return {
        "path": str(source.path),
        "step": source.step,
        "parameters": trainer.num_params,
        "pairs": len(every.pairs),
        "notes": list(data.notes),
        "file": str(path),
        "chosen": chosen,
        "rejected": rejected,
    }


def perplexity(loss: float) -> float:
    """Return the exponential of a loss, infinite if it is too large.

    Example:
        >>> perplexity(0.0), perplexity(1e6)
        (1.0, inf)
    """
    return math.exp(loss) if loss < 700.0 else math.inf
