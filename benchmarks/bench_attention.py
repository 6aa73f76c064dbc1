"""Causal attention on CPUs, forward and backward: our kernel beside torch's.

    python benchmarks/bench_attention.py [--tokens 256,1024] [--threads 1,2] [--rounds 7]

Contenders take turns; milliseconds are medians of wall time. Torch's is what a model calls without
our kernel, `scaled_dot_product_attention` in the dtype of its inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from _common import finish, header, keep_memory, options, take_turns
from megacore.ops.attention import attention
from megacore.ops.kernel_choice import leaving

HEADS, HEAD_DIM = 8, 64
TOKENS = (256, 512, 1024, 2048, 4096)
# Largest difference from torch's results in float32, absolute and relative.
TOLERANCE = 1e-4


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by our kernel."""
    return attention(q, k, v, is_causal=True, grouped=True)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by torch's kernel."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


WAYS: dict[str, Callable[..., Tensor]] = {"ours": ours, "torch": torchs}


def inputs(tokens: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys, values and a gradient of the result, (1, heads, tokens, dim)."""
    torch.manual_seed(0)
    heads = (HEADS, key_heads, key_heads, HEADS)
    # The axes in a model's order of memory, in which tokens come before heads.
    drawn = [torch.randn(1, tokens, n, HEAD_DIM, dtype=dtype).transpose(1, 2) for n in heads]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def gradients(way: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    """Run both passes."""
    return torch.autograd.grad(way(q, k, v), (q, k, v), grad)


def milliseconds(run: Callable[[Callable[..., Tensor]], object], rounds: int) -> dict[str, float]:
    """Return the median of each way of attention."""
    turns = {name: lambda way=way: run(way) for name, way in WAYS.items()}
    times = take_turns(turns, rounds=rounds, warmup=2)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def lines(tokens: list[int], rounds: int) -> Iterator[str]:
    """Measure with the number of threads that is set, and yield the lines of a table."""
    yield f"{torch.get_num_threads()} threads, heads of {HEAD_DIM}; torch / ours in parentheses"
    yield "dtype     heads  tokens |   forward: ours  torch         | both passes: ours  torch"
    for dtype in (torch.float32, torch.bfloat16):
        for key_heads in (HEADS, HEADS // 4):
            for count in tokens:
                *qkv, grad = inputs(count, key_heads, dtype)
                if dtype == torch.float32:
                    found, wanted = (gradients(way, *qkv, grad) for way in WAYS.values())
                    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
                with torch.no_grad():
                    one = milliseconds(lambda way, qkv=qkv: way(*qkv), rounds)
                both = milliseconds(
                    lambda way, qkv=qkv, grad=grad: gradients(way, *qkv, grad), rounds
                )
                name = str(dtype).removeprefix("torch.")
                cells = (
                    f"{ms['ours']:15.2f} {ms['torch']:6.2f} ({ms['torch'] / ms['ours']:5.2f})"
                    for ms in (one, both)
                )
                yield f"{name:9} {HEADS}/{key_heads} {count:9,} | {'  | '.join(cells)}"


def main() -> None:
    """Measure in turns and print a table per number of threads."""
    parser = options(__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file for the output")
    args = parser.parse_args()
    keep_memory()
    parts = [header("torch")]
    with leaving((), "cpu"):
        for threads in args.threads.split(","):
            torch.set_num_threads(int(threads))
            parts.append("\n".join(lines([int(n) for n in args.tokens.split(",")], args.rounds)))
    finish(parts, args.out)


if __name__ == "__main__":
    main()
