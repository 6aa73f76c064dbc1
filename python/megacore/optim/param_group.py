"""Optimizer settings of parameters, selected by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megacore.optim.update_rule import UpdateRule
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megacore.suggest import nearest


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Settings of parameters whose name matches a pattern.

    Attributes:
        pattern: Shell-style pattern of global names, such as ``"layers.*.mlp.*"``.
        lr_scale: Factor on the learning rate.
        weight_decay: Weight decay; ``None`` keeps that of the parameter.
        rule: Their optimizer; ``None`` keeps that of the options.

    Raises:
        ValueError: If a number is negative or not finite.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    rule: UpdateRule | None = None

    def __post_init__(self) -> None:
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(
                    f"{name} of {self.pattern!r} must be a number of at least 0, got {value}"
                )


@dataclass(frozen=True, kw_only=True)
class ParamSettings:
    """Resulting settings of one parameter."""

    rule: UpdateRule
    lr_scale: float
    weight_decay: float


def check_patterns(
    param_groups: Sequence[ParamGroup], names: Sequence[str], groups: ProcessGroups
) -> None:
    """Check that every pattern matches a parameter on some rank. Collective if there are patterns.

    Args:
        param_groups: Parameter groups, equal on every rank.
        names: Global names of the parameters of this rank.
        groups: Process groups of this rank.

    Raises:
        ValueError: On every rank, if a pattern has no match.

    Example:
        >>> check_patterns([ParamGroup(pattern="*.mlp.*")], ["a.mlp.up"], ProcessGroups.single())
    """
    if not param_groups:
        return
    known = sorted(set().union(*all_gather_objects(list(names), groups.world)))
    for group in param_groups:
        if not any(fnmatchcase(name, group.pattern) for name in known):
            close = nearest(group.pattern, known, count=3)
            raise ValueError(
                f"the pattern {group.pattern!r} of a ParamGroup matches none of the {len(known)} "
                f"parameters; nearest: {', '.join(close)}"
            )


def settings_of(
    info: ParamInfo, groups: Sequence[ParamGroup], *, rule: UpdateRule, weight_decay: float
) -> ParamSettings:
    """Return the settings of a parameter from the first group that matches.

    Args:
        info: The parameter.
        groups: Parameter groups; earlier groups have precedence.
        rule: Update rule without a group, or with one that names none.
        weight_decay: Weight decay without a group, for parameters with ``info.weight_decay``.

    Example:
        >>> from megacore.optim import AdamW
        >>> info = ParamInfo(name="layers.0.mlp.down", full_shape=(2, 2), tp_dim=None)
        >>> groups = [ParamGroup(pattern="*.mlp.*", lr_scale=0.5)]
        >>> own = settings_of(info, groups, rule=AdamW(), weight_decay=0.1)
        >>> own.lr_scale, own.weight_decay
        (0.5, 0.1)
    """
    group = next(
        (group for group in groups if fnmatchcase(info.name, group.pattern)),
        ParamGroup(pattern="*"),
    )
    decay = weight_decay if info.weight_decay else 0.0
    own, lr_scale = (group.rule or rule).rule_for(info)
    return ParamSettings(
        rule=own,
        lr_scale=group.lr_scale * lr_scale,
        weight_decay=decay if group.weight_decay is None else group.weight_decay,
    )
