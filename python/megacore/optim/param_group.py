"""Optimizer settings of parameters, selected by name; without torch, for predictions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megacore.optim.update_rule import UpdateRule
from megacore.suggest import nearest

if TYPE_CHECKING:
    from megacore.parallel.param_info import ParamInfo
    from megacore.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Settings of parameters whose name matches a pattern.

    Attributes:
        pattern: Shell-style pattern of global names, such as ``"layers.*.mlp.*"``.
        lr_scale: Factor on the learning rate.
        weight_decay: Weight decay; ``None`` keeps that of the parameter.
        rule: Their optimizer; ``None`` keeps that of the options.
        frozen: The parameters are not trained; see :class:`FrozenParams`.
        but: Patterns of names that the group leaves out.

    Raises:
        ValueError: If a number is negative or not finite.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None
    rule: UpdateRule | None = None
    frozen: bool = False
    but: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(
                    f"{name} of {self.pattern!r} must be a number of at least 0, got {value}"
                )

    def matches(self, name: str) -> bool:
        """Return whether a parameter is of this group, if no earlier one has it.

        Example:
            >>> ParamGroup(pattern="*.mlp.*", but=("*.up",)).matches("layers.0.mlp.up")
            False
        """
        is_named = fnmatchcase(name, self.pattern)
        return is_named and not any(fnmatchcase(name, pattern) for pattern in self.but)


@dataclass(frozen=True, kw_only=True)
class ParamSettings:
    """Resulting settings of one parameter."""

    rule: UpdateRule
    lr_scale: float
    weight_decay: float


def check_patterns(
    param_groups: Sequence[ParamGroup], names: Sequence[str], groups: ProcessGroups
) -> None:
    """Check that every group gets a parameter on some rank. Collective if there are groups.

    Args:
        param_groups: Parameter groups, equal on every rank.
        names: Global names of the parameters of this rank.
        groups: Process groups of this rank.

    Raises:
        ValueError: As `require_matches`, on every rank.

    Example:
        >>> from megacore.parallel import ProcessGroups
        >>> check_patterns([ParamGroup(pattern="*.mlp.*")], ["a.mlp.up"], ProcessGroups.single())
    """
    if not param_groups or groups.world.is_fake:  # the names of other ranks are not known
        return
    from megacore.parallel.collectives import all_gather_objects

    require_matches(param_groups, set().union(*all_gather_objects(list(names), groups.world)))


def require_matches(param_groups: Sequence[ParamGroup], names: Collection[str]) -> None:
    """Check that every group gets a parameter.

    Args:
        param_groups: Parameter groups.
        names: Global names of all parameters of the model.

    Raises:
        ValueError: If a pattern matches none, or earlier groups have all that it matches.

    Example:
        >>> require_matches([ParamGroup(pattern="*.mlp.*")], ["a.mlp.up"])
    """
    for number, group in enumerate(param_groups):
        matched = sorted(filter(group.matches, names))
        if not matched:
            close = nearest(group.pattern, sorted(names), count=3)
            raise ValueError(
                f"the pattern {group.pattern!r} matches none of the {len(names)} parameters; "
                f"nearest: {', '.join(close)}"
            )
        before = [_first_match(name, param_groups[:number]) for name in matched]
        if None not in before:
            assert before[0] is not None
            raise ValueError(
                f"the pattern {group.pattern!r} gets no parameter: all {len(matched)} that "
                f"it matches, such as {matched[0]}, are in earlier groups, "
                f"such as {before[0].pattern!r}; the first match wins, so list it before them"
            )


def group_of(name: str, groups: Sequence[ParamGroup]) -> ParamGroup:
    """Return the first group that matches a parameter; one without settings if there is none.

    Example:
        >>> group_of("layers.0.mlp.down", [ParamGroup(pattern="*.mlp.*", frozen=True)]).frozen
        True
    """
    return _first_match(name, groups) or ParamGroup(pattern="*")


def _first_match(name: str, groups: Sequence[ParamGroup]) -> ParamGroup | None:
    return next((group for group in groups if group.matches(name)), None)


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
        >>> from megacore.parallel import ParamInfo
        >>> info = ParamInfo(name="layers.0.mlp.down", full_shape=(2, 2), tp_dim=None)
        >>> groups = [ParamGroup(pattern="*.mlp.*", lr_scale=0.5)]
        >>> own = settings_of(info, groups, rule=AdamW(), weight_decay=0.1)
        >>> own.lr_scale, own.weight_decay
        (0.5, 0.1)
    """
    group = group_of(info.name, groups)
    decay = weight_decay if info.weight_decay else 0.0
    own, lr_scale = (group.rule or rule).rule_for(info)
    return ParamSettings(
        rule=own,
        lr_scale=group.lr_scale * lr_scale,
        weight_decay=decay if group.weight_decay is None else group.weight_decay,
    )
