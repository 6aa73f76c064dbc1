"""Compatibility of the options of ``megacore schedule``."""

from __future__ import annotations

import argparse

from megacore.errors import ConfigError

# Options without a default, by purpose.
_FILES = ("svg", "csv", "trace")
_SIZES = ("pp", "chunks", "microbatches", "group_size", "warmup_multiplier")
_SEARCH = ("placement", "memory_limit", "activation_size", "whole_backward", "effort")
_PROGRAM = ("receives", "keep")


def require_options_fit(args: argparse.Namespace) -> None:
    """Raise an error for options that would be ignored.

    Raises:
        ConfigError: If a given option does not apply to this form of the command.
    """
    if args.compare:
        unused = (*_FILES, "from_csv", "forward_only", "program", "pairs", *_SEARCH, *_PROGRAM)
        _refuse(args, unused, "--compare shows all schedules, {} is about one")
        return
    if args.from_csv is not None:
        _refuse(
            args, (*_SIZES, "pairs", *_SEARCH), "--from-csv reads a schedule, {} is to make one"
        )
    elif args.name is not None and args.name != "auto":
        # Other options are checked by the builders, whose argument names match the options.
        _refuse(args, ("whole_backward",), f"{{}} is for auto only, not for {args.name}")
    if args.program:
        _refuse(args, (*_FILES, "json"), "--program prints the programs only, {} is about times")
    else:
        _refuse(args, _PROGRAM, "{} is for --program", "add that, or leave it out")


def _refuse(
    args: argparse.Namespace,
    names: tuple[str, ...],
    reason: str,
    advice: str = "leave one of them out",
) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{reason.format(flag)}; {advice}")
