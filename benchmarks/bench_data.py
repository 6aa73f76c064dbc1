"""Data: preparing against the tokenizer library, memory on a large corpus, waiting for samples.

    python benchmarks/bench_data.py prepare   # tokens/s, in turns with the library alone
    python benchmarks/bench_data.py memory    # memory and first step on a corpus of 4 GB
    python benchmarks/bench_data.py step      # step time with data and with tokens that are there
    python benchmarks/bench_data.py blend     # order of blends, beside megatron-core's function

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from _common import finish, header, options, take_turns
from megacore.parallel.batch import Microbatch
from megatrain.config import Config, resolve
from megatrain.data import read_indexed
from megatrain.data.indexed import IndexWriter
from megatrain.data.megatron import fill_blend_index, normalized
from megatrain.train.trainer import Trainer, build_trainer

VOCAB = 1000  # small, so that steps are short
BLOCK = 10  # steps that are timed together
STEPS = 300  # of a run whose memory is measured


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("part", choices=["prepare", "memory", "step", "blend", "run"])
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
        elif args.part == "blend":
            rows = bench_blend(args.rounds)
        else:
            rows = bench_step(Path(folder), args.steps)
    finish([header("torch", "tokenizers"), "\n".join(rows)], args.out)


# ---- order of blends -----------------------------------------------------------------------------


def bench_blend(rounds: int, size: int = 300_000) -> list[str]:
    from megatron.core.datasets import helpers_cpp

    rows = ["sources | ours us per sample | megatron-core | ratio (processor time, fastest round)"]
    for count in (2, 10, 100, 1000):
        weights = normalized(np.random.RandomState(count).rand(count) ** 4 + 1e-4)
        ours, theirs = (
            (np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)) for _ in range(2)
        )
        contenders = {
            "ours": partial(fill_blend_index, weights, *ours),
            "megatron": partial(
                helpers_cpp.build_blending_indices, *theirs, np.array(weights), count, size, False
            ),
        }
        times = take_turns(contenders, rounds=rounds, clock=time.process_time)
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        us = {name: min(taken) / size * 1e6 for name, taken in times.items()}
        ratio = us["megatron"] / us["ours"]
        rows.append(f"{count:7d} | {us['ours']:18.3f} | {us['megatron']:13.3f} | {ratio:5.2f}x")
    return rows


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
    name = str(folder / "tokenizer.json")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    tiny = folder / "tiny.jsonl"
    tiny.write_text(json.dumps({"text": "one line"}) + "\n")

    def command(source: Path, prefix: Path) -> None:
        line = [sys.executable, "-m", "megacore", "data", "prepare", str(source)]
        line += ["-o", str(prefix), "--force"]
        line += ["--tokenizer", name, "--workers", str(workers)]
        subprocess.run(line, check=True, capture_output=True)

    def ours() -> None:
        command(path, folder / "out")

    def start() -> None:
        command(tiny, folder / "tiny")

    def library() -> None:
        # Loaded in every round, as prepare does, with an empty cache of words.
        tokenizer = Tokenizer.from_file(name)
        for begin in range(0, len(texts), 1000):
            tokenizer.encode_batch_fast(texts[begin : begin + 1000], add_special_tokens=False)

    busy: dict[str, list[float]] = {"ours": [], "library": [], "start": []}

    def measured(run: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            before = cpu_seconds()
            run()
            busy[run.__name__].append(cpu_seconds() - before)

        return timed

    contenders = {run.__name__: measured(run) for run in (ours, library, start)}
    times = take_turns(contenders, rounds=rounds, warmup=1)
    num_tokens = read_indexed(folder / "out").num_tokens
    rows = [
        f"{megabytes} MB of JSON lines, {num_tokens:,} tokens, {workers} cores, median of {rounds}",
        f"{'':<50}{'tokens/s':>12}{'tokens per CPU s':>20}",
    ]
    for key, text in {
        "ours": "megacore data prepare (starts, reads, writes)",
        "library": "encode_batch_fast on text in memory",
    }.items():
        speeds = [num_tokens / statistics.median(x[key][-rounds:]) for x in (times, busy)]
        rows.append(f"{text:<50}{speeds[0]:>12,.0f}{speeds[1]:>20,.0f}")
    ratios = [
        statistics.median(b / a for a, b in zip(x["ours"], x["library"], strict=True))
        for x in (times, busy)
    ]
    rows.append(f"{'ratio, median of rounds':<50}{ratios[0]:>12.2f}{ratios[1]:>20.2f}")
    seconds = [statistics.median(x["start"]) for x in (times, busy)]
    text = "the command on one line, without workers: seconds"
    return [*rows, f"{text:<50}{seconds[0]:>12.2f}{seconds[1]:>20.2f}"]


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
    rows.append(
        f"{'data':<28}{'open s':>8}{'first step s':>14}{'own MB':>10}{'mapped MB':>12}"
        f"{'building MB':>14}"
    )
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
        building, found = (  # the second run finds its indices
            json.loads(
                subprocess.run(
                    command, check=True, capture_output=True, text=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
        base = base or found
        own, mapped = (found[key] - base[key] for key in ("own", "mapped"))
        peak = building["peak"] - base["peak"]
        first = f"{found['open']:>8.2f}{found['first']:>14.2f}"
        rows.append(f"{name:<28}{first}{own / 1e6:>10.1f}{mapped / 1e6:>12.1f}{peak / 1e6:>14.1f}")
    return [
        *rows,
        "",
        f"one rank, {STEPS} steps of 16 samples of 128 tokens; the largest memory after a step",
        "above that of the same run on a small corpus: own, and pages of mapped files, which the",
        "system can take back; open: until the trainer is built; first step: until its end;",
        "indices exist, imports are not counted. building: peak of the one rank of a machine",
        "that builds the indices, own and mapped",
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
    own = mapped = 0
    for step in range(STEPS):
        trainer.train_step(step)
        if step == 0:
            first = time.perf_counter() - start
        used = memory()
        own, mapped = max(own, used["RssAnon"]), max(mapped, used["RssFile"])
    return {"open": opened, "first": first, "own": own, "mapped": mapped, "peak": used["VmHWM"]}


def memory() -> dict[str, int]:
    """Bytes of memory of this process: its own, pages of mapped files, and the peak of both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {key: int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM")}


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
    """Compare steps that prefetch with the same steps on microbatches that exist already."""
    write_corpus(folder / "corpus", num_tokens=50_000_000)
    data = {"source": str(folder / "corpus"), "split": "1,0", "cache": str(folder / "cache")}
    rows = [
        f"{'':<28}{'with data':>19}{'without':>19}{'ratio':>15}{'':>10}",
        f"{'data':<28}{'CPU ms':>10}{'wall':>9}{'CPU ms':>10}{'wall':>9}{'CPU':>8}{'wall':>7}"
        f"{'waited':>10}",
    ]
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "stream": (64, {}),
        "best_fit": (64, {"packing": "best_fit"}),
        "best_fit, document_mask": (64, {"packing": "best_fit", "document_mask": True}),
        'order = "megatron"': (64, {"order": "megatron"}),
        "stream, hidden size 256": (256, {}),
        "best_fit, mask, size 256": (256, {"packing": "best_fit", "document_mask": True}),
    }
    for name, (hidden, settings) in kinds.items():
        trainer = small_trainer(data | settings, steps=steps, hidden=hidden, batch=4)
        batches = trainer._batches(trainer.data.train)
        made = {step: batches(step, 0) for step in range(steps)}
        waited: list[float] = []

        def with_data(step: int, trainer: Trainer = trainer, waited: list[float] = waited) -> None:
            waited.append(trainer.train_step(step).phases["data"])

        def without(
            step: int, trainer: Trainer = trainer, made: dict[int, Microbatch] = made
        ) -> None:
            trainer.step.train(step, lambda step, _: made[step], lr=trainer.learning_rate(step))

        used: dict[str, list[tuple[float, float]]] = {"with_data": [], "without": []}
        for step in range(steps):
            turns = (with_data, without) if step % 2 else (without, with_data)
            for run in turns:
                start = time.process_time(), time.perf_counter()
                run(step)
                used[run.__name__].append(
                    (time.process_time() - start[0], time.perf_counter() - start[1])
                )
        quartiles = {
            run: [first_quartile(kind) for kind in zip(*pairs, strict=True)]
            for run, pairs in used.items()
        }
        (cpu, wall), (cpu_without, wall_without) = quartiles.values()
        wait = first_quartile(waited)
        rows.append(
            f"{name:<28}{cpu:>10.2f}{wall:>9.2f}{cpu_without:>10.2f}{wall_without:>9.2f}"
            f"{cpu / cpu_without:>8.3f}{wall / wall_without:>7.3f}{wait:>10.3f}"
        )
    return [
        *rows,
        "",
        f"milliseconds per step, first quartiles of {steps // BLOCK} times {BLOCK} steps,",
        "4 x 512 tokens, on one thread, with a hidden size of 64 unless another is named;",
        "without: the same steps on microbatches that were made before, in turns, in one process",
        "with one model;",
        "CPU: of all threads, those that read included",
    ]


def first_quartile(seconds: Sequence[float]) -> float:
    """Return milliseconds per step, of blocks of steps: not every step reads data."""
    blocks = [statistics.fmean(seconds[at : at + BLOCK]) for at in range(0, len(seconds), BLOCK)]
    return 1e3 * statistics.quantiles(blocks, n=4)[0]


if __name__ == "__main__":
    main()
