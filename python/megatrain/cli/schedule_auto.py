"""Options of ``megacore schedule auto``, costs per stage, and output of certificates."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from megacore.errors import ConfigError
from megatrain.cli.values import LARGEST_INT64

if TYPE_CHECKING:
    from megacore.pipeline import Certificate, Costs

_COST_FIELDS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "send": "send"}


def add_auto_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``auto`` and ``--costs``."""
    parser.add_argument(
        "--costs",
        nargs="+",
        metavar="KEY=T",
        help="times F=, I=, W= (one number, or one per stage with commas between) and send=; "
        "those named here replace --forward, --backward and --send",
    )
    options = parser.add_argument_group("options of auto")
    options.add_argument(
        "--placement",
        choices=("loop", "v"),
        help="stages in a loop over the ranks, or down and back up (default: loop)",
    )
    options.add_argument(
        "--memory-limit",
        metavar="N[,N...]",
        help="activations a rank may hold, one number or one per rank (default: no limit)",
    )
    options.add_argument(
        "--activation-size",
        metavar="N[,N...]",
        help="size of an activation in the unit of --memory-limit, one number or one per stage "
        "(default: 1)",
    )
    options.add_argument(
        "--whole-backward",
        action="store_true",
        help="do not split a backward into those of input and weights",
    )
    options.add_argument(
        "--effort",
        choices=("fast", "thorough"),
        help="default: thorough for small sizes",
    )


def auto_options(args: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    """Return the additional arguments of ``build_schedule`` for ``auto``; None where not given."""
    is_auto = args.name == "auto"
    return {
        "placement": args.placement,
        "memory_limit": _integers("--memory-limit", args.memory_limit),
        "activation_size": _integers("--activation-size", args.activation_size),
        "split_backward": False if args.whole_backward else None,
        "effort": args.effort,
        "costs": costs if is_auto else None,
    }


def with_stage_costs(costs: Costs, items: list[str] | None) -> Costs:
    """Apply the changes of ``--costs``.

    Raises:
        ConfigError: If an item cannot be parsed.
    """
    changes: dict[str, Any] = {}
    for item in items or []:
        key, _, text = item.partition("=")
        if key not in _COST_FIELDS:
            keys = ", ".join(_COST_FIELDS)
            raise ConfigError(f"--costs has {item!r}; write KEY=TIME with KEY one of {keys}")
        times = _numbers("--costs", key, text)
        if key == "send" and len(times) > 1:
            raise ConfigError(f"--costs has {item!r}; send is one number")
        changes[_COST_FIELDS[key]] = times if len(times) > 1 else times[0]
    return dataclasses.replace(costs, **changes)


def with_cost_flags(message: str) -> str:
    """Return a message about costs in terms of ``--costs``.

    Example:
        >>> with_cost_flags("cost 'forward' has 2 entries; give one for all stages or 4")
        '--costs F has 2 entries; give one for all stages or 4'
    """
    for key, field in _COST_FIELDS.items():
        message = message.replace(f"cost '{field}'", f"--costs {key}")
    return message


def certificate_json(certificate: Certificate) -> dict[str, Any]:
    """Return a certificate as plain values."""
    values = {
        field.name: getattr(certificate, field.name) for field in dataclasses.fields(certificate)
    }
    bound = certificate.bound
    return values | {
        "bound": {"value": bound.value, "reason": bound.reason, "by_reason": bound.by_reason}
    }


def _numbers(flag: str, key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{flag} has {key}={text!r}; write a number, or one per stage with commas between"
        ) from None


def _integers(flag: str, text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{flag} is {text!r}; write a whole number, or several with commas between"
        ) from None
    largest = max(numbers, key=abs)
    if abs(largest) > LARGEST_INT64:
        raise ConfigError(f"{flag} has {largest}; the largest is {LARGEST_INT64}")
    return numbers if len(numbers) > 1 else numbers[0]
