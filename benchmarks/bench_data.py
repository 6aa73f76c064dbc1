"""Data: preparing against the tokenizer library, memory on a large corpus, waiting for samples.

    python benchmarks/bench_data.py prepare   # tokens/s, in turns with the library alone
    python benchmarks/bench_data.py memory    # memory and first step on a corpus of 4 GB
    python benchmarks/bench_data.py step      # step time with data and with tokens that are there

``memory`` writes its corpus into a temporary folder (``--dir``) and removes it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from _common import finish, header, options, take_turns
from megacore.config import Config, resolve
from megacore.data import read_indexed
from megacore.data.indexed import IndexWriter
from megacore.data.prepare import PrepareOptions, prepare
from megacore.parallel.batch import Microbatch
from megacore.train.trainer import Trainer, build_trainer

VOCAB = 1000  # small, so that steps are short
STEPS = 300  # of a run whose memory is measured


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("part", choices=["prepare", "memory", "step", "run"])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, help="corpus (prepare: 96, memory: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="of prepare")
    parser.add_argument("--workers", type=int, default=2, help="of prepare")
    parser.add_argument("--steps", type=int, default=200, help="of step")
    parser.add_argument("--settings", help="of run: JSON of the section [data]")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.part == "run":
        print(json.dumps(measure_run(json.loads(args.settings))))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        if args.part == "prepare":
            rows = bench_prepare(Path(folder), args.megabytes or 96, args.rounds, args.workers)
        elif args.part == "memory":
            rows = bench_memory(Path(folder), args.megabytes or 4000)
        else:
            rows = bench_step(Path(folder), args.steps)
    finish([header("torch", "tokenizers"), "\n".join(rows)], args.out)


# ---- preparing -----------------------------------------------------------------------------------


def bench_prepare(folder: Path, megabytes: int, rounds: int, workers: int) -> list[str]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = generated_texts(megabytes << 20)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = PrepareOptions(tokenizer=str(folder / "tokenizer.json"))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)

    def ours() -> None:
        prepare([path], folder / "out", options, workers=workers)

    def library() -> None:
        # Loaded in every round, as prepare does, with an empty cache of words.
        tokenizer = Tokenizer.from_file(options.tokenizer)
        for begin in range(0, len(texts), 1000):
            tokenizer.encode_batch_fast(texts[begin : begin + 1000], add_special_tokens=False)

    busy: dict[str, list[float]] = {"ours": [], "library": []}

    def measured(run: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            before = cpu_seconds()
            run()
            busy[run.__name__].append(cpu_seconds() - before)

        return timed

    contenders = {run.__name__: measured(run) for run in (ours, library)}
    times = take_turns(contenders, rounds=rounds, warmup=1)
    num_tokens = read_indexed(folder / "out").num_tokens
    rows = [
        f"{megabytes} MB of JSON lines, {num_tokens:,} tokens, {workers} cores, median of {rounds}",
        f"{'':<50}{'tokens/s':>12}{'tokens per CPU s':>20}",
    ]
    for name, text in {
        "ours": "megacore data prepare (reads, tokenizes, writes)",
        "library": "encode_batch_fast on text in memory",
    }.items():
        speeds = [num_tokens / statistics.median(x[name][-rounds:]) for x in (times, busy)]
        rows.append(f"{text:<50}{speeds[0]:>12,.0f}{speeds[1]:>20,.0f}")
    ratios = [
        statistics.median(b / a for a, b in zip(x["ours"], x["library"], strict=True))
        for x in (times, busy)
    ]
    return [*rows, f"{'ratio, median of rounds':<50}{ratios[0]:>12.2f}{ratios[1]:>20.2f}"]


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def generated_texts(size: int) -> list[str]:
    """Texts of invented words, frequent and rare ones as in a language."""
    random = np.random.RandomState(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(random.choice(letters[:18], random.randint(2, 11))) for _ in range(50_000)]
    texts, written = [], 0
    while written < size:
        ranks = np.minimum(random.zipf(1.2, size=random.randint(50, 800)) - 1, len(words) - 1)
        texts.append(" ".join(words[rank] for rank in ranks) + ".")
        written += len(texts[-1])
    return texts


# ---- memory --------------------------------------------------------------------------------------


def bench_memory(folder: Path, megabytes: int) -> list[str]:
    write_corpus(folder / "large", num_tokens=megabytes * 500_000)
    write_corpus(folder / "small", num_tokens=200_000)
    rows = [f"corpus of {(folder / 'large.bin').stat().st_size / 1e9:.2f} GB", ""]
    rows.append(f"{'data':<28}{'open s':>8}{'first step s':>14}{'own MB':>10}{'mapped MB':>12}")
    best_fit = {"packing": "best_fit", "document_mask": True}
    base: dict[str, Any] = {}
    for name, settings in {
        "small corpus": {"source": "small"},
        "stream": {"source": "large"},
        "best_fit, document_mask": {"source": "large", **best_fit},
        'order = "megatron"': {"source": "large", "order": "megatron"},
    }.items():
        data = {**settings, "source": str(folder / settings["source"])}
        data |= {"cache": str(folder / "cache"), "split": "1,0"}
        command = [sys.executable, __file__, "run", "--settings", json.dumps(data)]
        for _ in (False, True):  # the second run finds its indices
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(output.splitlines()[-1])
        base = base or found
        own, mapped = (found[key] - base[key] for key in ("own", "mapped"))
        first = f"{found['open']:>8.2f}{found['first']:>14.2f}"
        rows.append(f"{name:<28}{first}{own / 1e6:>10.1f}{mapped / 1e6:>12.1f}")
    return [
        *rows,
        "",
        f"one rank, {STEPS} steps of 16 samples of 128 tokens; then memory above that of the same",
        "run on a small corpus: own, and pages of mapped files, which the system can take back;",
        "open: until the trainer is built; first step: until its end; indices exist, imports are",
        "not counted",
    ]


def write_corpus(prefix: Path, *, num_tokens: int) -> None:
    random = np.random.RandomState(1)
    with IndexWriter(prefix, np.dtype("<u2")) as writer:
        written = 0
        while written < num_tokens:
            lengths = random.lognormal(6.0, 1.2, size=4096).astype(np.int64) + 1
            writer.append(random.randint(0, VOCAB, size=int(lengths.sum()), dtype=np.uint16))
            written += int(lengths.sum())
            for length in lengths.tolist():
                writer.add(length)


def measure_run(data: dict[str, Any]) -> dict[str, float]:
    start = time.perf_counter()
    trainer = small_trainer(data, steps=STEPS, seq_length=128)
    opened = time.perf_counter() - start
    for step in range(STEPS):
        trainer.train_step(step)
        if step == 0:
            first = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
    return {"open": opened, "first": first, "own": own, "mapped": mapped}


def small_trainer(
    data: dict[str, Any], *, steps: int, hidden: int = 16, batch: int = 16, seq_length: int = 512
) -> Trainer:
    sections = {
        "model": {
            "hidden_size": hidden,
            "num_layers": 1,
            "num_heads": 2,
            "seq_length": seq_length,
            "vocab_size": VOCAB,
        },
        "train": {
            "steps": steps,
            "microbatch_size": 4,
            "global_batch_size": batch,
            "eval_interval": 0,
        },
        "data": data,
    }
    torch.set_num_threads(1)
    config = resolve(Config.model_validate(sections), 1, cuda=False)
    return build_trainer(config, world_size=1, device=torch.device("cpu"))


# ---- waiting -------------------------------------------------------------------------------------


def bench_step(folder: Path, steps: int) -> list[str]:
    write_corpus(folder / "corpus", num_tokens=50_000_000)
    data = {"source": str(folder / "corpus"), "split": "1,0", "cache": str(folder / "cache")}
    rows = [f"{'data':<12}{'ms with data':>14}{'ms without':>12}{'ratio':>8}{'waited ms':>11}"]
    for name, settings in {"stream": {}, "best_fit": {"packing": "best_fit"}}.items():
        trainer = small_trainer(data | settings, steps=10**6, hidden=64, batch=4)
        made = trainer._batches(trainer.data.train)(0, 0)
        with_data: list[float] = []
        without: list[float] = []
        waited: list[float] = []

        def synthetic(step: int, number: int, made: Microbatch = made) -> Microbatch:
            del step, number
            return made

        for step in range(steps):
            found = trainer.train_step(step)
            with_data.append(found.step_time_s)
            waited.append(found.phases["data"])
            without.append(trainer.step.train(step, synthetic, lr=1e-4).step_time_s)
        times = [1e3 * statistics.quantiles(values, n=4)[0] for values in (with_data, without)]
        wait = 1e3 * statistics.quantiles(waited, n=4)[0]
        ratio = times[0] / times[1]
        rows.append(f"{name:<12}{times[0]:>14.1f}{times[1]:>12.1f}{ratio:>8.3f}{wait:>11.3f}")
    note = f"first quartiles of {steps} steps of 4 x 512 tokens each, in turns, on one thread"
    return [*rows, "", note]


if __name__ == "__main__":
    main()
