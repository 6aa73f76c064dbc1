"""``megacore plan CONFIG --gpus N``: will it fit, how fast, which layout; without torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megacore.errors import ConfigError
from megatrain.cli.outputs import plain_table, require_folder, write_output, write_pictures
from megatrain.cli.plan_source import load_planned
from megatrain.config import Config, ResolvedConfig, config_to_toml, resolve

if TYPE_CHECKING:
    from megatrain.plan.device import Device
    from megatrain.plan.forecast import Forecast
    from megatrain.plan.search import SearchResult

DOES_NOT_FIT = 3
_BAR = 24
# Order and letter of each kind in the bars.
_MEMORY = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "logits": "L",
    "transient": "t",
    "tp buffers": "b",
    "slots of clones": "s",
    "8-bit weights": "8",
    "optimizer step": "o",
    "workspace": "w",
    "fragmentation": "f",
    "context": "c",
    "communicators": "n",
}
_TIMES = {
    "gemm": "G",
    "attention": "A",
    "experts": "E",
    "head": "H",
    "elementwise": "e",
    "cast": "q",
    "recompute": "R",
    "tp": "T",
    "cp": "C",
    "ep": "X",
    "clones": "K",
    "pp": "P",
    "dp": "D",
    "optimizer": "O",
    "host": "h",
    "host_step": "S",
    "contention": "c",
    "bubble": ".",
}


# Options that must be positive numbers.
_NUMBERS: dict[str, type[float]] = {
    "nodes_of": int,
    "imbalance": float,
    "tokens": float,
    "hours": float,
    "price": float,
    "top": int,
}


def _parse_numbers(args: argparse.Namespace) -> None:
    """Replace the text of each numeric option by its number; ``None`` if it was not given."""
    for name, kind in _NUMBERS.items():
        text = getattr(args, name)
        if text is None:
            continue
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e18:
            noun = "a positive number" if kind is float else "a positive whole number"
            raise ConfigError(f'--{name.replace("_", "-")} must be {noun}, got "{text}"')
        setattr(args, name, value)


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    from megatrain.plan.device import load_device

    counts = [_count(text) for text in args.gpus.split(",")]
    if not args.search and (args.write or args.top):
        raise ConfigError("--write and --top belong to a search; add --search")
    _parse_numbers(args)
    changes = {"link_domain": args.nodes_of} if args.nodes_of else None
    device = load_device(args.device or "h100", changes)
    imbalance = args.imbalance or 1.0
    if imbalance < 1:
        raise ConfigError(f"--imbalance must be at least 1 (max load / mean load), got {imbalance}")
    base = load_planned(args)
    if args.search:
        return _search(args, base, counts, device, imbalance)
    forecasts = [_forecast(base, gpus, device, imbalance) for gpus in counts]
    if len(forecasts) > 1:
        _print_scaling(args, forecasts)
    elif args.json:
        print(json.dumps(as_json(forecasts[0]), indent=2))
    else:
        _print(args, forecasts[0])
    write_pictures(args, forecasts[0].step.schedule, forecasts[0].step.costs)
    return DOES_NOT_FIT if any(each.verdict == "does not fit" for each in forecasts) else 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 24:
        raise ConfigError(f'--gpus must be whole numbers from 1, joined by commas, got "{text}"')
    return int(text)


def resolve_for_plan(config: Config, gpus: int) -> ResolvedConfig:
    """Resolve a configuration for a prediction, without torch.

    Raises:
        ConfigError: For an invalid setting, or a vocabulary of unknown size.
    """
    if config.model.factory is not None:
        raise ConfigError(
            "a prediction (--gpus) counts the operations of megacore's GPT, not of model.factory = "
            f'"{config.model.factory}"; megacore plan without --gpus shows parameters and buffers'
        )
    vocab = config.model.vocab_size
    if vocab is None and config.data.tokenizer == "bytes":
        vocab = 256
    elif vocab is None:  # imports torch with the rest of the data package
        from megatrain.data import load_tokenizer

        vocab = load_tokenizer(config.data.tokenizer).vocab_size
    return resolve(config, gpus, vocab_size=vocab, cuda=True, launcher="--gpus")


def _forecast(base: Config, gpus: int, device: Device, imbalance: float) -> Forecast:
    from megatrain.plan.forecast import forecast
    from megatrain.plan.spec_from_config import model_spec_of, run_spec
    from megatrain.plan.state import state_bytes

    config = resolve_for_plan(base, gpus)
    try:
        spec = run_spec(config, gpus, imbalance=imbalance)
        return forecast(model_spec_of(config), spec, device, state_bytes(config, gpus))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def as_json(found: Forecast) -> dict[str, Any]:
    """Return a prediction as plain values, in bytes and seconds."""
    low, high = _interval(found)
    return {
        "device": found.device.name,
        "calibration": {"origin": found.device.origin, "stack": found.device.stack},
        "gpus": found.spec.gpus,
        "verdict": found.verdict,
        "margin_bytes": found.margin,
        "capacity_bytes": found.capacity,
        "ranks": [
            {
                "pp_rank": rank.pp_rank,
                "layers": list(rank.layers),
                "bytes": {**rank.parts, **rank.outside},
                "allocated_bytes": rank.allocated,
                "total_bytes": rank.total,
            }
            for rank in found.ranks
        ],
        "step_s": found.step.seconds,
        "step_s_interval": [low, high],
        "step_parts_s": found.step.parts,
        "tokens_per_s_per_gpu": found.tokens_per_gpu,
        "tflops_per_gpu": found.flops_per_gpu / 1e12,
        "mfu": found.mfu,
        "flop_convention": _CONVENTION,
        "assumed": _assumed(found),
    }


_CONVENTION = "causal attention, recomputation not counted, dense peak of the format"


def _interval(found: Forecast) -> tuple[float, float]:
    """Return the step times between which four of five runs are expected."""
    share = found.device.interval_time
    return found.step.seconds / (1 + share), found.step.seconds * (1 + share)


def _assumed(found: Forecast) -> str:
    spec = found.spec
    parts = [
        f"{spec.attention} attention",
        f"{spec.loss} loss",
        f"{spec.grad_bytes * 8}-bit gradients",
    ]
    parts.append(f"overlap of {', '.join(sorted(spec.overlap)) or 'nothing'}")
    if any(found.model.moe_layers):
        parts.append(f"imbalance {spec.imbalance:g}")
    if spec.clones:
        load = spec.load(found.model.moe.num_experts)
        parts.append(f"all {spec.slots} slots of clones filled, imbalance with them {load:.3g}")
    return "; ".join(parts)


def bar(parts: dict[str, float], letters: dict[str, str], total: float, width: int) -> str:
    """Draw shares of a total as letters.

    Example:
        >>> bar({"a": 1.0, "b": 3.0}, {"a": "A", "b": "B"}, 4.0, 8)
        'AABBBBBB'
    """
    drawn, done = "", 0.0
    for kind, letter in letters.items():
        done += parts.get(kind, 0.0)
        drawn += letter * (round(width * done / total) - len(drawn))
    return drawn


def _print(args: argparse.Namespace, found: Forecast) -> None:
    from megatrain.plan.footprint import GIB, memory_text, memory_unit
    from megatrain.plan.forecast import advise

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 150)
    # By the tensors: what a device needs besides would make those of a small model 0.0 GiB.
    unit, unit_bytes = memory_unit(found.fullest.allocated)
    console.print(_memory_table(found, unit_bytes))
    legend = ", ".join(f"{letter} {kind}" for kind, letter in _MEMORY.items())
    console.print(f"{unit} of each rank at a pipeline position; {legend}")
    sign = "left" if found.margin >= 0 else "missing"
    console.print(
        f"\n[bold]{found.verdict}[/]: {found.fullest.total / GIB:.1f} of "
        f"{found.capacity / GIB:.1f} GiB of {found.device.name} on pipeline rank "
        f"{found.fullest.pp_rank}, {memory_text(abs(found.margin))} {sign} "
        f"(+-{found.device.interval_memory:.0%} of the tensors)"
    )
    low, high = _interval(found)
    console.print(
        f"step {_seconds(found.step.seconds)} ({_seconds(low)} to {_seconds(high)}), "
        f"{found.tokens_per_gpu:,.0f} tokens/s per GPU, {_tflops(found.flops_per_gpu)} TFLOP/s "
        f"per GPU, MFU {found.mfu:.1%} ({_CONVENTION})"
    )
    parts = found.step.parts
    console.print(f"time  {bar(parts, _TIMES, found.step.seconds, 60)}")
    shares = sorted(parts.items(), key=lambda item: -item[1])
    console.print(
        "      "
        + ", ".join(
            f"{_TIMES[kind]} {kind} {value / found.step.seconds:.0%}"
            for kind, value in shares
            if value >= 0.005 * found.step.seconds
        )
    )
    _print_budget(args, found, console)
    console.print(f"assumed: {_assumed(found)}; calibration: {found.device.origin}")
    for advice in advise(found):
        console.print(f"tried   {advice.text}")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _tflops(flops: float) -> str:
    return f"{flops / 1e12:,.0f}" if flops >= 10e12 else f"{flops / 1e12:.2g}"


def _memory_table(found: Forecast, unit_bytes: int) -> Table:
    from megatrain.plan.footprint import GIB

    shown = ("weights", "gradients", "optimizer", "activations")
    table = plain_table(("pp", "layers"), (*shown, "other", "total"))
    table.add_column(f"of {found.capacity / GIB:.0f} GiB", no_wrap=True)
    rows = list(found.ranks)
    skipped = len(rows) - 16
    for rank in rows if skipped <= 0 else rows[:12] + rows[-3:]:
        parts = {**rank.parts, **rank.outside}
        width = max(1, round(_BAR * rank.total / found.capacity))
        drawn = bar(parts, _MEMORY, rank.total, width)
        over = f"{drawn[:_BAR]}|{drawn[_BAR:]}" if width > _BAR else drawn.ljust(_BAR) + "|"
        table.add_row(
            str(rank.pp_rank),
            " ".join(map(str, rank.layers)),
            *(f"{rank.parts[kind] / unit_bytes:,.1f}" for kind in shown),
            f"{max(0.0, rank.total - sum(rank.parts[kind] for kind in shown)) / unit_bytes:,.1f}",
            f"{rank.total / unit_bytes:,.1f}",
            over,
        )
    if skipped > 0:
        table.caption = f"without {skipped + 1} positions in the middle; --json has all"
    return table


def _print_budget(args: argparse.Namespace, found: Forecast, console: Any) -> None:
    tokens, hours, price = args.tokens, args.hours, args.price
    if hours:
        tokens = hours * 3600 * found.tokens_per_gpu * found.spec.gpus
    elif tokens:
        hours = tokens / (found.tokens_per_gpu * found.spec.gpus) / 3600
    elif price:
        raise ConfigError(
            "--price needs the tokens or the hours to pay for; add --tokens or --hours"
        )
    else:
        return
    cost = f", cost {hours * found.spec.gpus * price:,.0f}" if price else ""
    console.print(
        f"budget {tokens:.3g} tokens in {hours:,.1f} h of {found.spec.gpus} GPUs "
        f"({hours * found.spec.gpus:,.0f} GPU hours{cost})"
    )


def _print_scaling(args: argparse.Namespace, found: list[Forecast]) -> None:
    if args.json:
        print(json.dumps([as_json(each) for each in found], indent=2))
        return
    from megatrain.plan.footprint import GIB

    table = plain_table(
        (), ("gpus", "dp", "GiB", "verdict", "step", "tokens/s/GPU", "tokens/s", "efficiency")
    )
    first = found[0].tokens_per_gpu
    for each in found:
        table.add_row(
            str(each.spec.gpus),
            str(each.spec.dp),
            f"{each.fullest.total / GIB:.1f}",
            each.verdict,
            _seconds(each.step.seconds),
            f"{each.tokens_per_gpu:,.0f}",
            f"{each.tokens_per_gpu * each.spec.gpus:,.0f}",
            f"{each.tokens_per_gpu / first:.0%}",
        )
    console = Console(highlight=False)
    console.print(table)
    for each in found:
        _print_budget(args, each, console)


# ---- search --------------------------------------------------------------------------------------


def _search(
    args: argparse.Namespace, base: Config, counts: list[int], device: Device, imbalance: float
) -> int:
    """Search for the best layouts on each number of devices, and print or write them."""
    from megatrain.plan.search import search
    from megatrain.plan.spec_from_config import (
        model_spec_of,
        run_spec,
        with_settings,
        without_layout,
    )

    if args.write and len(counts) > 1:
        raise ConfigError("--write writes one configuration; give one number of --gpus")
    require_folder(args.write)
    missing = False
    for gpus in counts:
        # The layout of the file need not fit, since it is replaced.
        config = resolve_for_plan(without_layout(base, gpus), gpus)
        spec = run_spec(config, gpus, imbalance=imbalance)
        spec = replace(spec, stages=(), echo=base.moe.echo)
        found = search(model_spec_of(config), spec, device)
        legal = _legal(base, found.best, gpus, args.top or 10)
        missing = missing or not legal
        if args.json:
            print(json.dumps([{"settings": settings, **as_json(each)} for settings, each in legal]))
            continue
        _print_search(found, legal, device)
        if not legal:
            continue
        _print_budget(args, legal[0][1], Console(highlight=False, soft_wrap=True))
        if args.write:
            text = config_to_toml(with_settings(base, legal[0][0], gpus))
            write_output(args.write, partial(_write_text, text))
        write_pictures(args, legal[0][1].step.schedule, legal[0][1].step.costs)
    return DOES_NOT_FIT if missing else 0


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _legal(
    base: Config, found: Sequence[Forecast], gpus: int, count: int
) -> list[tuple[dict[str, dict[str, Any]], Forecast]]:
    """Return the best layouts that training accepts, predicted again with exact state bytes."""
    from megatrain.plan.spec_from_config import settings_of, with_settings

    legal: list[tuple[dict[str, dict[str, Any]], Forecast]] = []
    for each in found:
        settings = settings_of(each.spec, each.layers, each.model.num_mtp_layers)
        try:
            again = _forecast(
                with_settings(base, settings, gpus), gpus, each.device, each.spec.imbalance
            )
        except (ConfigError, ValueError):
            continue
        if again.verdict == "fits":
            legal.append((settings, again))
        if len(legal) == count:
            break
    return sorted(legal, key=lambda pair: pair[1].step.seconds)


def _print_search(
    found: SearchResult, legal: list[tuple[dict[str, dict[str, Any]], Forecast]], device: Device
) -> None:
    from megatrain.plan.footprint import GIB
    from megatrain.plan.search import fastest_by_memory

    console = Console(highlight=False)
    console.width = max(console.width, 150)
    console.print(
        f"{found.tried:,} layouts, {found.fitting:,} fit {device.name}, "
        f"{found.simulated} simulated exactly",
        soft_wrap=True,
    )
    if not legal:
        console.print("none fits; use more devices, or a larger kind", soft_wrap=True)
        return
    front = {id(each) for each in fastest_by_memory([each for _, each in legal])}
    table = plain_table(
        ("", "tp", "cp", "pp", "chunks", "schedule", "ep", "etp", "mb", "recompute", "overlap",
         "GiB", "step", "tokens/s/GPU", "limited by")
    )  # fmt: skip
    for _, each in legal:
        spec = each.spec
        table.add_row(
            "*" if id(each) in front else "",
            *map(str, (spec.tp, spec.cp, spec.pp, spec.chunks, spec.schedule, spec.ep, spec.etp)),
            str(spec.microbatch),
            ",".join(sorted(spec.recompute)) or "-",
            ",".join(sorted(spec.overlap)),
            f"{each.fullest.total / GIB:.1f}",
            _seconds(each.step.seconds),
            f"{each.tokens_per_gpu:,.0f}",
            _limit(each),
        )
    console.print(table)
    console.print("* no other layout of the table is both faster and smaller")


def _limit(found: Forecast) -> str:
    """Name what costs most besides the products that any layout must compute."""
    needed = ("gemm", "attention", "experts", "head")
    others = {kind: time for kind, time in found.step.parts.items() if kind not in needed}
    kind = max(others, key=others.__getitem__)
    return f"{kind} {others[kind] / found.step.seconds:.0%}"
