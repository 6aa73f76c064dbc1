"""Shared parts of the sections: strict base model, origins of values, wording of messages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from megacore.errors import ConfigError
from megacore.suggest import closest_matches

MAX_SIZE = 1 << 31
# Settings that are no size of anything: a seed, and numbers of tokens of a run.
_LARGE = frozenset({"seed", "warmup", "decay_end", "tail_length"})
MAX_TIMEOUT_S = 7 * 86400.0


# Settings that are number formats.
_DTYPE_FIELDS = ("dtype", "moments_dtype", "grad_dtype", "precision")
# Other names of number formats, as users of torch and Megatron-LM write them.
_DTYPES = MappingProxyType(
    {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
    }
)


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _SectionType
else:

    class _SectionType(type(BaseModel)):
        """Class of sections: those made in Python report mistakes as sentences."""

        def __call__(cls, /, **values):
            """Make a section.

            Raises:
                ConfigError: If a value is not valid.
            """
            try:
                return super().__call__(**values)
            except ValidationError as error:
                details = error.errors(include_url=False)
                raise ConfigError("; ".join(_sentence(each, cls) for each in details)) from None


def _sentence(details: Any, section: type[Section]) -> str:
    """Return one pydantic error as a sentence about an argument of a section."""
    name = ".".join(str(part) for part in details["loc"])
    context, kind = details.get("ctx", {}), details["type"]
    if kind == "extra_forbidden":
        return _unknown_setting(details["loc"], section)
    message = str(context["error"]) if kind == "value_error" else details["msg"]
    if kind == "too_short":
        message = f"a list of {context['min_length']} or more"
    message = message.removeprefix("Input should be ").partition(", unable to")[0]
    if not name:
        return f"{section.__name__}: {message}"
    if kind == "value_error":
        return f"{section.__name__}: {name} = {details['input']!r}: {message}"
    return f"{section.__name__}: {name} must be {message}, got {details['input']!r}"


def _unknown_setting(place: Sequence[Any], section: type[Section]) -> str:
    """Return the sentence for an argument that is no setting of the section."""
    *path, name = place
    home = section
    for inner in path:
        home = home.inner_sections().get(inner, home)
    known = list(home.by_key()) + list(home.inner_sections())
    close = closest_matches(name, known, count=1)
    hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known)}"
    return f"{home.__name__} has no setting {name}{hint}"


def require_section(value: object, section: type[Section], name: str) -> None:
    """Check that an argument is a section.

    Raises:
        TypeError: If not, with the class.
    """
    if not isinstance(value, section):
        found = value.__name__ if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be a megatrain.config.{section.__name__}, got {found}")


class Section(BaseModel, metaclass=_SectionType):
    """Base of all sections: frozen, no unknown keys, finite numbers only.

    Raises:
        ConfigError: If a section that is made in Python has an invalid value.

    Example:
        >>> from megatrain.config import OptimizerConfig
        >>> OptimizerConfig(lr="high")
        Traceback (most recent call last):
        megacore.errors.ConfigError: OptimizerConfig: lr must be a valid number, got 'high'
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True
    )

    @field_validator(
        "dtype", "moments_dtype", "grad_dtype", "precision", mode="before", check_fields=False
    )
    @classmethod
    def _expand_dtype(cls, value: Any) -> Any:
        return _DTYPES.get(value, value) if isinstance(value, str) else value

    @field_validator("*")
    @classmethod
    def _check_range(cls, value: Any, info: ValidationInfo) -> Any:
        # The native core has 32-bit sizes; larger ones would only take hours or all memory.
        if isinstance(value, int) and value >= MAX_SIZE and info.field_name not in _LARGE:
            raise ValueError(f"must be below {MAX_SIZE:,}")
        return value

    @classmethod
    def by_key(cls) -> dict[str, FieldInfo]:
        """Return the fields by their name in files: the alias, if there is one.

        Nested sections are excluded, see :meth:`inner_sections`.
        """
        inner = cls.inner_sections()
        return {
            info.alias or name: info for name, info in cls.model_fields.items() if name not in inner
        }

    @classmethod
    def inner_sections(cls) -> dict[str, type[Section]]:
        """Return the nested sections by name."""
        return {
            name: info.annotation
            for name, info in cls.model_fields.items()
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
        }


_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def duration_s(text: str) -> float:
    """Convert a time span to seconds.

    Raises:
        ValueError: If it is not of the form ``1d2h30m10s``, or ``0``.

    Example:
        >>> duration_s("3h50m"), duration_s("90s"), duration_s("0")
        (13800.0, 90.0, 0.0)
    """
    match = _DURATION.fullmatch(text)
    if text == "0":
        return 0.0
    if match is None or not text or len(text) > 20:
        raise ValueError("must be a time span such as 30m, 3h50m or 1d12h, or 0")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_pattern(pattern: str, letters: str) -> str:
    """Check a pattern of layers, and return it.

    Raises:
        ValueError: With the form of a pattern.

    Example:
        >>> check_pattern("ddd(e)", "de")
        'ddd(e)'
    """
    if re.fullmatch(rf"[{letters}]+|[{letters}]*\([{letters}]+\)", pattern) is None:
        first, second = letters[0], letters[1]
        raise ValueError(
            f"must be letters {first} and {second}, the last of them in parentheses if only they "
            f'are repeated, as in "{first}{second}" or "{first}{first}({second})"'
        )
    return pattern


def letter_of_layer(pattern: str, layer: int) -> str:
    """Return the letter of a layer; a pattern, or its part in parentheses, is repeated.

    Example:
        >>> "".join(letter_of_layer("dd(de)", layer) for layer in range(7))
        'dddeded'
    """
    head, has_period, period = pattern.rstrip(")").partition("(")
    if not has_period:
        return head[layer % len(head)]
    return head[layer] if layer < len(head) else period[(layer - len(head)) % len(period)]


def split_key(key: str) -> tuple[str, str]:
    """Return the section of a key, and the rest.

    Example:
        >>> split_key("moe.echo.num_spare_slots"), split_key("train.steps"), split_key("train")
        (('moe.echo', 'num_spare_slots'), ('train', 'steps'), ('train', ''))
    """
    section, _, name = key.rpartition(".")
    return (section, name) if section else (name, "")


@dataclass(frozen=True)
class Origins:
    """Origins of settings: ``"parallel.tp" -> "demo.toml:9"`` or ``"--parallel.tp=2"``.

    All origins compare equal, so they never make two configurations differ.

    Attributes:
        where: File and line, or override, by key.
        derived: Keys without an explicit value, computed from other settings.
        notes: Sentences on settings with old names, without effect, or with a surprising one.
    """

    where: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    derived: frozenset[str] = field(default=frozenset(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __reduce__(self) -> tuple[type[Origins], tuple[Any, ...]]:
        # A mapping proxy cannot be pickled.
        return (Origins, (dict(self.where), self.derived, self.notes))


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` around ``value``, for messages.

    Example:
        >>> nearest_multiples(130, 4), nearest_multiples(2, 4)
        ('128 or 132', '4')
    """
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def nearest_divisors(value: int, whole: int) -> str:
    """Return the divisors of ``whole`` around ``value``, for messages.

    Example:
        >>> nearest_divisors(3, 8), nearest_divisors(9, 8)
        ('2 or 4', '8')
    """
    return nearest_of(divisors(whole), value)


def divisors(whole: int) -> list[int]:
    """Return all divisors of ``whole``, the smallest first.

    Example:
        >>> divisors(6)
        [1, 2, 3, 6]
    """
    small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
    return sorted({*small, *(whole // number for number in small)})


def nearest_of(legal: Sequence[int], value: int) -> str:
    """Return the ascending ``legal`` numbers around ``value``, for messages.

    Example:
        >>> nearest_of([1, 2, 8], 3), nearest_of([1, 2, 8], 9)
        ('2 or 8', '8')
    """
    below = [number for number in legal if number <= value]
    above = [number for number in legal if number > value]
    return " or ".join(str(number) for number in (below[-1:] + above[:1]))
