"""Names of a user's own functions and classes: ``package.module:name``, imported by the ranks.

A module is looked up in the folder of the configuration file, else on Python's path and in the
current directory. A name found in the first is stored with its folder, ``folder/module:name``, so
that checkpoints and saved configurations find it again.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError, MegacoreError

_FORM = re.compile(r"(?:(?P<folder>.*)/)?(?P<module>\w+(?:\.\w+)*):(?P<name>[^\W\d]\w*)")


def check_object_name(text: str | None) -> str | None:
    """Return a well-formed name unchanged, and ``None``.

    Raises:
        ValueError: If it is not of the form ``package.module:name``.

    Example:
        >>> check_object_name("my_models.gpt:build"), check_object_name("src/gpt:build")
        ('my_models.gpt:build', 'src/gpt:build')
    """
    if text is not None and _FORM.fullmatch(text) is None:
        raise ValueError(
            'must name a function or class as "package.module:name", or "folder/module:name"'
        )
    return text


def with_folder(text: str, folder: Path) -> str:
    """Return a name with ``folder`` in front if its module is there.

    Example:
        >>> with_folder("json:loads", Path("/nowhere"))
        'json:loads'
    """
    match = _FORM.fullmatch(text)
    if match is None or match["folder"] is not None:
        return text
    top = match["module"].partition(".")[0]
    found = (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()
    return f"{folder.absolute()}/{text}" if found else text


def import_object(text: str, *, setting: str) -> Any:
    """Import the function or class of a name.

    Args:
        text: A name in the form of `check_object_name`.
        setting: The setting with the name, for messages.

    Raises:
        ConfigError: If the module cannot be imported or has no such attribute.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f'{setting} must be "package.module:name", got "{text}"')
    shown, folder = f'{setting} = "{text}"', match["folder"]
    _add_to_path(folder)
    try:
        module = importlib.import_module(match["module"])
    except ModuleNotFoundError as error:
        if error.name is None or not f"{match['module']}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{shown}: its module needs {error.name}, which is missing"
            ) from error
        where = folder or f"Python's path or the current directory {Path.cwd()}"
        raise ConfigError(f"{shown}: there is no module {error.name} in {where}") from error
    except Exception as error:
        raise failure_of(error, f"{shown}: its module cannot be imported") from error
    file = Path(getattr(module, "__file__", None) or folder or "")
    if folder is not None and not file.resolve().is_relative_to(Path(folder).resolve()):
        raise ConfigError(
            f"{shown}: Python has loaded another module {match['module']} from {file}; rename yours"
        )
    found = getattr(module, match["name"], None)
    if not callable(found):
        problem = "has no" if found is None else f"has {type(found).__name__}, no function,"
        raise ConfigError(f"{shown}: module {match['module']} ({file}) {problem} {match['name']}")
    return found


def call_object(function: Callable[..., Any], *arguments: Any, shown: str) -> Any:
    """Call a user's function; other errors than megacore's own become one sentence.

    Args:
        function: The function.
        arguments: Its arguments.
        shown: The setting and its value, for messages.

    Raises:
        ConfigError: If the call fails, with the error and the line that raised it.
        MegacoreError: As raised by the function.
    """
    try:
        return function(*arguments)
    except MegacoreError:
        raise
    except Exception as error:
        raise failure_of(error, f"{shown} failed") from error


def failure_of(error: Exception, what: str) -> ConfigError:
    """Return an error message with the kind of an error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(__file__).parents[1]), "site-packages", "dist-packages", "<frozen")
    own = [f for f in frames if not any(part in f.filename for part in libraries)]
    place = f" (line {own[-1].lineno} of {own[-1].filename})" if own else ""
    return ConfigError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}{place}")


def _add_to_path(folder: str | None) -> None:
    """Make modules of a folder importable, or those of the current directory after all others."""
    if folder is None:
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.append(str(Path.cwd()))
    elif str(Path(folder).absolute()) not in sys.path:
        sys.path.insert(0, str(Path(folder).absolute()))
