"""Adapters: memory against the prediction, and the time of a step against PEFT with transformers.

    python benchmarks/bench_lora.py [--parts memory time] [--rounds 5] [--out FILE]

``memory``: bytes of tensors at the peak of a dry run of one process and a model of 400 million
weights, and the bytes that ``megacore plan`` predicts. ``time``: a step of the same model of 30
million weights and the same tokens with adapters of all projections, by megacore and by PEFT on
transformers with torch's AdamW; processor time in turns, best of the rounds, one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _common import finish, header, options
from megatrain.config import Config, resolve
from megatrain.dry_run import dry_run
from megatrain.train.trainer import build_trainer

LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "num_kv_heads": 8,
    "ffn_hidden_size": 4096,
    "seq_length": 1024,
    "vocab_size": 32000,
}
SMALL = {**LARGE, "hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8}
SMALL |= {"ffn_hidden_size": 1408, "seq_length": 256, "vocab_size": 8192, "tie_embeddings": False}
RANK = 16
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all projections": {"lora": {"rank": RANK}},
    "all projections, recomputed": {"lora": {"rank": RANK}, "train": {"recompute": ["full"]}},
    "q and v": {"lora": {"rank": RANK, "targets": ["q", "v"]}},
    "q and v, head whole": {
        "lora": {"rank": RANK, "targets": ["q", "v"], "modules_to_save": ["head"]},
        "model": {"tie_embeddings": False},
    },
}


def make_config(model: dict[str, Any], dtype: str, changes: dict[str, Any], batch: int = 1) -> Any:
    """Make the settings of a run of one process."""
    train = {"microbatch_size": batch, "global_batch_size": batch, "dtype": dtype}
    train |= {"eval_interval": 0, "steps": 100}
    return resolve(
        Config(
            model={**model, **changes.get("model", {})},
            train={**train, **changes.get("train", {})},
            lora=changes.get("lora", {}),
            data={"tokenizer": "bytes"},
        ),
        1,
        cuda=False,
    )


def memory_table() -> str:
    """Return predicted and counted bytes of each case."""
    lines = [f"{'trained (bfloat16, 400 M)':28} {'plan MB':>9} {'peak MB':>9} {'plan/peak':>9}"]
    for name, changes in CASES.items():
        found = dry_run(make_config(LARGE, "bfloat16", changes), world_size=1, rank=0)
        assert found.costs is not None, found.error
        plan, peak = sum(found.predicted.values()), found.costs.most_bytes
        lines.append(f"{name:28} {plan / 1e6:9.0f} {peak / 1e6:9.0f} {plan / peak:9.3f}")
    return "\n".join(lines)


def their_step(folder: Path, tokens: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return a step of PEFT on a model of transformers."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    del folder
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=SMALL["hidden_size"],
            num_hidden_layers=SMALL["num_layers"],
            num_attention_heads=SMALL["num_heads"],
            num_key_value_heads=SMALL["num_kv_heads"],
            intermediate_size=SMALL["ffn_hidden_size"],
            vocab_size=SMALL["vocab_size"],
        )
    ).train()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    )
    parameters = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        logits = adapted(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def time_table(rounds: int) -> str:
    """Return the processor time of a step of both."""
    torch.set_num_threads(1)
    config = make_config(SMALL, "float32", CASES["all projections"], batch=4)
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    batch = trainer._batches(trainer.data.train)(0, 0)
    assert batch.labels is not None
    number = iter(range(1 << 30))
    steps: dict[str, Callable[[], object]] = {
        "megacore": lambda: trainer.train_step(next(number) % 50),
    }
    with tempfile.TemporaryDirectory() as folder:
        steps["PEFT"] = their_step(Path(folder), batch.tokens, batch.labels)
        best = dict.fromkeys(steps, float("inf"))
        for step in steps.values():
            step()
        for _ in range(rounds):
            for name, step in steps.items():
                started = time.process_time()
                step()
                best[name] = min(best[name], time.process_time() - started)
    lines = [f"{'step of 1,024 tokens (float32)':32} {'CPU s':>7} {'of PEFT':>8}"]
    lines += [f"{name:32} {best[name]:7.2f} {best[name] / best['PEFT']:8.2f}" for name in steps]
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument("--parts", nargs="+", default=["memory", "time"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = [header("torch", *(["transformers", "peft"] if "time" in args.parts else []))]
    if "memory" in args.parts:
        parts.append(memory_table())
    if "time" in args.parts:
        parts.append(time_table(args.rounds))
    finish(parts, args.out)


if __name__ == "__main__":
    main()
