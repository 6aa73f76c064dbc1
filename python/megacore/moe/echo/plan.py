"""Planner for cloning hot experts into spare slots, so that no rank is overloaded.

Every rank of an expert-parallel group holds ``experts_per_rank`` home experts and
``num_spare_slots`` spare slots. From the number of tokens that every rank's router sends to every
expert, the planner decides which experts are cloned into which slots and how many tokens of every
source rank go to each clone. All arithmetic is in integers, so ranks with the same counts compute
the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from megacore import _core
from megacore.suggest import did_you_mean

if TYPE_CHECKING:
    import torch

Counts = npt.NDArray[np.int64]
PLANNERS = ("balanced", "echo")


@dataclass(frozen=True, kw_only=True, eq=False)
class OffloadPlan:
    """Clones of experts and the tokens they receive; all arrays are read-only int64.

    R ranks, E experts of which rank p is the home of ``[p * E / R, (p + 1) * E / R)``, k slots.

    Attributes:
        planner: ``"balanced"`` or ``"echo"``.
        num_experts: E.
        slot_expert: The expert cloned into each slot, ``(R, k)``; -1 where a slot is unused.
        rerouted: Tokens that leave their home expert, ``(R, R, k)``: source rank, destination rank,
            slot. All other tokens for an expert are computed by its home expert.
        load_before: Tokens per rank without the plan, ``(R,)``.
        load_after: Tokens per rank with the plan, ``(R,)``.
        max_load: The highest ``load_after``.
        num_clones: Slots in use.
        bound: Rows a rank's static receive buffer needs for this total number of tokens.
            ``"balanced"``: the average with the tolerance, rounded, or ``min_imbalance`` times the
            average if that is larger. ``"echo"``: the floor average plus the remainder.
        bound_holds: Whether ``max_load <= bound``. Always true for the balanced planner with at
            least as many slots as experts per rank.
    """

    planner: str
    num_experts: int
    slot_expert: Counts
    rerouted: Counts
    load_before: Counts
    load_after: Counts
    max_load: int
    num_clones: int
    bound: int
    bound_holds: bool

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.slot_expert)

    @property
    def num_spare_slots(self) -> int:
        """Slots per rank, k."""
        return int(self.slot_expert.shape[1])

    @property
    def mean_load(self) -> float:
        """Mean number of tokens per rank."""
        return float(self.load_before.sum()) / self.num_ranks

    @property
    def imbalance_before(self) -> float:
        """Max load over mean load without the plan; 1 is perfect (also without tokens)."""
        return self._over_mean(int(self.load_before.max()))

    @property
    def imbalance_after(self) -> float:
        """Max load over mean load with the plan; 1 is perfect (also without tokens)."""
        return self._over_mean(self.max_load)

    @property
    def num_moved_tokens(self) -> int:
        """Number of tokens computed by clones."""
        return int(self.rerouted.sum())

    def _over_mean(self, load: int) -> float:
        return load / self.mean_load if self.mean_load > 0 else 1.0

    def __eq__(self, other: object) -> bool:
        """Compare two plans field by field."""
        if not isinstance(other, OffloadPlan):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return all(np.array_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def to_text(self) -> str:
        """Format the plan as a table: one line per rank, its load before and after, and its clones.

        Example:
            >>> plan = plan_offload([[30, 10], [50, 10]], num_spare_slots=1, tolerance=0.0)
            >>> print(plan.to_text())
            balanced plan: 2 ranks, 2 experts, 1 spare slot each; 1 clone, 30 tokens moved
            load of the fullest rank 80 -> 50, mean 50.0, imbalance 1.600 -> 1.000; bound 50 holds
            rank  before  after  clones (expert < home rank: tokens)
               0      80     50
               1      20     50  0 < 0: 30
        """
        slots, clones = _count(self.num_spare_slots, "spare slot"), _count(self.num_clones, "clone")
        lines = [
            f"{self.planner} plan: {_count(self.num_ranks, 'rank')}, {self.num_experts} experts, "
            f"{slots} each; {clones}, {self.num_moved_tokens} tokens moved",
            f"load of the fullest rank {self.load_before.max()} -> {self.max_load}, "
            f"mean {self.mean_load:.1f}, "
            f"imbalance {self.imbalance_before:.3f} -> {self.imbalance_after:.3f}; "
            f"bound {self.bound} {'holds' if self.bound_holds else 'is exceeded'}",
        ]
        width = max(6, len(str(self.load_before.max())), len(str(self.max_load)))
        lines.append(f"rank  {'before':>{width}}  {'after':>{width - 1}}  {_CLONE_COLUMN}")
        for rank in range(self.num_ranks):
            before, after = self.load_before[rank], self.load_after[rank]
            clones = self._clones_text(rank)
            lines.append(f"{rank:4}  {before:{width}}  {after:{width - 1}}  {clones}".rstrip())
        return "\n".join(lines)

    def _clones_text(self, rank: int) -> str:
        experts_per_rank = self.num_experts // self.num_ranks
        tokens = self.rerouted[:, rank].sum(axis=0)
        return ", ".join(
            f"{expert} < {expert // experts_per_rank}: {tokens[slot]}"
            for slot, expert in enumerate(self.slot_expert[rank])
            if expert >= 0
        )


_CLONE_COLUMN = "clones (expert < home rank: tokens)"


def plan_offload(
    tokens_from_rank_to_expert: npt.ArrayLike | torch.Tensor,
    *,
    num_spare_slots: int,
    planner: Literal["balanced", "echo"] = "balanced",
    tolerance: float = _core.DEFAULT_TOLERANCE,
    min_imbalance: float = 1.0,
    domain_size: int | None = None,
) -> OffloadPlan:
    """Choose the clones and the tokens that they receive.

    Args:
        tokens_from_rank_to_expert: ``(R, E)``, any integer type, numpy, torch or nested lists; E a
            multiple of R. Entry ``[r, e]`` is the number of tokens that rank r's router sends to
            expert e; a token that chose several experts counts for each. At most 2^31 - 1 tokens
            per expert.
        num_spare_slots: Slots for clones on every rank, k, in [0, 1024].
        planner: ``"balanced"`` keeps every rank at or below the average plus ``tolerance`` whenever
            slots allow it, and always with at least E / R slots. ``"echo"`` is the planner of the
            ECHO documents, for comparison.
        tolerance: Allowed excess over the average with the balanced planner, as a fraction of the
            average, in [0, 1]. A larger tolerance saves clones, each of which costs a transfer of
            an expert's weights.
        min_imbalance: Make no clones while max load over mean load is at most this, >= 1.
        domain_size: Ranks ``[0, n), [n, 2n) ...`` form domains of fast interconnect, for instance
            NVLink; n divides R. Clones are placed outside their domain only for the load that
            cannot be balanced inside it. Balanced planner only; ``None`` for a single domain.

    Returns:
        The plan, a pure function of the arguments.

    Raises:
        ValueError: If the counts are not a matrix of non-negative integers whose number of columns
            is a multiple of its number of rows, or an option is out of range or unknown.

    Sync:
        Runs on the CPU. A CUDA tensor is copied to the host, which waits for the device;
        :func:`~megacore.moe.echo.device_plan.plan_offload_on_device` plans on the device.

    Source:
        ``"echo"``: Megatron-LM pull request 2368; both methods are specified in ``docs/echo.md``
        and checked against independent implementations in ``tests/unit/moe``.

    Example:
        >>> plan = plan_offload([[30, 10], [50, 10]], num_spare_slots=1, tolerance=0.0)
        >>> plan.slot_expert.tolist(), plan.load_before.tolist(), plan.load_after.tolist()
        ([[-1], [0]], [80, 20], [50, 50])
        >>> plan.rerouted[:, 1, 0].tolist()  # rank 1 serves its own tokens first
        [0, 30]
    """
    require_options(planner, tolerance, min_imbalance, domain_size)
    native = _core.plan_offload(
        _integer_matrix(tokens_from_rank_to_expert),
        planner=planner,
        num_spare_slots=num_spare_slots,
        tolerance_per_million=round(tolerance * 1e6),
        min_imbalance_per_million=round(min_imbalance * 1e6),
        domain_size=domain_size or 0,
    )
    return OffloadPlan(
        planner=planner,
        num_experts=native.num_experts,
        slot_expert=native.slot_expert,
        rerouted=native.rerouted,
        load_before=native.load_before,
        load_after=native.load_after,
        max_load=native.max_load,
        num_clones=native.num_clones,
        bound=native.bound,
        bound_holds=native.bound_holds,
    )


def require_options(
    planner: str, tolerance: float, min_imbalance: float, domain_size: int | None
) -> None:
    """Raise ValueError if an option of a planner is out of range."""
    if planner not in PLANNERS:
        suggestion = did_you_mean(str(planner), list(PLANNERS)) or "; there are balanced and echo"
        raise ValueError(f"no offload planner is called {planner!r}{suggestion}")
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"tolerance is {tolerance}; it is a fraction of the average in [0, 1]")
    if not 1.0 <= min_imbalance <= 1000.0:
        raise ValueError(
            f"min_imbalance is {min_imbalance}; it is a highest load over the mean, in [1, 1000]"
        )
    if domain_size is not None and domain_size < 1:
        raise ValueError(f"domain_size is {domain_size}; a domain has at least 1 rank")


def _integer_matrix(counts: npt.ArrayLike | torch.Tensor) -> Counts:
    array = _torch_to_numpy(counts) if hasattr(counts, "detach") else np.asarray(counts)
    if array.dtype.kind not in "iu":
        raise ValueError(f"the counts are {array.dtype}; numbers of tokens are integers")
    if array.ndim != 2:
        raise ValueError(
            f"the counts have shape {array.shape}; they are a matrix, source ranks x experts"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"a count is {array.max()}; it must fit 64 bits with a sign")
    return np.ascontiguousarray(array, dtype=np.int64)


def _torch_to_numpy(counts: Any) -> npt.NDArray[Any]:
    # Not isinstance, because planning on numpy arrays must not import torch.
    if counts.is_floating_point() or counts.is_complex():  # numpy does not know all of torch's
        raise ValueError(f"the counts are {counts.dtype}; numbers of tokens are integers")
    array: npt.NDArray[Any] = counts.detach().cpu().numpy()
    return array


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
