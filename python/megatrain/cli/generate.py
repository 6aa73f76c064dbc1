"""``megacore generate CHECKPOINT --prompt TEXT``: continue texts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.values import number, require_at_least, seed_number, whole_number

if TYPE_CHECKING:
    from megatrain.data import Tokenizer
    from megatrain.generation.restore import RestoredModel


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser(
        "generate",
        description="Continue texts with a trained checkpoint, on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a run's folder, a folder of checkpoints, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        action="append",
        default=argparse.SUPPRESS,  # or help would name None as its default
        help="text to continue; may be given several times, for a batch",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole_number, default=200, help="tokens to append"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=number, default=0.8, help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=whole_number,
        default=argparse.SUPPRESS,
        help="draw from the K likeliest tokens (default: all)",
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
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=argparse.SUPPRESS,
        help="end before this text; may be given several times (default: only the ids that the "
        "model's files name as the end, and the tokenizer's end-of-document token, end a text)",
    )
    parser.add_argument(
        "--base",
        metavar="WEIGHTS",
        default=argparse.SUPPRESS,
        help="the base of a checkpoint of adapters (default: the place that the checkpoint names)",
    )
    parser.add_argument(
        "--bos",
        metavar="TOKEN",
        default=argparse.SUPPRESS,
        help='token before each prompt; "" for none (default: as in training, data.bos)',
    )


def run(args: argparse.Namespace) -> int:
    """Load the model in this process and print the prompts with their continuations."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

    import torch

    from megacore.qualification import choose_kernels
    from megatrain.data.frame import frame_of
    from megatrain.generation.decoding import Sampling, stream
    from megatrain.generation.restore import restore_model

    sampling = Sampling(  # checked before a large model is loaded
        temperature=args.temperature,
        top_k=getattr(args, "top_k", None),
        top_p=args.top_p,
        seed=args.seed,
    )
    stops = getattr(args, "stop", [])
    require_at_least(args, max_new_tokens=0)
    for option, texts in (("--prompt", args.prompt), ("--stop", stops)):
        for text in texts:
            _require_text(option, text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choose_kernels(torch.device(device))
    restored = restore_model(args.checkpoint, device=device, base=getattr(args, "base", None))
    _require_tokenizer(args.checkpoint, restored)
    tokenizer, data = restored.tokenizer, restored.config.data
    frame = frame_of(tokenizer, bos=getattr(args, "bos", data.bos), eod=data.eod)
    prompts = [tokenizer.encode(prompt) for prompt in args.prompt]
    ends = _ends(args.checkpoint, tokenizer, data.eod)
    texts = [Continuation(tokenizer, ids.tolist(), stops, ends) for ids in prompts]
    opened = [frame.opened(ids).tolist() for ids in prompts]
    _show(texts, stream(restored.model, opened, sampling), args.max_new_tokens)
    return 0


def _ends(checkpoint: Path, tokenizer: Tokenizer, eod: str | None) -> frozenset[int]:
    """Return the ids that end a text: by the model's files, and of its training documents."""
    from megatrain.data.special_tokens import generation_ends

    folders = (checkpoint, *([] if tokenizer.name == "bytes" else [Path(tokenizer.name)]))
    stated = next((ends for folder in folders if (ends := generation_ends(folder))), ())
    of_documents = tokenizer.token_id(eod) if eod else tokenizer.special.eos_id
    return frozenset(stated) | ({of_documents} if of_documents is not None else set())


class Continuation:
    """Text of one prompt that grows token by token.

    Args:
        tokenizer: Decoder of the tokens.
        prompt: Token ids.
        stops: Texts that end the continuation and do not belong to it.
        ends: Ids that end the continuation and do not belong to it.

    Attributes:
        has_ended: Whether a stop text or the end of the document was reached.
        num_new: Tokens after the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._ids = list(prompt)
        self._stops = stops
        self._taken = 0
        self._prompt_length = len(tokenizer.decode(self._ids))
        self.has_ended = False
        self.num_new = 0

    def add(self, token: int) -> None:
        """Append a token."""
        self.num_new += 1
        self._ids.append(token)
        self.has_ended = token in self._ends or self._text()[1]

    def take(self, *, all_of_it: bool) -> str:
        """Return the text after that of the last call, without an end that may still change.

        An unfinished character or the beginning of a stop text may change, unless ``all_of_it``.
        """
        text, stopped = self._text()
        if not (all_of_it or stopped):
            text = text.rstrip("\ufffd")
            held = max(
                (n for stop in self._stops for n in range(len(stop)) if text.endswith(stop[:n])),
                default=0,
            )
            text = text[: max(len(text) - held, self._prompt_length)]
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        return new

    def _text(self) -> tuple[str, bool]:
        """Return the text up to the first stop text, and whether there is one."""
        has_end = self.num_new > 0 and self._ids[-1] in self._ends
        ids = self._ids[:-1] if has_end else self._ids
        text = self._tokenizer.decode(ids)
        found = [text.find(stop, self._prompt_length) for stop in self._stops]
        ends = [position for position in found if position >= 0]
        return (text[: min(ends)], True) if ends else (text, False)


def _show(
    texts: list[Continuation], tokens: Iterator[list[int | None]], max_new_tokens: int
) -> None:
    """Print each text as its tokens arrive, one text after another."""

    def is_done(text: Continuation) -> bool:
        return text.has_ended or text.num_new >= max_new_tokens

    shown = 0
    while True:
        while shown < len(texts):
            done = is_done(texts[shown])
            _print_text(texts[shown].take(all_of_it=done))
            if not done:
                break
            shown += 1
            _print_text("\n\n" if shown < len(texts) else "\n")
        if shown == len(texts):
            return
        for text, token in zip(texts, next(tokens), strict=True):
            if token is not None and not is_done(text):
                text.add(token)


def _require_tokenizer(path: Path, restored: RestoredModel) -> None:
    """Raise an error for a Hugging Face folder without a tokenizer, unless it is of bytes.

    A run may have been trained on bytes with a larger vocabulary: then a note is printed.
    """
    vocab = restored.config.model.vocab_size
    is_odd = restored.config.data.tokenizer == "bytes" and vocab != restored.tokenizer.vocab_size
    if is_odd and not (path / "config.json").is_file():
        print(
            f"note: {path} has no tokenizer, and its vocabulary of {vocab} ids is not that of "
            "bytes: the prompt is read as bytes, and so is the answer",
            file=sys.stderr,
        )
    elif is_odd:
        raise ConfigError(
            f"{path} has no tokenizer.json, and its vocabulary of {vocab} ids is not that of "
            "bytes; copy the file there, or write it with AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(FOLDER) of transformers"
        )


def _require_text(option: str, text: str) -> None:
    """Raise an error for command-line bytes that are not text, and for no text."""
    if not text:
        raise ConfigError(f"{option} is empty; give at least one character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{option} is not valid UTF-8: character {error.start + 1} is {text[error.start]!r}"
        ) from None


def _print_text(text: str) -> None:
    """Print generated text; characters outside of the terminal's encoding become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
