"""Predicted against measured memory and step time of layouts on this machine's CPU.

    megacore calibrate --cpu --out cpu.toml
    python benchmarks/bench_plan_cpu.py --device cpu.toml [--only pp] [--steps 5]

Each layout trains on gloo ranks: steps are timed first, then the bytes of all live tensors are
followed through one more step. Step times are those of a machine without other work only.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import gc
import statistics
import warnings
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.bias
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from _common import finish, header, on_gloo_ranks, options
from megatrain.config import Config, resolve
from megatrain.plan.device import load_device
from megatrain.plan.forecast import Forecast, forecast
from megatrain.plan.spec_from_config import model_spec, run_spec
from megatrain.plan.state import state_bytes
from megatrain.train.trainer import build_trainer

MODEL = {
    "hidden_size": 192,
    "num_layers": 8,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ffn_hidden_size": 512,
    "vocab_size": 1024,
    "seq_length": 256,
}
TRAIN = {"microbatch_size": 2, "global_batch_size": 16, "eval_interval": 0, "steps": 100}
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 192}
BALANCED = {"debug": {"force_balanced": True}}
# Logits of 512 MiB, which are computed in blocks.
LARGE = {
    "model": {"vocab_size": 65536, "seq_length": 1024, "num_layers": 2},
    "train": {"global_batch_size": 8},
}
ECHO = {**MOE, "echo": {"num_spare_slots": 2}}


def _pipeline(schedule: str, pp: int = 2, **more: Any) -> dict[str, Any]:
    return {"parallel": {"pp": pp}, "pipeline": {"schedule": schedule, **more}}


def _recompute(modules: str) -> dict[str, Any]:
    return {"train": {"recompute": [modules]}}


# Ranks, and changes of the sections above.
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "bfloat16": (1, {"train": {"dtype": "bfloat16"}}),
    "recompute full": (1, {"train": {"recompute": ["full"]}}),
    "recompute default": (1, {"train": {"recompute": ["selective"]}}),
    "recompute norm": (1, _recompute("norm")),
    "recompute mlp": (1, _recompute("mlp")),
    "microbatch 4": (1, {"train": {"microbatch_size": 4}}),
    "untied, mtp": (1, {"model": {"tie_embeddings": False, "num_mtp_layers": 1}}),
    "large vocabulary": (1, LARGE),
    "large vocabulary bf16": (1, {**LARGE, "train": {**LARGE["train"], "dtype": "bfloat16"}}),
    "large vocabulary zb_h1": (2, {**LARGE, **_pipeline("zb_h1")}),
    "dp2": (2, {}),
    "dp2 overlap": (2, {"optimizer": {"overlap": "grads"}}),
    "dp2 unsharded": (2, {"optimizer": {"distributed": False}}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2 sequence": (2, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "pp2 1f1b": (2, _pipeline("1f1b")),
    "pp2 gpipe": (2, _pipeline("gpipe")),
    "pp2 interleaved": (2, _pipeline("interleaved_1f1b")),
    "pp2 interleaved 4": (2, _pipeline("interleaved_1f1b", num_chunks=4)),
    "pp2 zb_h1": (2, _pipeline("zb_h1")),
    "pp2 zb_h2": (2, _pipeline("zb_h2")),
    "pp2 zb_v": (2, _pipeline("zb_v")),
    "pp2 dualpipe_v": (2, _pipeline("dualpipe_v")),
    "pp4 1f1b": (4, _pipeline("1f1b", 4)),
    "pp2 dp2": (4, _pipeline("1f1b")),
    "moe": (1, {"moe": MOE, **BALANCED}),
    "moe ep2": (2, {"moe": MOE, "parallel": {"ep": 2}, **BALANCED}),
    "moe ep2 allgather": (
        2,
        {"moe": {**MOE, "dispatcher": "allgather"}, "parallel": {"ep": 2}, **BALANCED},
    ),
    "moe shared": (1, {"moe": {**MOE, "shared_ffn_hidden_size": 128}, **BALANCED}),
    "moe recompute": (1, {"moe": MOE, **_recompute("moe"), **BALANCED}),
    "moe ep2 echo": (2, {"moe": ECHO, "parallel": {"ep": 2}}),
}


def configuration(world_size: int, changes: Mapping[str, Any]) -> Config:
    """Return the resolved configuration of a layout."""
    sections: dict[str, Any] = {
        "model": dict(MODEL), "train": dict(TRAIN), "data": {"source": "python-docs"},
    }  # fmt: skip
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    vocab = sections["model"]["vocab_size"]
    return resolve(Config(**sections), world_size, vocab_size=vocab, cuda=False)


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes of live tensors, those that were there before included."""

    def __init__(self) -> None:
        super().__init__()
        storages = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value in gc.get_objects():
                if type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu":
                    storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        self._before, self._live = storages, dict[int, tuple[StorageWeakRef, int]]()
        self.most = sum(storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                known = self._live.get(key)
                if key not in self._before and (known is None or known[0].expired()):
                    self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        live = sum(size for _, size in self._live.values())
        self.most = max(self.most, sum(self._before.values()) + live)
        return result


def measure(
    _rank: int, world_size: int, changes: Mapping[str, Any], steps: int
) -> tuple[float, int]:
    """Return the median step time and the peak bytes of a rank."""
    trainer = build_trainer(
        configuration(world_size, changes), world_size=world_size, device=torch.device("cpu")
    )
    times = [trainer.train_step(step).step_time_s for step in range(steps + 1)][1:]
    gc.collect()
    with PeakBytes() as peak:
        trainer.train_step(steps + 1)
    return statistics.median(times), peak.most


def predict(world_size: int, changes: Mapping[str, Any], device: str) -> Forecast:
    """Predict memory and time of a layout."""
    config = configuration(world_size, changes)
    spec = run_spec(config, world_size)
    return forecast(
        model_spec(config.model, config.moe),
        spec,
        load_device(device),
        state_bytes(config, world_size),
    )


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__)
    parser.add_argument("--device", required=True, help="file of megacore calibrate")
    parser.add_argument("--only", default="", help="layouts with this text in their name")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each layout")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    lines, memory, times = [], [], []
    columns = ("layout", "MiB", "predicted", "error", "step ms", "predicted", "error")
    lines.append("{:20}{:>10}{:>11}{:>8}{:>10}{:>11}{:>8}".format(*columns))
    for name, (world_size, changes) in LAYOUTS.items():
        if args.only not in name:
            continue
        found = predict(world_size, changes, args.device)
        ranks = on_gloo_ranks(world_size, measure, world_size, changes, args.steps, timeout_s=120)
        pairs = [
            (peak, found.ranks[rank * found.spec.pp // world_size].allocated)
            for rank, (_, peak) in enumerate(ranks)
        ]
        worst = max(pairs, key=lambda pair: abs(pair[1] / pair[0] - 1))
        measured = max(time for time, _ in ranks)
        memory.append(worst[1] / worst[0] - 1)
        times.append((measured, found.step.seconds))
        lines.append(
            f"{name:20}{worst[0] / 2**20:10.1f}{worst[1] / 2**20:11.1f}{memory[-1]:+8.1%}"
            f"{measured * 1e3:10.0f}{found.step.seconds * 1e3:11.0f}"
            f"{found.step.seconds / measured - 1:+8.1%}"
        )
        print(lines[-1], flush=True)
    errors = sorted(abs(predicted / measured - 1) for measured, predicted in times)
    apart = [pair for pair in combinations(times, 2) if abs(pair[0][0] / pair[1][0] - 1) > 0.03]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    worst_memory = max(map(abs, memory))
    lines.append(
        f"\n{len(times)} layouts: memory of the worst rank within {worst_memory:.1%} "
        f"({sum(abs(error) <= 0.05 for error in memory)} within 5%); step time median "
        f"{statistics.median(errors):.1%}, {sum(error <= 0.15 for error in errors)} within 15%; "
        f"{right} of {len(apart)} pairs in the right order"
    )
    finish([header("torch"), "\n".join(lines)], args.out)


if __name__ == "__main__":
    main()
