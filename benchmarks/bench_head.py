"""Memory and processor time of the output layer and its loss: whole logits against blocks.

    python benchmarks/bench_head.py [--vocab 131072] [--tokens 4096] [--hidden 512] [--rounds 2]

Each contender is a process of its own, started in turns, on one thread. Times are those of the
processor, the best round; `beside` is the growth of the peak of resident memory over inputs and
parameters, gradients included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.nn.functional import linear

from _common import finish, header, options
from megacore.parallel.process_groups import Group
from megatrain.models.head_loss import head_token_losses
from megatrain.models.loss import cross_entropy, mean_of_labels
from megatrain.models.shape import block_columns


def status(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return 1024 * int(line.split()[1])


def child(how: str, dtype: torch.dtype, vocab: int, tokens: int, hidden: int) -> None:
    """Measure one forward and backward pass after a small one, which loads the libraries."""
    torch.set_num_threads(1)

    def loss_of(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if how == "whole":
            logits = linear(x, weight)
            return cross_entropy(logits, labels, first_column=0, group=Group.solo())
        losses = head_token_losses(
            x, weight, labels, num_columns=weight.shape[0],
            columns=block_columns(tokens, vocab) or vocab, first_column=0, softcap=None,
            group=Group.solo(),
        )  # fmt: skip
        return mean_of_labels(losses, labels)

    def draw(vocab: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        x = torch.empty(tokens, 1, hidden, dtype=dtype).normal_().requires_grad_()
        weight = torch.empty(vocab, hidden, dtype=dtype).normal_(std=0.02).requires_grad_()
        return x, weight, torch.randint(0, vocab, (tokens, 1))

    loss_of(*draw(128, 16)).backward()
    inputs = draw(vocab, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts here
    before, times = status("VmRSS"), [time.process_time()]
    loss = loss_of(*inputs)
    times.append(time.process_time())
    loss.backward()
    times.append(time.process_time())
    forward, backward = times[1] - times[0], times[2] - times[1]
    print(json.dumps([forward, backward, status("VmHWM") - before, loss.item()]))


def main() -> None:
    """Measure in turns and print the table."""
    parser = options(__doc__)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the output")
    parser.add_argument("--child", nargs=2, help="internal: way and dtype")
    args = parser.parse_args()
    if args.child:
        how, dtype = args.child
        child(how, getattr(torch, dtype), args.vocab, args.tokens, args.hidden)
        return
    found: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(args.rounds):
        for dtype in ("float32", "bfloat16"):
            for how in ("whole", "blocks"):
                command = [sys.executable, *sys.argv, "--child", how, dtype]
                ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.setdefault((dtype, how), []).append(json.loads(ended.stdout))
    lines = [
        f"vocabulary {args.vocab:,}, {args.tokens:,} tokens, hidden {args.hidden}; "
        f"best of {args.rounds}",
        "dtype     logits | forward s  backward s  together | beside, GB | loss",
    ]
    for (dtype, how), rounds in found.items():
        forward, backward, _, _ = min(rounds, key=lambda row: row[0] + row[1])
        peak, loss = min(row[2] for row in rounds), rounds[0][3]
        lines.append(
            f"{dtype:9} {how:6} | {forward:9.2f} {backward:11.2f} {forward + backward:9.2f} | "
            f"{peak / 1e9:10.2f} | {loss:.8f}"
        )
    finish([header("torch"), "\n".join(lines)], args.out)


if __name__ == "__main__":
    main()
