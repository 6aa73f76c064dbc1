"""``megacore data``: tokenize, inspect, merge and check training data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError, DataError
from megatrain.cli.values import require_at_least, whole_number

if TYPE_CHECKING:
    from megatrain.data import Sample
    from megatrain.data.prepare import Progress
    from megatrain.data.tokenizer import Tokenizer

EPILOG = """\
prepare INPUT ... -o PREFIX   tokenize text, JSON, parquet, arrow into PREFIX.bin and .idx
info PREFIX ...               documents, tokens and lengths of token files
show CONFIG.toml              samples of a run in the order of training
merge PREFIX ... -o PREFIX    join token files
check PREFIX ...              read everything and name the first bad document
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "data",
        description="Prepare and inspect training data.",
        usage="megacore data {prepare,info,show,merge,check} PATH ... [--option ...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=sorted(_ACTIONS), help="what to do")
    add("paths", nargs="+", type=Path, metavar="PATH", help="files, folders, prefixes or a TOML")
    add("-o", "--output", type=Path, metavar="PREFIX", help="result of prepare and merge")
    add("--tokenizer", metavar="FILE", help="tokenizer.json, or bytes (prepare: bytes)")
    add("--field", default="text", help="field or column with the text (text)")
    add("--separator", metavar="TEXT", help="text after each field of a prompt (an empty line)")
    kinds = ["text", "jsonl", "json", "parquet", "arrow"]
    add("--kind", choices=kinds, help="kind of the files (by contents and name)")
    add("--force", action="store_true", help="prepare, merge: replace existing token files")
    add("--bos", metavar="TOKEN", help='token before each document (as the tokenizer); "" for none')
    add("--eod", metavar="TOKEN", help='token after each document (the tokenizer\'s); "" for none')
    add("--skip-bad", action="store_true", help="prepare: leave out records that cannot be read")
    add("--workers", type=whole_number, metavar="N", help="prepare: processes (all processors)")
    add("--set", default="train", metavar="NAME", help="show: train, or a validation set (train)")
    add("--count", type=whole_number, default=3, metavar="N", help="show: samples (3)")
    add("--start", type=whole_number, default=0, metavar="N", help="show: first sample (0)")
    add("--json", action="store_true", help="show: one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    require_at_least(args, workers=1, count=1, start=0)
    _ACTIONS[args.action](args)
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from megatrain.data import load_tokenizer
    from megatrain.data.files import find_files
    from megatrain.data.frame import frame_of
    from megatrain.data.merge import check_output
    from megatrain.data.prepare import PrepareOptions, prepare

    output = _output(args)
    check_output(output, force=args.force)
    for path in args.paths:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise DataError(
                f"the result {output} must not be inside of the input {path}, which would then "
                "hold token files beside its text; choose another prefix"
            )
    options = PrepareOptions(
        tokenizer=args.tokenizer or "bytes",
        field=args.field,
        separator=args.separator,
        kind=args.kind,
        bos=args.bos,
        eod=args.eod,
        skip_bad=args.skip_bad,
        advice="; --skip-bad leaves such records out",
    )
    found = [find_files(path, args.kind) for path in args.paths]
    for path, one in zip(args.paths, found, strict=True):
        for note in one.notes(path):
            print(note)
    files = [file for one in found for file in one.files]
    with progress_bar(f"preparing {output}") as progress:
        result = prepare(files, output, options, workers=args.workers, progress=progress)
    print(f"{output}.bin, .idx: {result.num_documents:,} documents, {result.num_tokens:,} tokens")
    frame = frame_of(load_tokenizer(options.tokenizer), bos=args.bos, eod=args.eod)
    for note in frame.notes + result.notes:
        print(note)
    if result.num_empty:
        print(f"{result.num_empty:,} documents without text were left out")
    if result.num_skipped:
        print(f"{result.num_skipped:,} bad records were left out, first: {result.first_skipped}")


def _info(args: argparse.Namespace) -> None:
    import numpy as np

    from megatrain.data import read_indexed

    for prefix in _prefixes(args):
        indexed = read_indexed(prefix)
        lengths = np.asarray(indexed.lengths)
        print(
            f"{prefix}: {indexed.num_documents:,} documents, {indexed.num_tokens:,} tokens, ",
            end="",
        )
        print(f"{indexed.stored.dtype.name}, {indexed.stored.nbytes:,} bytes")
        if len(lengths) == 0:
            continue
        print(f"  sequences of {lengths.min():,} to {lengths.max():,} tokens, ", end="")
        print(f"median {int(np.median(lengths)):,}, mean {lengths.mean():,.1f}")
        buckets = np.bincount(np.frexp(lengths)[1])
        for power, count in enumerate(buckets):
            if count:
                low, high = (1 << power) // 2, max(0, (1 << power) - 1)
                bar = "#" * max(1, round(40 * count / buckets.max()))
                print(f"  {low:>10,} to {high:>10,}  {count:>12,}  {bar}")


def _check(args: argparse.Namespace) -> None:
    from megatrain.data import load_tokenizer, read_indexed
    from megatrain.data.indexed import check_documents

    vocab_size = None if args.tokenizer is None else load_tokenizer(args.tokenizer).vocab_size
    for prefix in _prefixes(args):
        indexed = read_indexed(prefix)
        with progress_bar(f"checking {prefix}") as progress:
            check_documents(indexed, vocab_size=vocab_size, progress=progress)
        print(f"{prefix}: {indexed.num_documents:,} documents are good")


def _merge(args: argparse.Namespace) -> None:
    from megatrain.data.merge import merge_indexed

    output = _output(args)
    num_documents = merge_indexed(_prefixes(args), output, force=args.force)
    print(f"{output}.bin, .idx: {num_documents:,} documents")


def _show(args: argparse.Namespace) -> None:
    from megatrain.cli.train import fewest_ranks
    from megatrain.config import load_config, resolve
    from megatrain.data import load_tokenizer
    from megatrain.data.loading import load_run_data

    if len(args.paths) != 1:
        raise ConfigError(f"show takes one TOML file, got {len(args.paths)}")
    config = load_config(args.paths[0], args.settings)
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    size = config.run.nproc or fewest_ranks(config.parallel)
    config = resolve(config, size, vocab_size=vocab_size, cuda=False)
    with progress_bar("preparing the data") as progress:
        data = load_run_data(config, progress=progress)
    sets = {"train": data.train, **data.validation}
    if args.set not in sets:
        raise ConfigError(f'--set must be one of {", ".join(sets)}, got "{args.set}"')
    for number in range(args.start, args.start + args.count):
        sample = sets[args.set].sample(number)
        if args.json:
            print(json.dumps({"index": number, **_as_json(sample)}))
        else:
            _print_sample(number, sample, data.tokenizer)


def _as_json(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": sample.tokens.tolist(),
        "labels": sample.labels.tolist(),
        "loss_mask": (sample.labels >= 0).astype(int).tolist(),
        "document_starts": list(sample.document_starts),
    }


def _print_sample(number: int, sample: Sample, tokenizer: Tokenizer) -> None:
    """Print the text of a sample: learned tokens green, others dim, a bar before each document.

    Without colors, learned tokens are in ``{+ +}`` if some are not learned.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    starts = set(sample.document_starts)
    text = Text(f"sample {number:,}: ", style="bold")
    text.append(f"{int((sample.labels >= 0).sum()):,} of {len(sample.labels):,} labels count, ")
    text.append(f"starts of documents: {len(starts)}\n")
    # A token is learned where it is the label of the one before it.
    learned = [False, *(sample.labels[:-1] >= 0).tolist()]
    left, right = ("", "") if console.color_system or all(learned[1:]) else ("{+", "+}")
    begin = 0
    for end in range(1, len(learned) + 1):
        if end < len(learned) and learned[end] == learned[begin] and end not in starts:
            continue
        if begin in starts:
            text.append("|", style="bold cyan")
        piece = _printable(tokenizer.decode(sample.tokens[begin:end]))
        if learned[begin]:
            text.append(f"{left}{piece}{right}", style="not bold green")
        else:
            text.append(piece, style="dim not bold")
        begin = end
    console.print(text, soft_wrap=True)


def _printable(text: str) -> str:
    """Replace control characters, such as those of padding, by dots."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\u00b7" for char in text)


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Show finished and all parts of some work on a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _output(args: argparse.Namespace) -> Path:
    if args.output is None:
        raise ConfigError(f"{args.action} needs the prefix of its result: --output PREFIX")
    output: Path = args.output
    return output


def _prefixes(args: argparse.Namespace) -> list[Path]:
    from megatrain.data.indexed import indexed_prefix
    from megatrain.data.paths import missing_path

    prefixes = []
    for path in args.paths:
        prefix = indexed_prefix(path)
        if prefix is None:
            index = path.with_name(path.name + ".idx")
            raise DataError(missing_path("indexed data file", index))
        prefixes.append(prefix)
    return prefixes


_ACTIONS = {
    "prepare": _prepare,
    "info": _info,
    "show": _show,
    "merge": _merge,
    "check": _check,
}
