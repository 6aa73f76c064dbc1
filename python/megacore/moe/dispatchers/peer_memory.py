"""Peer memory of a group, which every member can write and read.

Rows are exchanged by one-sided access instead of collectives: a member *pushes* its rows into the
buffers of others and sets a flag, or publishes its rows for the others to *pull*. Push and pull are
each other's gradient. Row positions follow from counts that the members exchange first
(``cpp/include/megacore/moe/peer_rows.h``).

Shapes: T tokens of this rank, k experts per token, E experts, L experts of this rank, G members of
the group, C rows of a member's receive buffer, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from megacore._core import PEER_SLOTS, PeerLayout
from megacore.moe.dispatchers.base import ExpertPlacement
from megacore.parallel.interleave import turn_index
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerPlan:
    """Row assignment of a member, computed from the counts of all members.

    Attributes:
        rows: Where this rank's copies go, as in `CopyMap`.
        kept: Copies of this rank that have a row, ``(E,)`` int64.
        m_splits: Rows received for each local expert, ``(L,)`` int64.
        totals: Rows received; copies of this rank that are not sent; of them those for lack of
            room, ``(3,)`` int64.
    """

    rows: Tensor
    kept: Tensor
    m_splits: Tensor
    totals: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyMap:
    """Locations of the copies of this rank's tokens.

    Attributes:
        rows: ``(T, k * r)`` int64, where ``r`` members share an expert, and each gets a copy: -1
            for a copy that is not sent; ``a``, its row's address ``member * C + row``, for a copy
            that travels; ``-2 - a`` for a copy whose row is that of an earlier copy of the token on
            the same member.
        num_choices: k.
        capacity: C.
        num_arrived: Rows that this member receives, int64 scalar.
    """

    rows: Tensor
    num_choices: int
    capacity: int
    num_arrived: Tensor

    @property
    def repeats(self) -> int:
        """Number of members that share an expert."""
        return self.rows.shape[1] // self.num_choices if self.num_choices else 1


class Peers(ABC):
    """Peer memory of a group of at least two members, shared by all layers of a model.

    Members call all methods in the same order, with tensors of the same shapes. At most
    ``PEER_SLOTS`` row exchanges are in flight at a time.

    Args:
        group: The members.
        row_bytes: Size of the largest row, if known; avoids growing the buffers later.

    Attributes:
        group: The members.
    """

    def __init__(self, group: Group, *, row_bytes: int = 0) -> None:
        self.group = group
        self._row_bytes = row_bytes
        # Pulls that are reserved and not started, by the turn index of their microbatch.
        self._reserved: dict[int, PendingPull] = {}

    @abstractmethod
    def plan_copies(self, ids_Tk: Tensor, placement: ExpertPlacement, capacity: int) -> PeerPlan:
        """Exchange the copies per expert with all members, and assign rows.

        Args:
            ids_Tk: Expert of each copy, ``(T, k)`` int64; -1 for a copy that is not sent.
            placement: Placement of the experts.
            capacity: C.
        """

    @abstractmethod
    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None, copies: CopyMap) -> PendingTransfer:
        """Start pushing tokens, and a number per copy, to the members of their experts."""

    @abstractmethod
    def finish_push(
        self, ticket: PendingTransfer, rows_CH: Tensor, probs_C: Tensor | None, copies: CopyMap
    ) -> None:
        """Wait for pushed rows and copy them to ``rows_CH``; the others are not written."""

    @abstractmethod
    def reserve_pull(self, copies: CopyMap, like: Tensor) -> PendingPull:
        """Reserve a slot, and wait until all members have read its previous rows.

        Args:
            copies: Locations of the copies of this rank's tokens.
            like: A tensor with the width and dtype of the rows.
        """

    @abstractmethod
    def start_pull(
        self,
        pull: PendingPull,
        rows_CH: Tensor,
        probs_C: Tensor | None,
        x_TH: Tensor,
        probs_Tk: Tensor | None,
    ) -> None:
        """Publish rows, and a number per row, and start pulling those of this rank's tokens.

        Args:
            pull: From `reserve_pull`.
            rows_CH: Results of this rank's experts. If they are ``pull.rows``, nothing is copied.
            probs_C: Number per row, float32.
            x_TH: Receives the sum of each token's rows, in order of choices, by `finish_pull`.
            probs_Tk: Receives the number of each copy.
        """

    @abstractmethod
    def finish_pull(self, pull: PendingPull) -> None:
        """Wait for the sums of `start_pull`."""

    def _fitting_layout(
        self, old: PeerLayout | None, num_experts: int, capacity: int, row_bytes: int
    ) -> PeerLayout:
        """Return ``old`` if it has room for these sizes, else a layout that has room for both."""
        had = (0, 0, 0) if old is None else (old.max_experts, old.max_capacity, old.max_row_bytes)
        sizes = max(num_experts, had[0]), max(capacity, had[1]), max(row_bytes, had[2])
        if old is not None and sizes == had:
            return old
        return PeerLayout(
            num_members=self.group.size,
            max_experts=sizes[0],
            max_capacity=sizes[1],
            max_row_bytes=sizes[2],
        )

    def _keep_reserved(self, pull: PendingPull) -> PendingPull:
        self._reserved[turn_index()] = pull
        return pull

    def _starts_reserved(self, pull: PendingPull) -> None:
        reserved = self._reserved.pop(turn_index(), None)
        assert reserved is pull, "nothing is exchanged between a reservation and its start"

    def _abandon_reserved(self) -> None:
        """Free the slot of a pull that was not started, before the microbatch's next exchange.

        The second run of a recomputed function ends after its last saved tensor, which may be
        between a product that writes to a slot and the pull. A pull of nothing then keeps others
        from writing to the slot before this rank's product has.
        """
        pull = self._reserved.get(turn_index())
        if pull is not None:
            pull.copies = replace(pull.copies, rows=pull.copies.rows[:0])
            self.start_pull(pull, pull.rows, None, pull.rows[:0], None)
            self.finish_pull(pull)

    @abstractmethod
    def forget_exchanges(self) -> None:
        """Free all slots after all members have aborted the same capture.

        Exchanges that a capture started and did not finish never ran, but occupy slots, possibly
        different slots on each member.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise an error if waiting for a peer timed out.

        Raises:
            PeerLostError: With the rank of the peer.

        Sync:
            Waits for a GPU, whose kernels cannot raise errors themselves.
        """


class Slots:
    """Free list of the slots of one memory. All members take and free slots in the same order.

    Example:
        >>> slots = Slots()
        >>> first, second = slots.take(), slots.take()
        >>> slots.free(second)
        >>> first, second, slots.take()
        (0, 1, 1)
    """

    def __init__(self) -> None:
        self.free_all()

    def take(self) -> int:
        """Take the least recently used free slot.

        Raises:
            RuntimeError: If no slot is free.
        """
        if not self._free:
            raise RuntimeError(
                f"more than {PEER_SLOTS} exchanges of rows are under way in one group; finish one "
                "first, or set moe.static_transport = collective"
            )
        return self._free.pop(0)

    def free(self, slot: int) -> None:
        """Mark a slot as free."""
        self._free.append(slot)

    @property
    def any_taken(self) -> bool:
        """Return whether an exchange is in flight."""
        return len(self._free) < PEER_SLOTS

    def free_all(self) -> None:
        """Free all slots and restore the initial order."""
        self._free = list(range(PEER_SLOTS))


class PendingTransfer:
    """Row exchange in flight.

    Args:
        memory: Memory of the exchange, referenced until the exchange is finished.
        slots: The slots of that memory.
    """

    def __init__(self, memory: object, slots: Slots) -> None:
        self.memory = memory
        self.slot = slots.take()
        self._slots = slots

    def finish(self) -> None:
        """Free the slot."""
        self._slots.free(self.slot)


class PendingPull(PendingTransfer):
    """Pull for which a slot is reserved.

    Args:
        memory: As of `PendingTransfer`.
        slots: The slots of that memory.
        copies: Locations of the copies of this rank's tokens.

    Attributes:
        copies: As given.
        rows: This rank's rows in the slot, ``(C, H)``: memory that others read once the pull has
            started. The product that computes the rows may write them there.
    """

    rows: Tensor

    def __init__(self, memory: object, slots: Slots, copies: CopyMap) -> None:
        super().__init__(memory, slots)
        self.copies = copies

    def holds(self, rows_CH: Tensor) -> bool:
        """Return whether these rows are in the slot."""
        return rows_CH.data_ptr() == self.rows.data_ptr()


def no_peers(note: str) -> str:
    """Error message for a group without access to peer memory."""
    return (
        "moe.static_transport = peer needs ranks that reach each other's memory, but here is "
        f"{note}; set it to auto or collective, and capture no clones (graphs.mode)"
    )


def row_bytes_of(rows: Tensor) -> int:
    """Return the size of a row of a matrix."""
    return rows.shape[1] * rows.element_size()
