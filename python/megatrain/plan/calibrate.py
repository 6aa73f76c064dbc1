"""Measurement of this machine's constants for predictions, with torch.

Every measurement runs long enough for clocks to settle, repeats, and takes the median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megacore.ops.activations import swiglu
from megacore.ops.linear import linear
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import all_gather, barrier
from megatrain.config import Config, ResolvedConfig, resolve
from megatrain.models.build import torch_dtype
from megatrain.models.gpt import GPTChunk
from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import Device
from megatrain.plan.spec_from_config import model_spec_of, run_spec

Report = Callable[[str], None]
_SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
_ROUNDS = 5


def seconds_of(run: Callable[[], object], device: torch.device, *, least: float) -> float:
    """Measure the median time of a call, over rounds of at least ``least`` seconds in all."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + least
    while len(times) < _ROUNDS or time.perf_counter() < deadline:
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    device: torch.device, base: Device, *, least: float = 1.0, report: Report = print
) -> dict[str, Any]:
    """Measure the constants of one device, by the names of `Device`.

    Args:
        device: Device to measure.
        base: Constants that are not measured.
        least: Seconds for each measurement.
        report: Called with the name of each measurement before it starts.
    """
    is_cuda = device.type == "cuda"
    values: dict[str, Any] = {"peak_clock": 1.0}
    # Predictions have one half for all formats: that of the format that training uses most.
    formats = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    half = None
    for name, dtype in reversed(formats) if is_cuda else formats:
        report(f"matrix products, {name}")
        peak, half = _products(device, dtype, least, half)
        values |= {f"peak_{name}": peak, f"gemm_{name}": 1.0, "gemm_half": half}
    report("memory")
    source = torch.zeros((256 << 20 if is_cuda else 16 << 20) // 4, device=device)
    target = torch.empty_like(source)
    once = seconds_of(lambda: target.copy_(source), device, least=least)
    values["peak_hbm"] = 2 * source.nbytes / once
    values |= _elementwise(device, values["peak_hbm"], least)
    report("attention")
    rates = {
        name: _attention(device, dtype, values[f"peak_{name}"], least) for name, dtype in formats
    }
    values |= rates["bf16" if is_cuda else "fp32"]  # for the shares that hold for both
    values["attention_fp32"] = rates["fp32"]["attention_forward"]
    values["attention_forward"] = rates["bf16"]["attention_forward"]
    report("operations of a layer")
    values["host_layer_ms"] = 1e3 * _layer_seconds(device, _SMALLEST, least)
    experts = {"num_experts": 4, "top_k": 2}
    values["host_moe_alltoall_ms"] = 1e3 * _layer_seconds(
        device, {**_SMALLEST, "moe": experts}, least
    )
    if is_cuda:
        values["peak_memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    else:
        # Experts run one after the other. The half of grouped products is that of bf16, the half of
        # products that of fp32.
        half = values["gemm_half"] * values["peak_bf16"] / values["peak_fp32"]
        values |= {**_HOST, "grouped_half": half}
        values |= _layer_rates(replace(base, **values), report, least)
    return values


# A CPU has no allocator of its own, runs operations as they come, and hides no exchange.
_HOST: dict[str, float] = {
    "gemm_launch_us": 0,
    "host_waits": 1,
    "host_step_ms": 0,
    "memory_context_gib": 0,
    "memory_comm_gib": 0,
    "memory_fragmentation": 0,
    "memory_workspace": 0,
    "exposed_tp": 1,
    "exposed_tp_overlapped": 1,
    "exposed_ep_overlapped": 1,
    "exposed_dp": 1,
    "exposed_pp": 0,
}


def _products(
    device: torch.device, dtype: torch.dtype, least: float, half: float | None = None
) -> tuple[float, float]:
    """Fit the rate of large products and the side that halves it, unless that is given."""
    sizes = _SIZES[device.type]
    shapes = [(m, n, k) for m in sizes[-2:] for n, k in zip(sizes, reversed(sizes), strict=True)]
    shapes += [(size, size, size) for size in sizes[1:]]
    times = []
    for m, n, k in shapes:
        a, b = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((m, k), (n, k)))
        times.append(seconds_of(lambda a=a, b=b: linear(a, b), device, least=least / 5))  # type: ignore[misc]
    work = np.array([2.0 * m * n * k for m, n, k in shapes])
    sides = np.array(shapes, dtype=float)
    best = (np.inf, 0.0, 0.0)
    for side in np.geomspace(2, 1000, 40) if half is None else (half,):
        rates = work * np.prod(1 + side / sides, axis=1) / np.array(times)
        spread = float(np.abs(np.log(rates) - np.median(np.log(rates))).mean())
        best = min(best, (spread, float(np.median(rates)), float(side)))
    return best[1], best[2]


def _elementwise(device: torch.device, hbm: float, least: float) -> dict[str, float]:
    """Measure an element-wise operation and the optimizer's arithmetic against the copying rate."""
    rows, width = (8192, 8192) if device.type == "cuda" else (1024, 1024)
    x = torch.ones(rows, 2 * width, device=device)
    if device.type == "cuda":
        once = seconds_of(lambda: swiglu(x), device, least=least)
    else:  # into the same memory: on a CPU, fresh memory can take longer than the arithmetic
        left, right = x.chunk(2, dim=1)
        product = torch.empty(rows, width)
        once = seconds_of(lambda: torch.mul(left, right, out=product), device, least=least)
    moved = 3 * rows * width * x.element_size()
    state = [torch.zeros(rows * width, device=device, requires_grad=True)]
    state[0].grad = torch.ones_like(state[0])
    adamw = torch.optim.AdamW(state, fused=True)
    step = seconds_of(adamw.step, device, least=least)
    share = min(1.0, 28.0 * rows * width / step / hbm)
    return {
        "memory_bound_efficiency": min(1.0, moved / once / hbm),
        "memory_bound_permute": min(1.0, moved / once / hbm),
        "memory_bound_optimizer": share,
    }


def _attention(
    device: torch.device, dtype: torch.dtype, peak: float, least: float
) -> dict[str, float]:
    """Measure causal attention forward and backward at two lengths."""
    is_cuda = device.type == "cuda"
    heads, width = (32, 128) if is_cuda else (4, 64)
    rates = {}
    lengths = (1024, 8192) if is_cuda else (128, 1024)
    for length in lengths:
        shape = (1, heads, length, width)
        q, k, v = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in "qkv")

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        grad = torch.ones_like(out)
        once = seconds_of(forward, device, least=least / 2)
        back = seconds_of(
            lambda out=out, grad=grad: out.backward(grad, retain_graph=True),  # type: ignore[misc]
            device,
            least=least / 2,
        )
        flops = 2.0 * heads * length * length * width
        rates[length] = flops / once, 2.5 * flops / back
    (short, _), (long, backward) = (rates[length] for length in lengths)
    # rate(s) = rate * s / (s + half), through both lengths
    a, b = lengths
    half = max(0.0, min(4.0 * a, a * b * (long - short) / max(short * b - long * a, 1e-9)))
    return {
        "attention_half": half,
        "attention_forward": long * (b + half) / b / peak,
        "attention_backward": min(2.0, backward / long),
        "attention_flash2": 1.0,
    }


# Too small to compute anything.
_SMALLEST: dict[str, Any] = {
    "model": {"hidden_size": 32, "num_heads": 2, "seq_length": 4, "vocab_size": 64},
    "train": {"microbatch_size": 1},
}


def _config(sections: dict[str, Any], layers: int = 1) -> ResolvedConfig:
    model = {**sections["model"], "num_layers": layers}
    config = Config(**{**sections, "model": model, "debug": {"force_balanced": True}})
    return resolve(config, 1, vocab_size=model["vocab_size"], cuda=False)


def _passes_seconds(device: torch.device, config: ResolvedConfig, least: float) -> float:
    """Measure forward and backward of a model."""
    chunk = GPTChunk(
        config.model,
        layers=range(config.model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=config.moe,
        force_balanced=config.debug.force_balanced,
        dtype=torch_dtype(config.train.dtype),
        device=device,
    )
    rows, length = config.train.microbatch_size, config.model.seq_length
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    batch = Microbatch(tokens=tokens, labels=tokens, sample_ids=torch.arange(rows), step=0)
    return seconds_of(lambda: chunk(None, batch).backward(), device, least=least)


def _layer_seconds(device: torch.device, sections: dict[str, Any], least: float) -> float:
    """Measure forward and backward of a layer: those of five less those of one, over four."""
    one, five = (_passes_seconds(device, _config(sections, n), least) for n in (1, 5))
    return max(0.0, (five - one) / 4)


def _small(hidden: int, dtype: str, vocab: int = 64) -> dict[str, Any]:
    """Return sections of a model whose layers take milliseconds on a CPU."""
    return {
        "model": {
            "hidden_size": hidden,
            "num_heads": hidden // 32,
            "ffn_hidden_size": 3 * hidden,
            "seq_length": 256,
            "vocab_size": vocab,
        },
        "train": {"microbatch_size": 2, "dtype": dtype},
    }


_EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 192}
_Case = tuple[Callable[[LayerCosts], float], ResolvedConfig, float]


def _layer_rates(known: Device, report: Report, least: float) -> dict[str, float]:
    """Find the constants with which layers, losses and experts take the measured time.

    Args:
        known: All other constants.
        report: Called with the name of each measurement before it starts.
        least: Seconds of a measurement.
    """
    device = torch.device("cpu")

    def fit(key: str, cases: list[_Case]) -> None:
        nonlocal known
        known = replace(known, **{key: _fitted_rate(known, key, cases)})  # type: ignore[arg-type]

    def layers(dtype: str, **more: Any) -> list[_Case]:
        sections = [{**_small(hidden, dtype), **more} for hidden in (128, 256)]
        part = _moe_layer if more else _dense_layer
        return [(part, _config(each), _layer_seconds(device, each, least)) for each in sections]

    def losses(vocab: int) -> list[_Case]:
        cases: list[_Case] = []
        for dtype in ("float32", "bfloat16"):
            without, config = (_config(_small(64, dtype, size)) for size in (64, vocab))
            seconds = _passes_seconds(device, config, least)
            cases.append((_head, config, seconds - _passes_seconds(device, without, least)))
        return cases

    report("layers, float32")
    fit("memory_bound_layer_fp32", layers("float32"))
    report("layers, bfloat16")
    fit("memory_bound_layer", layers("bfloat16"))
    report("layers with experts")
    fit("grouped_efficiency", layers("float32", moe=_EXPERTS))
    report("loss")
    fit("memory_bound_loss", losses(1 << 14))
    report("loss, blocks of a large vocabulary")
    fit("memory_bound_loss_blocks", losses(9 << 14))
    keys = ("layer_fp32", "layer", "loss", "loss_blocks")
    rates = {f"memory_bound_{key}": getattr(known, f"memory_bound_{key}") for key in keys}
    return {**rates, "grouped_efficiency": known.grouped_efficiency}


def _dense_layer(costs: LayerCosts) -> float:
    return costs.by_kind[False].total


def _moe_layer(costs: LayerCosts) -> float:
    return costs.by_kind[True].total


def _head(costs: LayerCosts) -> float:
    return costs.head.total


def _fitted_rate(known: Device, key: str, cases: list[_Case]) -> float:
    """Fit a rate to measured seconds, so that the geometric mean of predicted over measured is 1.

    Differences of measurements can be 0 or less on a busy machine; they count as a nanosecond.
    """

    def error(rate: float) -> float:
        device = replace(known, **{key: rate})  # type: ignore[arg-type]
        return sum(
            math.log(part(LayerCosts(model_spec_of(config), run_spec(config, 1), device)))
            - math.log(max(seconds, 1e-9))
            for part, config, seconds in cases
        )

    low, high = 0.01, 4.0  # above 1: faster than what the rate is a share of
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def measure_contention(*, least: float) -> dict[str, float]:
    """Measure how much longer passes take when all ranks compute at the same time. Collective."""
    import torch.distributed as dist

    config = _config(_small(256, "float32"), layers=8)
    ratios = []
    for _ in range(_ROUNDS):  # in turns, since the clock of a shared machine drifts
        times = []
        for busy in (*((rank,) for rank in range(dist.get_world_size())), None):
            dist.barrier()
            if busy is None or dist.get_rank() in busy:
                times.append(_passes_seconds(torch.device("cpu"), config, least / 4))
        ratios.append(times[1] / times[0])
    return {"contention_share": max(0.0, statistics.median(ratios) - 1)}


def measure_links(rank_device: torch.device, world_size: int, *, least: float) -> dict[str, float]:
    """Measure all-gathers of two sizes between ranks of this machine. Collective."""
    group = ProcessGroups.create(Topology(world_size=world_size)).world
    times = {}
    sizes = (1 << 12, 1 << 24 if rank_device.type == "cuda" else 1 << 20)
    for numel in sizes:
        part = torch.zeros(numel, device=rank_device)
        whole = torch.zeros(numel * world_size, device=rank_device)
        gather = partial(all_gather, whole, part, group)
        times[numel] = _exchange_seconds(gather, rank_device, group, least)
    small, large = sizes
    moved = 4.0 * (world_size - 1) * (large - small)
    bandwidth = moved / max(times[large] - times[small], 1e-9)
    latency = max(0.0, times[small] - 4.0 * (world_size - 1) * small / bandwidth)
    return {
        "link_nvlink": bandwidth,
        "link_nvlink_efficiency": 1.0,
        "link_alltoall_nvlink": 1.0,
        "link_nvlink_us": latency * 1e6,
    }


def _exchange_seconds(
    run: Callable[[], None], device: torch.device, group: Group, least: float
) -> float:
    """Measure the median time of an exchange over a number of rounds that is the same on all ranks.

    Collective. All ranks begin a round together.
    """
    rounds = []
    for _ in range(max(_ROUNDS, int(20 * least))):
        barrier(group)
        start = time.perf_counter()
        run()
        _wait(device)
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds)


def write_calibration(path: Path, base: Device, changes: dict[str, Any], *, stack: str) -> None:
    """Write a calibration with all constants, those in ``changes`` replaced."""
    values = {**asdict(base), **changes, "origin": "measured", "stack": stack, "sources": []}
    names = ("name", "origin", "stack", "sources")
    document: dict[str, dict[str, Any]] = {"id": {name: values.pop(name) for name in names}}
    sections = sorted(_SECTIONS, key=len, reverse=True)
    for key, value in values.items():
        section = next(each for each in sections if key.startswith(f"{each}_"))
        document.setdefault(section, {})[key.removeprefix(f"{section}_")] = (
            float(f"{value:.4g}") if isinstance(value, float) else value
        )
    path.write_text(tomli_w.dumps(document), encoding="utf-8")


_SECTIONS = (
    "peak", "gemm", "grouped", "attention", "memory_bound", "host", "link", "exposed",
    "contention", "memory", "interval",
)  # fmt: skip
