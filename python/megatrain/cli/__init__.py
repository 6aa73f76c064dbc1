"""The ``megacore`` command. Each command is a module of this package, loaded on demand.

A command module has ``add_parser(subparsers)`` and ``run(args) -> int``. Expensive imports are
inside ``run``, so that help and usage errors are fast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from megacore.errors import ConfigError, MegacoreError, PeerLostError, printable
from megacore.suggest import did_you_mean
from megatrain.config import setting_homes, split_overrides


@dataclass(frozen=True, kw_only=True)
class Command:
    """One line of ``megacore --help``.

    Attributes:
        help: Description of the command.
        takes_settings: Whether the command accepts ``--section.key=value`` settings.
    """

    help: str
    takes_settings: bool = False


COMMANDS = {
    "train": Command(help="train the model described by a TOML file", takes_settings=True),
    "generate": Command(help="continue a text with a trained checkpoint"),
    "eval": Command(help="compute loss and perplexity of trained weights", takes_settings=True),
    "report": Command(help="write the report of a run, or compare two runs"),
    "import-hf": Command(help="convert a Hugging Face model to a checkpoint"),
    "export-hf": Command(help="convert a checkpoint to a Hugging Face model"),
    "plan": Command(
        help="show layout, memory and schedule of a run without starting it", takes_settings=True
    ),
    "calibrate": Command(help="measure this machine for megacore plan, or learn from a run"),
    "data": Command(help="tokenize, inspect, merge and check training data", takes_settings=True),
    "trace": Command(help="join the profiles of all ranks of a run"),
    "ranks": Command(help="show which ranks form a group, for a layout"),
    "schedule": Command(help="show a pipeline schedule as a table or picture"),
    "echo": Command(help="simulate how hot experts are cloned to balance the ranks"),
    "why-hung": Command(help="show which ranks of a run wait for whom, and why"),
    "doctor": Command(help="check this machine and this installation"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    The exit code is 0 for success; 2 for a user error, printed as one line; 1 for a lost peer or an
    internal error; 130 for an interrupt. ``--debug`` adds the traceback.
    """
    # OpenMP's idle threads spin by default. Beside other ranks, or on a busy machine, that costs a
    # small model most of its speed (17 times on 2 cores). Read once, at the import of torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        return _run(arguments, debug=debug)
    except SystemExit as error:  # --help and --version
        return error.code if isinstance(error.code, int) else 0
    except KeyboardInterrupt:
        return _complain("interrupted", 130, debug=debug)
    except BrokenPipeError:
        # The reader of the pipe has closed it, as in `megacore ranks ... | head`.
        sys.stderr.close()
        return 0
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        sentence = f"there is not enough memory for these sizes{reason}; choose smaller ones"
        return _complain(sentence, 1, debug=debug)
    except OSError as error:  # for example a full disk or a deleted file
        place = f"{error.filename}: " if error.filename else "reading or writing failed: "
        return _complain(f"{place}{error.strerror or error}", 1, debug=debug)
    except ImportError as error:
        sentence = f"the installation is incomplete: {error}; install again, or see megacore doctor"
        return _complain(sentence, 1, debug=debug)
    except (MegacoreError, ValueError) as error:
        return _complain(str(error), 1 if isinstance(error, PeerLostError) else 2, debug=debug)


def _run(arguments: Sequence[str], *, debug: bool) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    if all(argument.startswith("-") for argument in arguments):
        parser, _ = _build_parser(None)
        parser.parse_args(_with_dashes(arguments))
        parser.print_help()
        return 0
    module, args = parse(arguments)
    args.debug = debug
    exit_code: int = module.run(args)
    return exit_code


def parse(arguments: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Parse a command line with a command, without running it.

    Returns:
        The module of the command and its arguments, with ``settings`` as pairs of key and text.

    Raises:
        ConfigError: For an unknown command, option or argument, or one that is missing.
    """
    name = next(argument for argument in arguments if not argument.startswith("-"))
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        suggestion = did_you_mean(name, list(COMMANDS)) or f"; the commands are {known}"
        raise ConfigError(f"unknown command {name!r}{suggestion}")
    module = importlib.import_module(f"megatrain.cli.{name.replace('-', '_')}")
    settings: list[tuple[str, str]] = []
    if COMMANDS[name].takes_settings:
        settings, arguments = split_overrides(arguments)
    parser, commands = _build_parser(module)
    args, unknown = parser.parse_known_args(_with_dashes(arguments))
    if unknown:
        raise ConfigError(_describe_unknown(unknown, commands.choices[name], COMMANDS[name]))
    args.settings = settings
    return module, args


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options, and reports usage errors as one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing and exiting."""
        raise ConfigError(f"{message}; see {self.prog} --help")


class _Help(argparse.HelpFormatter):
    """Help formatter with a column wide enough for the longest command."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._action_max_length = 4 + max(map(len, COMMANDS))


class _ShowVersion(argparse.Action):
    """Prints the version of the native core, which is loaded on demand."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from megacore import __version__

        print(f"megacore {__version__}")
        parser.exit()


def _build_parser(
    module: ModuleType | None,
) -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    parser = Parser(
        prog="megacore",
        description="Distributed training on CPUs and GPUs.",
        epilog="megacore COMMAND --help explains a command; --debug adds tracebacks to messages.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    if module is not None:
        module.add_parser(commands)
    else:
        for name, command in COMMANDS.items():
            commands.add_parser(name, help=command.help)
    return parser, commands


def _with_dashes(arguments: Sequence[str]) -> list[str]:
    """Normalize ``--world_size`` to ``--world-size``; values are unchanged."""
    result = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        result.append(f"{name}{equals}{value}")
    return result


def _describe_unknown(
    unknown: Sequence[str], parser: argparse.ArgumentParser, command: Command
) -> str:
    first = unknown[0].partition("=")[0]
    if not first.startswith("-"):
        return f"unexpected argument {first!r}; see {parser.prog} --help"
    name = first.lstrip("-").replace("-", "_")
    homes = setting_homes(name) if command.takes_settings else []
    if homes:
        return f"unknown option {first}; did you mean --{' or --'.join(homes)}?"
    suggestion = did_you_mean(first, list(parser._option_string_actions))
    return f"unknown option {first}{suggestion or f'; see {parser.prog} --help'}"


def _complain(sentence: str, exit_code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"megacore: {printable(sentence)}", file=sys.stderr)
    return exit_code
