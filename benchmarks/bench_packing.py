"""Time and memory of packing whole documents into samples (`data.packing = "best_fit"`).

    python benchmarks/bench_packing.py [--documents 1e8] [--mean 600] [--seq-length 4096]

Lengths are log-normal. Memory is the most that is resident above the interpreter and its packages,
the starts of the documents included; results go to files, as in a run on token files.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from _common import finish, header, options
from megatrain.data.packing import write_packing

_BLOCK = 1 << 20


def _starts(count: int, mean: float) -> tuple[NDArray[np.int64], int]:
    """Return the first token of each document, and the number of tokens."""
    random = np.random.default_rng(0)
    starts, at = np.empty(count, dtype=np.int64), 0
    for begin in range(0, count, _BLOCK):
        block = starts[begin : begin + _BLOCK]
        lengths = random.lognormal(np.log(mean) - 0.5, 1.0, len(block)).astype(np.int64) + 1
        ends = at + np.cumsum(lengths)
        block[:] = ends - lengths
        at = int(ends[-1])
    return starts, at


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the figures of one packing."""
    parser = options(__doc__)
    parser.add_argument("--documents", type=float, default=1e7)
    parser.add_argument("--mean", type=float, default=600.0, help="tokens per document")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    count, before = int(given.documents), _peak_bytes()
    starts, num_tokens = _starts(count, given.mean)
    held = [starts]
    del starts  # the packing needs them at its start alone
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write_packing(
            Path(folder), held.pop(), num_tokens=num_tokens, seq_length=given.seq_length, seed=1
        )
        seconds = time.process_time() - began
        num_samples = len(np.load(Path(folder, "rows.npy"), mmap_mode="r")) - 1
    filled = num_tokens / num_samples / (given.seq_length + 1)
    text = (
        f"{count:,} documents in {num_samples:,} samples, {filled:.2%} filled\n"
        f"{seconds:.1f} s of processor time, {seconds / count * 1e6:.2f} us per document\n"
        f"{(_peak_bytes() - before) / count:.1f} bytes of memory per document"
    )
    finish([header(), text], given.out)


if __name__ == "__main__":
    main()
