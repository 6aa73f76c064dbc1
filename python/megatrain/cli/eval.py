"""``megacore eval RUN``: loss and perplexity of trained weights."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.train import (
    check_start,
    launch_options,
    prepare_environment,
    resolve_for_training,
)
from megatrain.cli.values import require_at_least, whole_number
from megatrain.launch.environment import external_launcher, launched_rank

if TYPE_CHECKING:
    from megatrain.config import ResolvedConfig
    from megatrain.launch.context import RankContext
    from megatrain.train.evaluate import EvalSource


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "eval",
        description="Compute loss and perplexity of a run, a checkpoint or a Hugging Face folder: "
        "on the validation sets of the run (train.eval_steps batches of each, as in training), or "
        "on other data. Settings of the run can be changed: --model.seq_length=512, "
        "--parallel.tp=2.",
        usage="megacore eval RUN [--data DATA | --reference PAIRS] [--logprobs FILE] "
        "[--base WEIGHTS] [--nproc N] [--json] [--section.key=value ...]",
    )
    parser.add_argument(
        "weights",
        metavar="RUN",
        type=Path,
        help="a run's folder, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="text, folder, .jsonl, .parquet or prefix of .bin/.idx, read whole instead of the "
        "validation sets",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every sample of each validation set once, instead of train.eval_steps batches",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=whole_number, default=1, help="processes (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--reference",
        metavar="PAIRS",
        help="write the log-probs of the answers of pairs, for training on preferences",
    )
    parser.add_argument(
        "--base",
        metavar="WEIGHTS",
        help="the base of a checkpoint of adapters (default: the place that the checkpoint names)",
    )
    parser.add_argument(
        "--logprobs",
        metavar="FILE",
        type=Path,
        help="write the log-prob of every token, one line of JSON per sample",
    )


def run(args: argparse.Namespace) -> int:
    """Find the weights, then start or join the ranks."""
    require_at_least(args, nproc=1)
    if args.reference is not None and (args.data or args.logprobs or args.all):
        raise ConfigError(
            "--reference names the pairs and writes their log-probs; leave --data, --logprobs and "
            "--all out"
        )
    launcher = external_launcher(os.environ)
    threads = prepare_environment(debug=args.debug)

    from megatrain.launch.start import run_ranks_local, run_under_torchrun
    from megatrain.train.evaluate import open_source

    world_size = launched_rank(os.environ).world_size if launcher else args.nproc
    source = open_source(
        args.weights,
        args.settings,
        data=args.data,
        whole=args.all,
        pairs=args.reference,
        base=args.base,
    )
    config = resolve_for_training(source.config, world_size, launcher=launcher or "--nproc")
    check_start(config)
    options = replace(launch_options(config.run, threads=threads, debug=args.debug), error_dir=None)
    worker = partial(evaluate_rank, source, config, args.json, args.logprobs)
    if launcher:
        return run_under_torchrun(worker, options=options)
    return run_ranks_local(world_size, worker, options=options)


def evaluate_rank(
    source: EvalSource,
    config: ResolvedConfig,
    as_json: bool,
    logprobs: Path | None,
    context: RankContext,
) -> int:
    """Evaluate on one rank; rank 0 prints."""
    from megatrain.train.evaluate import evaluate, evaluate_pairs
    from megatrain.train.metrics import finite

    if source.pairs is not None:
        pairs = evaluate_pairs(source, config, context)
        if context.rank == 0:
            print(json.dumps(finite(pairs), indent=2) if as_json else _text_of_pairs(pairs))
        return 0
    found = evaluate(source, config, context, logprobs=logprobs)
    if context.rank == 0:
        print(json.dumps(finite(found), indent=2) if as_json else _text(found), flush=True)
    return 0


def _text_of_pairs(found: dict[str, Any]) -> str:
    lines = [f"{found['path']}: {found['parameters']:,} parameters"]
    lines += [f"note: {note}" for note in found["notes"]]
    return "\n".join(
        [
            *lines,
            f"{found['pairs']:,} pairs, mean log-prob of chosen answers {found['chosen']:.4f}, of "
            f"rejected ones {found['rejected']:.4f}: {found['file']}",
        ]
    )


def _text(found: dict[str, Any]) -> str:
    step = "" if found["step"] is None else f", step {found['step']:,}"
    lines = [f"{found['path']}{step}: {found['parameters']:,} parameters"]
    width = max(len(name) for name in found["sets"])
    for name, one in found["sets"].items():
        if "groups" in one:
            rest = "  ".join(
                f"{key} {value:.4f}" for key, value in one.items() if key not in ("loss", "groups")
            )
            lines.append(
                f"{name:{width}}  loss {one['loss']:.4f}  {one['groups']:,} groups  {rest}"
            )
            continue
        lines.append(
            f"{name:{width}}  loss {one['loss']:.4f}  perplexity {one['perplexity']:.2f}  "
            f"{one['tokens']:,} tokens"
        )
    if len(found["sets"]) > 1:
        lines.append(
            f"{'mean':{width}}  loss {found['loss']:.4f}  perplexity {found['perplexity']:.2f}"
        )
    return "\n".join(lines)
