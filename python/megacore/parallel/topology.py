"""Dense and expert view of one world of ranks: groups, coordinates and sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore import _core
from megacore.errors import ConfigError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class RankGenerator:
    """A dense grid of ranks with one dimension per parallel axis.

    The first axis of ``order`` varies fastest, so its ranks are neighbours. The group of a *token*
    (one axis, or several joined by dashes) lets those axes vary and holds the others fixed;
    ``"dp-cp"`` and ``"cp-dp"`` are the same set of axes. The object is an immutable value and needs
    no process group.

    Args:
        tp: Tensor parallel ranks.
        cp: Context parallel ranks.
        ep: Expert parallel ranks.
        dp: Data parallel ranks.
        pp: Pipeline ranks.
        order: Axes from the fastest varying to the slowest. Axes of size 1 may be left out.
        rank_offset: Number of the first rank.

    Raises:
        ConfigError: If a size is below 1, or the order has an unknown, repeated, empty or missing
            axis.

    Source:
        The mixed-radix rule of Megatron-LM (arXiv:2104.04473); written out in ``docs/parallel.md``.

    Example:
        >>> ranks = RankGenerator(tp=2, dp=2, pp=2)
        >>> ranks.get_ranks("dp")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> ranks.coordinates(6)["pp"], ranks.rank(tp=0, dp=1, pp=1)
        (1, 6)
    """

    __slots__ = ("_native",)

    def __init__(
        self,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int = 1,
        pp: int = 1,
        order: str = DEFAULT_ORDER,
        rank_offset: int = 0,
    ) -> None:
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        try:
            self._native = _core.RankGenerator(
                sizes=[(axis, _whole(axis, size)) for axis, size in sizes.items()],
                order=order,
                rank_offset=_whole("rank_offset", rank_offset),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def _of(cls, native: _core.RankGenerator) -> RankGenerator:
        view = cls.__new__(cls)
        view._native = native
        return view

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid, the product of all sizes."""
        return self._native.world_size

    @property
    def rank_offset(self) -> int:
        """Number of the first rank."""
        return self._native.rank_offset

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, fastest-varying axis first."""
        return dict(self._native.layout)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, fastest varying first."""
        return tuple(axis for axis, _ in self._native.layout)

    def stride(self, axis: str) -> int:
        """Return the distance in ranks between neighbours along one axis."""
        return self._native.stride(axis)

    def group_size(self, token: str) -> int:
        """Return the number of ranks in each group of a token."""
        return self._native.group_size(token)

    def groups(self, token: str) -> npt.NDArray[np.int32]:
        """Return all groups of a token as one array.

        Args:
            token: An axis, or several joined by dashes.

        Returns:
            Global ranks, ``(num_groups, group_size)``, int32. Rows are in increasing order of their
            first rank, ranks increase within a row, and every rank occurs exactly once.

        Raises:
            ValueError: If the token names an axis this grid does not have, or one twice.

        Example:
            >>> RankGenerator(tp=2, cp=2, dp=2).groups("tp-cp").tolist()
            [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        return self._native.groups(token)

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return all groups of a token as lists; see ``groups`` for the order."""
        ranks: list[list[int]] = self.groups(token).tolist()
        return ranks

    def group_of(self, rank: int, token: str) -> list[int]:
        """Return the group of a token that contains ``rank``, without computing the others."""
        return self._native.group_of(rank, token)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on every axis.

        Raises:
            ValueError: If the rank is not in the grid.
        """
        return dict(zip(self.axes, self._native.coordinates(rank), strict=True))

    def rank(self, **coordinates: int) -> int:
        """Return the rank at the given position; axes of size 1 may be left out.

        Raises:
            ValueError: If an axis is unknown, missing, or its position is outside its size.
        """
        unknown = sorted(set(coordinates) - set(self.axes))
        if unknown:
            raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(self.axes)}")
        missing = [
            axis for axis, size in self.sizes.items() if size > 1 and axis not in coordinates
        ]
        if missing:
            raise ValueError(
                f"the coordinate of axis {missing[0]} (size {self.sizes[missing[0]]}) is missing"
            )
        return self._native.rank([coordinates.get(axis, 0) for axis in self.axes])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankGenerator):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_rank_generator, (self._native.layout, self.rank_offset)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        offset = f", rank_offset={self.rank_offset}" if self.rank_offset else ""
        return f"RankGenerator({sizes}{offset})"

    def _key(self) -> tuple[tuple[tuple[str, int], ...], int]:
        return tuple(self._native.layout), self.rank_offset


class Topology:
    """The dense and the expert view of one world of ranks (parallel folding).

    Attention and dense layers divide the world as ``tp x cp x dp x pp``, expert layers divide the
    same ranks as ``etp x ep x edp x pp``, in one axis order. The remaining factor is data
    parallelism: ``dp`` and ``expert_dp``. Both views have the same pipeline groups, since the
    attention and the experts of a layer share a stage.

    Args:
        world_size: Number of ranks.
        tp: Tensor parallel ranks of dense layers.
        cp: Context parallel ranks.
        pp: Pipeline ranks.
        ep: Expert parallel ranks.
        etp: Tensor parallel ranks of expert layers; ``tp`` when ``None``.
        order: Axes from the fastest varying to the slowest; ``tp`` and ``dp`` also place ``etp``
            and ``edp``.

    Raises:
        ConfigError: If the world does not divide, the order is wrong, or the two views have
            different pipeline groups. The message shows the product with each factor and the
            nearest legal settings.

    Example:
        >>> topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
        >>> topology.dp, topology.expert_dp
        (2, 2)
        >>> topology.group_of(5, "dp"), topology.expert_group_of(5, "ep")
        ([1, 5], [4, 5, 6, 7])
    """

    __slots__ = ("_dense", "_expert", "_native", "_settings")

    def __init__(
        self,
        *,
        world_size: int,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> None:
        named = {"world_size": world_size, "tp": tp, "cp": cp, "pp": pp, "ep": ep}
        sizes = {name: _whole(name, value) for name, value in named.items()}
        try:
            self._native = _core.Topology(
                **sizes, etp=None if etp is None else _whole("etp", etp), order=order
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._settings: dict[str, Any] = {**sizes, "etp": self._native.etp, "order": order}
        self._dense = RankGenerator._of(self._native.dense)
        self._expert = RankGenerator._of(self._native.expert)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._dense.world_size

    @property
    def tp(self) -> int:
        """Tensor parallel ranks of dense layers."""
        return self._dense.sizes["tp"]

    @property
    def cp(self) -> int:
        """Context parallel ranks."""
        return self._dense.sizes["cp"]

    @property
    def dp(self) -> int:
        """Data parallel ranks of dense layers, ``world_size / (tp * cp * pp)``."""
        return self._native.dp

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self._dense.sizes["pp"]

    @property
    def ep(self) -> int:
        """Expert parallel ranks."""
        return self._expert.sizes["ep"]

    @property
    def etp(self) -> int:
        """Tensor parallel ranks of expert layers."""
        return self._native.etp

    @property
    def expert_dp(self) -> int:
        """Data parallel ranks of expert layers, ``world_size / (etp * ep * pp)``."""
        return self._native.expert_dp

    @property
    def order(self) -> str:
        """Axes from the fastest varying to the slowest, as given."""
        order: str = self._settings["order"]
        return order

    @property
    def dense(self) -> RankGenerator:
        """The view of attention and dense layers, axes ``tp cp dp pp``."""
        return self._dense

    @property
    def expert(self) -> RankGenerator:
        """View of expert layers, axes ``etp ep edp pp``; tokens ``tp`` and ``dp`` mean etp, edp."""
        return self._expert

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on the axes ``tp cp dp pp``."""
        return self._dense.coordinates(rank)

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on the axes ``etp ep edp pp``."""
        return self._expert.coordinates(rank)

    def group_of(self, rank: int, token: str) -> list[int]:
        """Return the ranks of the dense group of ``token`` that contains ``rank``."""
        return self._dense.group_of(rank, token)

    def expert_group_of(self, rank: int, token: str) -> list[int]:
        """Return the ranks of the expert group of ``token`` that contains ``rank``."""
        return self._expert.group_of(rank, token)

    def describe(self) -> str:
        """Return a table of both views: each axis with its size, stride and first groups.

        Example:
            >>> print(Topology(world_size=4, tp=2).describe())
            4 ranks, order tp-cp-ep-dp-pp
            dense layers: tp 2 x cp 1 x dp 2 x pp 1
              axis  size  stride  groups
              tp       2       1  [0, 1] [2, 3]
              cp       1       2  [0] [1] [2] [3]
              dp       2       2  [0, 2] [1, 3]
              pp       1       4  [0] [1] [2] [3]
            expert layers: etp 2 x ep 1 x edp 2 x pp 1
              axis  size  stride  groups
              etp      2       1  [0, 1] [2, 3]
              ep       1       2  [0] [1] [2] [3]
              edp      2       2  [0, 2] [1, 3]
              pp       1       4  [0] [1] [2] [3]
        """
        lines = [f"{self.world_size:,} ranks, order {self.order}"]
        for name, view in (("dense", self._dense), ("expert", self._expert)):
            product = " x ".join(f"{axis} {size}" for axis, size in view.sizes.items())
            lines.append(f"{name} layers: {product}")
            lines.append("  axis  size  stride  groups")
            for axis, size in view.sizes.items():
                groups = groups_text(view.groups(axis), max_groups=4)
                lines.append(f"  {axis:<4}  {size:>4}  {view.stride(axis):>6}  {' '.join(groups)}")
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self._settings == other._settings

    def __hash__(self) -> int:
        return hash(tuple(self._settings.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_topology, (self._settings,)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"Topology({settings})"


def groups_text(
    groups: npt.NDArray[np.int32], *, max_groups: int = 16, max_ranks: int = 16
) -> list[str]:
    """Return groups as texts such as ``"[0, 4]"``; omitted groups and ranks are counted.

    Args:
        groups: Ranks, ``(num_groups, group_size)``, int32.
        max_groups: Number of groups to show; a last text has the number of others.
        max_ranks: Number of ranks to show per group.

    Example:
        >>> groups_text(np.arange(12, dtype=np.int32).reshape(3, 4), max_groups=2, max_ranks=3)
        ['[0, 1, 2, ... 1 more]', '[4, 5, 6, ... 1 more]', '... 1 more']
    """
    num_groups, group_size = groups.shape
    texts = []
    for row in groups[:max_groups, :max_ranks].tolist():
        ranks = ", ".join(str(rank) for rank in row)
        more = f", ... {group_size - max_ranks:,} more" if group_size > max_ranks else ""
        texts.append(f"[{ranks}{more}]")
    if num_groups > max_groups:
        texts.append(f"... {num_groups - max_groups:,} more")
    return texts


def _whole(name: str, value: int) -> int:
    """Return the value as a 64-bit int; raise an error with the setting's name."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ConfigError(f"{name} is {number}; it must fit 64 bits")
    return number


def _rebuild_rank_generator(layout: Sequence[tuple[str, int]], rank_offset: int) -> RankGenerator:
    # The order text names dense axes only; an expert axis has the place of its dense one.
    order = "-".join(
        axis.removeprefix("e") if axis in ("etp", "edp") else axis for axis, _ in layout
    )
    native = _core.RankGenerator(sizes=list(layout), order=order, rank_offset=rank_offset)
    return RankGenerator._of(native)


def _rebuild_topology(settings: dict[str, Any]) -> Topology:
    return Topology(**settings)
