"""Dispatcher interface and the values passed between its calls.

A *copy* is one token assigned to one of its ``k`` experts. A *row map* holds the row of each copy,
-1 for a copy that is not sent (see :mod:`megacore.ops.permutation`).

Shapes: T tokens of this rank, k experts per token, E experts, L experts of this rank, G members of
the group that shares the experts, H hidden.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megacore.moe.dispatchers.capacity import Capacity
from megacore.ops.permutation import unpermute
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group, ProcessGroups
from megacore.parallel.row_exchange import RowSplits


class Routing(Protocol):
    """Router output that a dispatcher needs."""

    @property
    def probs(self) -> Tensor:
        """Weight of each copy, ``(T, k)``, float32."""

    @property
    def expert_ids(self) -> Tensor:
        """Expert of each copy, ``(T, k)``, int64, distinct for each token; -1 for padding."""

    @property
    def num_copies(self) -> Tensor | None:
        """Copies of tokens that are not padding, int64 scalar; ``None``: all."""


def copies_of(routing: Routing) -> Tensor | int:
    """Return the number of copies of tokens that are not padding."""
    if routing.num_copies is None:
        return routing.expert_ids.numel()
    return routing.num_copies


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Placement of a layer's experts on ranks.

    Attributes:
        group: The ``etp x ep`` ranks that hold all experts once.
        members: Positions in ``group`` of the ranks that share the experts of an ep position, one
            row per position, its etp ranks in order.
        ep_position: Position of this rank on the ep axis.
        num_experts: Experts of the layer, a multiple of the ep size.
    """

    group: Group
    members: tuple[tuple[int, ...], ...]
    ep_position: int
    num_experts: int

    @classmethod
    def of(cls, groups: ProcessGroups, num_experts: int) -> ExpertPlacement:
        """Place ``num_experts`` on the ranks of ``groups``.

        Raises:
            ValueError: If ep does not divide the experts.

        Example:
            >>> ExpertPlacement.of(ProcessGroups.single(), 8).num_local
            8
        """
        if num_experts % groups.ep.size:
            raise ValueError(
                f"{num_experts} experts do not divide over ep = {groups.ep.size} ranks"
            )
        ranks = groups.etp_ep.ranks
        where = [groups.topology.expert_coordinates(rank) for rank in ranks]
        position_at = {(at["ep"], at["etp"]): position for position, at in enumerate(where)}
        members = tuple(
            tuple(position_at[ep, etp] for etp in range(groups.etp.size))
            for ep in range(groups.ep.size)
        )
        return cls(
            group=groups.etp_ep,
            members=members,
            ep_position=groups.ep.position,
            num_experts=num_experts,
        )

    def with_slots(self, num_spare_slots: int) -> ExpertPlacement:
        """Add spare slots behind each rank's experts; expert numbers then are places.

        Example:
            >>> ExpertPlacement.of(ProcessGroups.single(), 8).with_slots(2).num_local
            10
        """
        return replace(self, num_experts=self.num_experts + self.ep_size * num_spare_slots)

    @property
    def ep_size(self) -> int:
        """Number of ranks, or etp groups of ranks, that the experts are divided over."""
        return len(self.members)

    @property
    def num_local(self) -> int:
        """Number of experts of this rank (etp shards count as experts)."""
        return self.num_experts // self.ep_size

    def expected_rows(self, num_copies: int) -> int:
        """Compute the mean rows of an expert if each rank has ``num_copies``, rounded up.

        Example:
            >>> ExpertPlacement.of(ProcessGroups.single(), 8).expected_rows(100)
            13
        """
        return -(-num_copies * self.group.size // self.num_experts)

    @property
    def first_local(self) -> int:
        """Global number of this rank's first expert."""
        return self.ep_position * self.num_local


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Dispatch decisions for the tokens of one forward pass, made before any row is moved.

    A plan is computed on the device without host sync, so it can be the output of a captured
    region. Tensor shapes depend on T, k, E and G only.

    Attributes:
        probs: Weight of each copy, ``(T, k)``, float32, with its gradient.
        row_map: Row of each copy among the rows that are sent, ``(T, k * etp)`` int64; -1 for
            copies that are not sent. Where etp ranks share an expert, each gets a copy.
        tokens_per_expert: Copies of this rank's tokens for each expert, without dropped copies,
            ``(E,)`` int64.
        arriving: Copies that each member of the group sends to each local expert, ``(G, L)`` int64;
            their sums over members, ``(1, L)``, where rows arrive sorted by expert.
        rows_per_member: Sizes that the host must read: rows sent to and received from each member,
            ``(2, G)`` int64, or a single number of rows; ``None`` where sizes are fixed.
        num_dropped: Dropped copies of this rank's tokens, int64 scalar; ``None`` where none can be.
        num_over_budget: Copies dropped because a static buffer was full, int64 scalar; ``None``
            where none can be.
        num_arrived: Rows that arrive, int64 scalar, for dispatchers that need it.
    """

    probs: Tensor
    row_map: Tensor
    tokens_per_expert: Tensor
    arriving: Tensor
    rows_per_member: Tensor | None
    num_dropped: Tensor | None = None
    num_over_budget: Tensor | None = None
    num_arrived: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SentNext:
    """Memory for rows that are sent as soon as they are computed, which saves a copy.

    Each function is called at most once per pass, right before the rows are written. The rows that
    a product reads cannot be there: the gradient of its weight needs them until the backward pass,
    and memory for rows in flight is reused before.

    Attributes:
        results: Returns memory for the results of the experts, ``(M, H)``.
        input_grads: Returns memory for the gradient of ``ExpertRows.rows``, ``(M, H)``.
    """

    results: Callable[[], Tensor]
    input_grads: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Input rows of the local experts, sorted by expert.

    Attributes:
        rows: ``(M, H)``. Rows behind the sum of ``m_splits`` belong to no expert.
        probs: Weight of each row, ``(M,)``, float32.
        m_splits: Rows of each local expert, ``(L,)`` int64, on the device.
        row_map: Sorted row of each received row, ``(M, 1)`` int64; ``None`` if rows were received
            in sorted order.
        num_rows: Sum of ``m_splits``, int64 scalar on the device, where no later step reads the
            rows behind it: these may then have any value, also in results and gradients. ``None``
            where all rows are read.
        expected_rows: Expected rows of an expert where the number of rows is a capacity, else 0, as
            in `megacore.ops.gemm.grouped_gemm`.
        sent_next: Memory for the results and the gradient of ``rows``; ``None`` for memory of the
            products' own.
    """

    rows: Tensor
    probs: Tensor
    m_splits: Tensor
    row_map: Tensor | None
    num_rows: Tensor | None = None
    expected_rows: int = 0
    sent_next: SentNext | None = None


@dataclass
class PendingDispatch:
    """Dispatch in flight.

    Attributes:
        finish: Waits for the tokens and returns them; must be called exactly once.
    """

    finish: Callable[[], ExpertRows]


@dataclass
class PendingCombine:
    """Combine in flight.

    Attributes:
        finish: Waits for the results, indexed by ``plan.row_map``, and returns them; must be called
            exactly once.
    """

    finish: Callable[[], Tensor]


class Dispatcher(ABC):
    """Exchange of tokens and results between ranks and the ranks of their experts.

    A forward pass calls ``preprocess``, ``read_splits``, ``dispatch``, the experts, ``combine`` (or
    ``start_combine``) and ``postprocess``. A dispatcher is stateless: the inputs of later calls are
    returned by earlier calls.

    Args:
        placement: Placement of the experts.
        capacity: Limit of the copies per expert; ``None`` for no limit.

    Attributes:
        captured_fields: Fields of :class:`DispatchPlan` that later calls read and that a captured
            region ending after ``preprocess`` must therefore keep.
    """

    captured_fields: ClassVar[tuple[str, ...]]

    def __init__(self, placement: ExpertPlacement, *, capacity: Capacity | None = None) -> None:
        self.placement = placement
        self.capacity = capacity

    @abstractmethod
    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Plan the destination row of each copy.

        Sync:
            Exchanges counts over the group; does not wait for the device.
        """

    def preprocess_counted(
        self,
        routing: Routing,
        arriving: Tensor,  # noqa: ARG002
    ) -> DispatchPlan:
        """Prepare as `preprocess`, with counts that the caller can compute.

        Default: the counts are exchanged, for dispatchers that drop copies or need other numbers.

        Args:
            routing: The choices; no copy exceeds the capacity.
            arriving: The copies that each member sends to each local expert, ``(G, L)`` int64.
        """
        return self.preprocess(routing)

    def read_splits(self, plan: DispatchPlan) -> RowSplits:
        """Read the numbers of rows to exchange: the only host sync of a dispatcher.

        Default: the numbers are fixed.

        Sync:
            Waits for the device where ``plan.rows_per_member`` is set; otherwise returns at once.
        """
        if plan.rows_per_member is not None:
            raise NotImplementedError(
                f"{type(self).__name__} plans with rows_per_member, so it must define read_splits"
            )
        return RowSplits()

    @abstractmethod
    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:
        """Start sending tokens to the ranks of their experts.

        Args:
            x_TH: Tokens of this rank, ``(T, H)``.
            plan: From ``preprocess``.
            splits: From ``read_splits``.
        """

    @abstractmethod
    def start_combine(self, rows: Tensor, arrived: ExpertRows, splits: RowSplits) -> PendingCombine:
        """Start sending the experts' results back.

        Args:
            rows: Results, in the order of ``arrived.rows``.
            arrived: Result of the dispatch.
            splits: From ``read_splits``.
        """

    def combine(self, rows: Tensor, arrived: ExpertRows, splits: RowSplits) -> Tensor:
        """Send the experts' results back, and wait for those of this rank's tokens.

        Returns:
            Rows, indexed by ``plan.row_map``.
        """
        return self.start_combine(rows, arrived, splits).finish()

    def _within_capacity(self, routing: Routing) -> Tensor:
        """Return the expert of each copy, ``(T, k)``; -1 for a copy that exceeds the capacity."""
        if self.capacity is None:
            return routing.expert_ids
        num_experts = self.placement.num_experts
        return self.capacity.limit(
            routing.expert_ids,
            routing.probs,
            num_experts=num_experts,
            num_copies=routing.num_copies,
        )

    def postprocess(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Sum the results of each token.

        Args:
            rows: From ``combine``.
            plan: From ``preprocess``.

        Returns:
            ``(T, H)``.
        """
        return unpermute(rows, plan.row_map)


def balanced_rows(num_copies: int, placement: ExpertPlacement) -> tuple[list[int], list[int]]:
    """Return the rows sent to and received from each member if all experts are chosen equally.

    Args:
        num_copies: Copies of each member's tokens.
        placement: Placement of the experts.

    Example:
        >>> from megacore.parallel import ProcessGroups
        >>> balanced_rows(6, ExpertPlacement.of(ProcessGroups.single(), 8))
        ([6], [6])
    """
    each, rest = divmod(num_copies, placement.ep_size)
    of_position = [each + (position < rest) for position in range(placement.ep_size)]
    sent = [0] * placement.group.size
    for position, members in enumerate(placement.members):
        for member in members:
            sent[member] = of_position[position]
    return sent, [of_position[placement.ep_position]] * placement.group.size


def gather_counts(
    counts_E: Tensor, placement: ExpertPlacement, *, equal_tokens: int | None = None
) -> Tensor:
    """Gather the copies that each member sends to each local expert, ``(G, L)``, from ``(E,)``.

    Args:
        counts_E: Copies of this rank's tokens for each expert, int64.
        placement: Placement of the experts.
        equal_tokens: This rank's T, if all members must have the same T. On the CPU it is gathered
            with the counts and compared; on a GPU the comparison would require a host sync and is
            skipped.

    Raises:
        ValueError: On every member, if ``equal_tokens`` differ.
    """
    group = placement.group
    if group.size == 1 or counts_E.device.type != "cpu":
        equal_tokens = None
    if equal_tokens is not None:
        counts_E = torch.cat((counts_E, counts_E.new_full((1,), equal_tokens)))
    counts_GE = counts_E.new_empty(group.size * counts_E.shape[0])
    all_gather(counts_GE, counts_E, group)
    local = counts_GE.view(group.size, -1)
    if equal_tokens is not None:
        require_equal_tokens(local[:, -1].contiguous(), group, dispatcher="static")
    return local[:, placement.first_local : placement.first_local + placement.num_local]


def require_equal_tokens(tokens_G: Tensor, group: Group, *, dispatcher: str) -> None:
    """Raise an error if members have unequal numbers of tokens.

    Args:
        tokens_G: Number of tokens of each member, ``(G,)`` int64, contiguous, on the CPU.
        group: The members.
        dispatcher: Name of the dispatcher that requires equal numbers.

    Raises:
        ValueError: If the numbers differ, with the ranks.
    """
    # Read through the pointer like a kernel: a graph could not record a torch operation here.
    numbers = (ctypes.c_int64 * group.size).from_address(tokens_G.data_ptr())
    ranks_of: dict[int, list[int]] = {}
    for rank, number in zip(group.ranks, numbers, strict=True):
        ranks_of.setdefault(number, []).append(rank)
    if len(ranks_of) == 1:
        return
    found = "; ".join(f"{number} on {_ranks(ranks_of[number])}" for number in sorted(ranks_of))
    raise ValueError(
        f"group {group.name}: unequal numbers of tokens in one call: {found}. The {dispatcher} "
        "dispatcher needs equally many on all ranks that share experts: pad to "
        f"{max(ranks_of)}, or use alltoall"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@cache
def constant(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Convert host numbers to an int64 tensor; cached, as a captured region cannot create it."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def rows_of_copies(
    row_Tk: Tensor, expert_ids_Tk: Tensor, first_row_G: Tensor, placement: ExpertPlacement
) -> Tensor:
    """Build the row map of copies that are sent to all members that share their expert.

    Args:
        row_Tk: Index of each copy among the copies for the ep position of its expert; -1: not
            sent.
        expert_ids_Tk: Expert of each copy; arbitrary for copies that are not sent.
        first_row_G: First row for each member.
        placement: Placement of the experts.

    Returns:
        ``(T, k * etp)``, int64.
    """
    members = constant(placement.members, expert_ids_Tk.device)
    ep_Tk = expert_ids_Tk.clamp(min=0) // placement.num_local
    rows = first_row_G[members[ep_Tk]] + row_Tk[..., None]
    return rows.masked_fill((row_Tk < 0)[..., None], -1).flatten(1)
