"""The ``[lora]`` section: low-rank adapters of a frozen model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, Self

from pydantic import Field, model_validator

from megacore.optim.param_group import ParamGroup
from megatrain.config.base import Section

# Names of the parameters of adapters, after that of their projection.
ADAPTER_NAMES = ("lora_a", "lora_b", "lora_magnitude")


class LoraConfig(Section):
    """``[lora]``: low-rank adapters, which are trained in place of the weights.

    A projection computes ``W x + scale * B A x`` with ``scale = alpha / rank``. See finetuning.md.
    """

    rank: int | None = Field(
        default=None,
        ge=1,
        description="Rows of A and columns of B. Default: no adapters, all weights are trained.",
    )
    alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Factor on adapters, divided by `rank`. Default: `rank`, a factor of 1.",
    )
    targets: list[str] = Field(
        default=["*"],
        min_length=1,
        description="Projections with an adapter: shell-style patterns of their names or of the "
        "ends of their names, as in `q`, `attention.*`, `experts.*` or `layers.[01].*`. Default: "
        "all.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Dropout probability of the inputs of adapters, except those of routed "
        "experts.",
    )
    rs: bool = Field(
        default=False, description="Divide `alpha` by the square root of `rank` (rsLoRA)."
    )
    dora: bool = Field(
        default=False,
        description="Train the norms of the rows of weights apart from their directions (DoRA), "
        "except those of routed experts.",
    )
    init: Literal["kaiming_uniform", "gaussian"] = Field(
        default="kaiming_uniform",
        description="Initial A: uniform up to (input features)^(-1/2), or normal with standard "
        "deviation 1 / `rank`. B is zero.",
    )
    modules_to_save: list[str] = Field(
        default=[],
        description="Parameters that are trained whole beside the adapters: patterns as in "
        "`targets`, such as `embedding`, `head` or `final_norm`.",
    )

    @property
    def is_on(self) -> bool:
        """True if there are adapters."""
        return self.rank is not None

    @property
    def scale(self) -> float:
        """Factor on the product of B and A.

        Example:
            >>> LoraConfig(rank=16, alpha=32.0).scale, LoraConfig(rank=16, rs=True).scale
            (2.0, 4.0)
        """
        rank = self.rank or 1
        alpha = float(rank) if self.alpha is None else self.alpha
        return alpha / (math.sqrt(rank) if self.rs else rank)

    def takes(self, projection: str) -> bool:
        """Return whether a projection has an adapter.

        Example:
            >>> LoraConfig(rank=8, targets=["q", "mlp.*"]).takes("layers.0.attention.q")
            True
        """
        return self.is_on and any(is_named(projection, target) for target in self.targets)

    def param_groups(self) -> list[ParamGroup]:
        """Return the group of frozen parameters, which precedes those of the optimizer."""
        if not self.is_on:
            return []
        saved = (each for name in self.modules_to_save for each in (name, f"*.{name}"))
        adapters = (f"*.{name}" for name in ADAPTER_NAMES)
        return [ParamGroup(pattern="*", frozen=True, but=(*adapters, *saved))]

    @model_validator(mode="after")
    def _check_is_on(self) -> Self:
        set_here = sorted(self.model_fields_set - {"rank"})
        defaults = {name: info.default for name, info in type(self).model_fields.items()}
        changed = [name for name in set_here if getattr(self, name) != defaults[name]]
        if changed and not self.is_on:
            raise ValueError(
                f"{changed[0]} is of adapters, but rank is not set; set rank to 1 or more, such "
                f"as 16, or leave {changed[0]} out"
            )
        return self


NO_ADAPTERS = LoraConfig()


def is_named(name: str, pattern: str) -> bool:
    """Return whether a name, or its end after a dot, matches a pattern.

    Example:
        >>> is_named("layers.0.mlp.up", "mlp.*"), is_named("layers.0.mlp.up", "p")
        (True, False)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is of an adapter.

    Example:
        >>> is_adapter("layers.0.mlp.up.lora_a")
        True
    """
    return name.rpartition(".")[2] in ADAPTER_NAMES


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first pattern that matches none of the names, or ``None``."""
    missing = (each for each in patterns if not any(is_named(name, each) for name in names))
    return next(missing, None)
