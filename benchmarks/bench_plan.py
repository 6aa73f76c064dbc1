"""Compare predictions of `megacore plan` with published runs.

    python benchmarks/bench_plan.py --table FILE.csv                   # errors by source, GPU, kind
    python benchmarks/bench_plan.py --table FILE.csv --rows            # and every run
    python benchmarks/bench_plan.py --table FILE.csv --leave-one-out   # sources predicted by others
    python benchmarks/bench_plan.py --table FILE.csv --fit             # fit the constants again
    python benchmarks/bench_plan.py --table FILE.csv --layouts         # compare with the search

A table has one run per line, with the columns that ``read_row`` reads. Errors are of step times and
of the memory of the fullest rank. Pairs are runs of one ``ranking_group`` that differ by more than
3% in tokens per second; the regret is the time lost by choosing the layout predicted to be fastest.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path

import numpy as np

from megatrain.config import MLAConfig, MoEConfig
from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import FOLDER, Device, load_device
from megatrain.plan.footprint import GIB, Footprint, footprints
from megatrain.plan.forecast import forecast
from megatrain.plan.search import search
from megatrain.plan.spec import ModelSpec, RunSpec
from megatrain.plan.step_time import StepTime, stage_layers, step_time

_DEVICES = {"A100-80": "a100", "H100-96-500W": "h100-500w"}


# Fitted constants: the value of the literature, and the spread (in logarithms) of the prior.
FITTED = {
    "a100.gemm_bf16": (0.95, 0.1),
    "h100.gemm_bf16": (0.79, 0.15),
    "b200.gemm_bf16": (0.63, 0.15),
    "gb200.gemm_bf16": (0.63, 0.15),
    "gb300.gemm_bf16": (0.75, 0.15),
    "h100.gemm_fp8": (0.64, 0.15),
    "b200.gemm_fp8": (0.51, 0.2),
    "gb200.gemm_fp8": (0.56, 0.2),
    "gb300.gemm_fp8": (0.7, 0.2),
    "common.gemm_fp8_blk": (0.5, 0.2),
    "common.gemm_half": (372, 0.2),
    "common.gemm_cast_bytes": (5, 0.2),
    "common.grouped_efficiency": (0.95, 0.03),
    "common.grouped_half": (400, 0.4),
    "common.grouped_half_fused": (220, 0.3),
    "a100.attention_forward": (0.62, 0.15),
    "h100.attention_forward": (0.55, 0.15),
    "b200.attention_forward": (0.55, 0.2),
    "gb300.attention_forward": (0.65, 0.2),
    "common.attention_flash2": (0.6, 0.2),
    "common.attention_backward": (0.75, 0.1),
    "common.attention_half": (1000, 0.3),
    "common.attention_unfused": (0.45, 0.25),
    "common.attention_window": (0.33, 0.3),
    "common.memory_bound_efficiency": (0.7, 0.15),
    "common.memory_bound_permute": (0.5, 0.25),
    "common.link_nvlink_efficiency": (0.72, 0.1),
    "common.link_nic_efficiency": (0.9, 0.04),
    "common.link_nvlink_us": (20, 0.5),
    "common.link_nic_us": (8, 0.7),
    "common.link_alltoall_nvlink": (0.7, 0.15),
    "common.link_alltoall_nic": (0.9, 0.1),
    "common.exposed_tp_overlapped": (0.33, 0.3),
    "common.exposed_ep_overlapped": (0.43, 0.3),
    "common.contention_share": (0.04, 0.3),
}
Changes = Mapping[str, Mapping[str, float]]


# Recomputed parts of other software, by the names of RunSpec.
_PARTS = {
    "full": "layer",
    "layernorm": "norm",
    "core_attn": "scores",
    "moe_act": "expert_activation",
    "mla_up_proj": "kv_up",
    "op": "products",
}


@dataclass(frozen=True)
class Run:
    """A published run."""

    row: dict[str, str]
    model: ModelSpec
    spec: RunSpec
    device: str

    def number(self, column: str) -> float | None:
        """Return a measured number, or ``None`` if the source does not give it."""
        return float(self.row[column]) if self.row[column] else None

    @property
    def time(self) -> float | None:
        """Measured step time in seconds, if it is representative."""
        return None if "memory" in self.row["spec"] else self.number("step_time_s")

    def on(self, changes: Changes | None = None) -> Device:
        """Return the device of the run, with changed constants by device and ``common``."""
        values = {
            "link_domain": int(self.row["nvl_domain"]),
            "link_nic": float(self.row["net_GBps_per_gpu"]) * 1e9,
        }
        if changes:
            values |= {**changes["common"], **changes[self.device]}
        return replace(_loaded(self.device), **values)


def _number(row: dict[str, str], name: str) -> int:
    return int(float(row[name] or 0))


def _model_of(row: dict[str, str]) -> ModelSpec:
    """Translate the columns of the model."""
    number = partial(_number, row)
    layers, mtp = number("layers"), number("mtp")
    experts = number("experts")
    mla, moe = MLAConfig(), MoEConfig()
    if number("kv_lora"):
        mla = MLAConfig(
            q_rank=number("q_lora"),
            kv_rank=number("kv_lora"),
            nope_head_dim=number("qk_nope"),
            rope_head_dim=number("qk_rope"),
            v_head_dim=number("v_dim"),
        )
    if experts:
        grouped = row["model"].startswith("deepseek")
        moe = MoEConfig(
            num_experts=experts,
            top_k=number("topk"),
            ffn_hidden_size=number("moe_ffn"),
            shared_ffn_hidden_size=number("shared_ffn"),
            num_groups=8 if grouped else 1,
            groups_top_k=4 if grouped else 1,
        )
    return ModelSpec(
        num_layers=layers,
        hidden_size=number("hidden"),
        ffn_hidden_size=number("ffn"),
        num_heads=number("heads"),
        num_kv_heads=number("kv_heads"),
        head_dim=number("head_dim"),
        padded_vocab_size=number("vocab"),
        seq_length=number("seq"),
        tie_embeddings=row["tied"] == "1",
        gated=row["act"] == "swiglu",
        mla=mla,
        moe=moe,
        moe_layers=tuple(
            experts > 0 and index >= number("dense_layers") for index in range(layers + mtp)
        ),
        num_mtp_layers=mtp,
        windows=(number("swa_window"), 0),
    )


def read_row(row: dict[str, str]) -> Run:
    """Translate a line of the table; what a source does not say is the default of its software."""
    number = partial(_number, row)
    is_torch = row["source"].startswith(("torchtitan", "llm-foundry"))
    is_zero_bubble = row["source"].startswith("Zero Bubble")
    recompute = row["recompute"].replace("none", "")
    for name in ("selective(", "modules(", ")", "..."):
        recompute = recompute.replace(name, "")
    graphs = {"no": "off", "full_iteration": "full", "full": "full"}.get(
        row["cuda_graphs"], "partial"
    )
    # Recipes of 2026 use DeepEP if they name no dispatcher.
    dispatcher = row["dispatcher"].strip("?") or (
        "deepep" if row["epoch"] == "2026" else "alltoall"
    )
    loss = (
        "fused"
        if row["source"].startswith(("SimuMax", "llm-foundry"))  # the default of llm-foundry
        else "eager"
        if is_torch
        else "unfused"
    )
    overlap = frozenset(filter(None, row["overlap"].split(",")))
    spec = RunSpec(
        gpus=number("gpus"),
        tp=number("tp"),
        sequence_parallel=row["sp"] == "1" or (is_torch and number("tp") > 1),
        cp=number("cp"),
        pp=number("pp"),
        chunks=number("vpp"),
        ep=number("ep"),
        etp=number("etp") or 1,
        microbatch=number("mbs"),
        global_batch=number("gbs"),
        schedule="1f1b" if row["schedule"] == "none" else row["schedule"],
        zero=number("zero"),
        precision=row["precision"],
        # The code of Zero Bubble accumulates float16 gradients in float16 unless told otherwise.
        grad_bytes=2 if row["grad_dtype"].startswith("bf16") or is_zero_bubble else 4,
        recompute=frozenset(_PARTS.get(part, part) for part in recompute.split(",") if part),
        offload_layers=number("act_offload_layers"),
        overlap=overlap,
        # In a pipeline, exchanges of experts overlap with the other pass of a pair.
        pairs="whole" if "ep" in overlap and number("pp") > 1 else None,
        dispatcher="deepep" if dispatcher == "flex" else dispatcher,
        imbalance=1.4 if row["routing"] == "natural" else 1.0,
        keeps_permuted=dispatcher not in ("flex", "deepep", "hybridep"),
        graphs=graphs,
        loss=loss,
        attention="unfused"
        if row["epoch"] in ("2021", "2022") or is_zero_bubble
        else "flash2"
        if is_torch
        else "flash",
        fused_experts=row["gpu"] in ("B300", "GB200", "GB300")
        and row["epoch"] in ("26.06", "2026-07"),
    )
    return Run(row, _model_of(row), spec, _DEVICES.get(row["gpu"], row["gpu"].lower()))


def read_table(path: Path) -> list[Run]:
    """Read the runs of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [read_row(row) for row in csv.DictReader(file)]


def predict_time(run: Run, changes: Changes | None = None) -> StepTime:
    """Predict the step time of a run."""
    return step_time(run.model, run.spec, run.on(changes))


def predict_memory(run: Run) -> Footprint:
    """Predict the memory of the fullest rank."""
    device = run.on()
    counts = stage_layers(run.model, run.spec, LayerCosts(run.model, run.spec, device))
    return max(footprints(run.model, run.spec, device, counts), key=lambda each: each.allocated)


@lru_cache
def _loaded(name: str) -> Device:
    return load_device(name)


@dataclass(frozen=True)
class Error:
    """Logarithm of predicted over measured, of one run."""

    run: Run
    value: float

    @property
    def relative(self) -> float:
        """Predicted over measured, minus 1."""
        return math.expm1(self.value)


def time_errors(runs: Sequence[Run], changes: Changes | None = None) -> list[Error]:
    """Predict all step times that are representative."""
    return [
        Error(run, math.log(predict_time(run, changes).seconds / run.time))
        for run in runs
        if run.time
    ]


def memory_errors(runs: Sequence[Run]) -> list[Error]:
    """Predict the memory of all runs that state it, allocated or reserved as the source does."""
    found = []
    for run in runs:
        allocated, reserved = run.number("mem_alloc_GiB"), run.number("mem_reserved_GiB")
        fullest = predict_memory(run)
        # Zero Bubble prints the peak of allocated memory.
        if allocated is None and run.row["source"].startswith("Zero Bubble"):
            allocated = reserved
        if allocated is not None:
            found.append(Error(run, math.log(fullest.allocated / GIB / allocated)))
        elif reserved is not None:
            found.append(Error(run, math.log(fullest.reserved / GIB / reserved)))
    return found


def summary(errors: Sequence[Error], near: float) -> str:
    """Describe the errors in a line."""
    sizes = np.array([abs(error.relative) for error in errors])
    bias = statistics.median(error.relative for error in errors)
    return (
        f"{len(sizes):4d}  median {np.median(sizes):6.1%}  within {near:.0%} "
        f"{(sizes <= near).mean():5.0%}  p90 {np.quantile(sizes, 0.9):6.1%}  bias {bias:+.1%}"
    )


def print_errors(title: str, errors: Sequence[Error], near: float) -> None:
    """Print the errors of all runs, and by kind, GPU and source."""
    print(f"\n{title}\n{'all':42}{summary(errors, near)}")
    for column in ("kind", "gpu", "source"):
        groups: defaultdict[str, list[Error]] = defaultdict(list)
        for error in errors:
            groups[error.run.row[column]].append(error)
        for name, members in groups.items():
            print(f"  {name[:38]:40}{summary(members, near)}")


def print_ranking(errors: Sequence[Error]) -> None:
    """Print how many pairs of a ranking group are ordered right, and the regret of the choice."""
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for error in errors:
        run = error.run
        if run.row["ranking_group"] and run.time:
            tokens = run.spec.global_batch * run.model.seq_length / run.spec.gpus
            measured = run.time / tokens
            groups[run.row["ranking_group"]].append((measured, measured * math.exp(error.value)))
    right = pairs = 0
    regrets = []
    for members in groups.values():
        for (a, predicted_a), (b, predicted_b) in combinations(members, 2):
            if max(a, b) / min(a, b) > 1.03:
                pairs += 1
                right += (a < b) == (predicted_a < predicted_b)
        chosen = min(members, key=lambda each: each[1])[0]
        regrets.append(chosen / min(members)[0] - 1)
    if pairs:
        print(
            f"\nranking: {right} of {pairs} pairs ({right / pairs:.0%}) in {len(groups)} groups; "
            f"mean regret of the choice {statistics.mean(regrets):.1%}, largest {max(regrets):.1%}"
        )


def print_verdicts(runs: Sequence[Run]) -> None:
    """Print the real runs that would be called impossible."""
    for run in runs:
        found = forecast(run.model, run.spec, run.on())
        if run.row["oom"] == "0" and found.verdict == "does not fit":
            print(
                f"  called impossible: {run.row['id']} {run.row['source']}, {run.row['model']}: "
                f"{found.fullest.total / GIB:.0f} of {found.capacity / GIB:.0f} GiB; "
                f"notes: {run.row['notes'] or '-'}"
            )


# ---- published layouts against the search -------------------------------------------------------

_MODELS = ("llama3", "mixtral", "qwen3", "deepseek-v3")


def layout_text(spec: RunSpec) -> str:
    """Describe a layout in a line."""
    experts = f" ep {spec.ep} etp {spec.etp}" if spec.ep * spec.etp > 1 else ""
    recompute = f" recompute {','.join(sorted(spec.recompute))}" if spec.recompute else ""
    overlap = " ep overlapped" if "ep" in spec.overlap else ""
    pipeline = f" {spec.schedule} x {spec.chunks}" if spec.pp > 1 else ""
    return (
        f"tp {spec.tp} cp {spec.cp} pp {spec.pp}{experts} mb {spec.microbatch}"
        f"{pipeline}{recompute}{overlap}"
    )


def print_layouts(runs: Sequence[Run]) -> None:
    """Compare published layouts with the best of the search, for the same devices and batch."""
    ratios = []
    for run in runs:
        published = run.row["model"].startswith(_MODELS) and run.row["source"][:8] != "SimuMax "
        if not published or run.spec.zero != 1 or not run.time:
            continue
        theirs = forecast(run.model, run.spec, run.on())
        best = search(run.model, run.spec, run.on()).best
        row = run.row
        title = f"{row['id']} {row['model']}, {run.spec.gpus} {row['gpu']}, {row['precision']}"
        print(
            f"\n{title}, {run.spec.global_batch} x {run.model.seq_length} tokens ({row['source']})"
        )
        for name, each in (("published", theirs), *(("search", one) for one in best[:1])):
            memory = f"{each.fullest.total / GIB:.0f} GiB"
            fits = "" if each.verdict == "fits" else f", {each.verdict}"
            print(
                f"  {name:9}  {each.step.seconds:8.2f} s  {memory}{fits}  {layout_text(each.spec)}"
            )
        if not best or theirs.verdict == "does not fit":
            continue
        ratios.append(theirs.step.seconds / best[0].step.seconds)
        parts = {kind: 0.0 for each in (theirs, best[0]) for kind in each.step.parts}
        saved = {
            kind: (theirs.step.parts.get(kind, 0) - best[0].step.parts.get(kind, 0))
            / best[0].step.seconds
            for kind in parts
        }
        largest = sorted(saved, key=lambda kind: -abs(saved[kind]))[:3]
        reasons = ", ".join(f"{kind} {saved[kind]:+.0%}" for kind in largest)
        measured = f"(measured {run.time:.2f} s)"
        print(f"  published / search {ratios[-1]:.3f} {measured}: {reasons} of the time")
    values = np.array(ratios)
    print(
        f"\n{len(values)} published layouts that fit: time predicted over that of the search "
        f"{values.min():.3f} to {values.max():.3f}, median {np.median(values):.3f}, "
        f"{(values <= 1.07).sum()} within 7%"
    )


# ---- fit -----------------------------------------------------------------------------------------

_PRIOR = np.log([value for value, _ in FITTED.values()])
_SPREAD = np.array([spread for _, spread in FITTED.values()])
_NOISE = 0.06  # of an error, in logarithms; larger ones count linearly


def as_changes(point: np.ndarray) -> Changes:
    """Return constants by device, for all devices that inherit them."""
    own: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in zip(FITTED, np.exp(point), strict=True):
        device, name = key.split(".")
        own[device][name] = float(value)
    inherited = {"a100-40": "a100", "h100-500w": "h100", "h200": "h100"}
    changes = {**own, **{name: own[base] for name, base in inherited.items()}}
    gb300 = {"attention_forward": own["gb300"]["attention_forward"]}
    changes |= {"b300": own["b200"] | gb300}
    return changes | {name: own["b200"] | own[name] for name in ("gb200", "gb300")}


def fit(runs: Sequence[Run], start: np.ndarray, steps: int) -> np.ndarray:
    """Fit the constants by Gauss-Newton with Huber weights and a prior around the literature."""

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.array([error.value for error in time_errors(runs, as_changes(point))])

    def cost(point: np.ndarray, errors: np.ndarray) -> float:
        sizes = np.abs(errors) / _NOISE
        huber = np.where(sizes < 1, sizes**2 / 2, sizes - 0.5).sum()
        return float(huber + (((point - _PRIOR) / _SPREAD) ** 2).sum() / 2)

    point, errors = start, residuals(start)
    for _ in range(steps):
        slopes = np.empty((len(errors), len(point)))
        for index in range(len(point)):
            moved = point.copy()
            moved[index] += 0.02
            slopes[:, index] = (residuals(moved) - errors) / 0.02
        weights = np.minimum(1, _NOISE / np.maximum(np.abs(errors), 1e-9)) / _NOISE**2
        hessian = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / _SPREAD**2)
        gradient = slopes.T @ (weights * errors) + (point - _PRIOR) / _SPREAD**2
        move = np.linalg.solve(hessian, gradient)
        tried = [
            np.clip(point - share * move, _PRIOR - 2 * _SPREAD, _PRIOR + 2 * _SPREAD)
            for share in (1, 0.5, 0.25)
        ]
        tried.append(point)
        point, errors = min(
            ((each, residuals(each)) for each in tried), key=lambda pair: cost(*pair)
        )
    return point


def leave_one_source_out(runs: Sequence[Run], start: np.ndarray) -> list[Error]:
    """Predict each source with constants fitted without it."""
    found = []
    for source in sorted({run.row["source"] for run in runs}):
        others = [run for run in runs if run.row["source"] != source]
        point = fit(others, start, 3)
        found += time_errors(
            [run for run in runs if run.row["source"] == source], as_changes(point)
        )
    return found


def write_constants(point: np.ndarray) -> None:
    """Write fitted constants to the files of the devices, in place of the old values."""
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text()
        names = []
        for key, value in zip(FITTED, np.exp(point), strict=True):
            device, name = key.split(".")
            section = next(each for each in _SECTIONS if name.startswith(f"{each}_"))
            if device == path.stem:
                names.append(name)
                constant = name.removeprefix(f"{section}_")
                text, count = re.subn(
                    rf"(\[{section}\][^\[]*?\n{constant} = )[^\s#]+", rf"\g<1>{value:.3g}", text
                )
                assert count == 1, (path, name)
        text = re.sub(r"\nfitted = .*", "", text)
        if names:
            listed = ", ".join(f'"{name}"' for name in names)
            text = text.replace("[id]\n", f"[id]\nfitted = [{listed}]\n")
        path.write_text(text)


_SECTIONS = ("gemm", "grouped", "attention", "memory_bound", "link", "exposed", "contention")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, required=True, help="CSV of runs")
    parser.add_argument("--rows", action="store_true", help="print every run")
    parser.add_argument("--fit", action="store_true", help="fit the constants and write them")
    parser.add_argument(
        "--leave-one-out", action="store_true", help="fit without each source and predict it"
    )
    parser.add_argument(
        "--layouts", action="store_true", help="compare published layouts with the search"
    )
    args = parser.parse_args()
    runs = read_table(args.table)
    if args.layouts:
        print_layouts(runs)
        return
    if args.fit:
        write_constants(fit(runs, _PRIOR, 8))
        _loaded.cache_clear()
    errors, memory = time_errors(runs), memory_errors(runs)
    print(f"{len(runs)} runs, {len(FITTED)} fitted constants (their names are in the TOML files)")
    print_errors("step time", errors, 0.15)
    print_ranking(errors)
    if memory:
        print_errors("memory of the fullest rank", memory, 0.1)
    print_verdicts(runs)
    if args.rows:
        for title, each in (("time", errors), ("memory", memory)):
            for error in each:
                row = error.run.row
                print(
                    f"{title} {row['id']} {row['source'][:24]:24} {row['model'][:20]:20} "
                    f"{row['gpu']:12} {row['precision']:7} {error.relative:+.1%}"
                )
    if args.leave_one_out:
        start = np.log([_constant(key) for key in FITTED])
        left_out = leave_one_source_out(runs, start)
        print_errors(
            "step time, each source predicted by constants fitted without it", left_out, 0.15
        )
        print_ranking(left_out)


def _constant(key: str) -> float:
    device, name = key.split(".")
    return float(getattr(_loaded("h100" if device == "common" else device), name))


if __name__ == "__main__":
    main()
