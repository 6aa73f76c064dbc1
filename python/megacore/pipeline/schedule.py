"""A pipeline schedule: validated, lowered to programs, simulated, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacore import _core
from megacore._core import Action, LowerBound, Program
from megacore.pipeline.auto import Certificate
from megacore.pipeline.lowering import Lowering, Receives, Recompute, native_options
from megacore.pipeline.timeline import Costs, Timeline, entries

_DEFAULT_COSTS = Costs()
_DEFAULT_LOWERING = Lowering()


class Schedule:
    """Compute actions of every pipeline rank, in order. Immutable and always valid.

    Create a schedule with ``build_schedule``, ``from_text`` or ``from_csv``. Schedules are equal if
    every rank runs the same actions in the same order, regardless of names.
    """

    def __init__(self, native: _core.Schedule, certificate: Certificate | None = None) -> None:
        native.validate()
        self._native = native
        self._certificate = certificate
        self._proved: set[Lowering] = set()  # of which the programs of all ranks are proved

    @property
    def name(self) -> str:
        """Name of the generator, or of the file it was read from."""
        return self._native.name

    @property
    def certificate(self) -> Certificate | None:
        """Proved properties of an ``auto`` schedule; None for others and for pickled copies."""
        return self._certificate

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self._native.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self._native.num_stages

    @property
    def num_chunks(self) -> int:
        """Largest number of stages on one rank."""
        return self._native.num_chunks

    @property
    def num_chains(self) -> int:
        """Copies of the model through which different microbatches flow: 2 for DualPipe, else 1."""
        return self._native.num_chains

    @property
    def num_microbatches(self) -> int:
        """Microbatches per optimizer step."""
        return self._native.num_microbatches

    @property
    def is_forward_only(self) -> bool:
        """True if the schedule has no backward actions, for evaluation."""
        return self._native.is_forward_only

    def digest(self) -> int:
        """Return a hash of stages and actions of all ranks, equal for equal schedules."""
        return self._native.digest()

    def stages(self, rank: int) -> list[int]:
        """Return the stages of a rank, in chunk order."""
        return self._native.stages(rank)

    def actions(self, rank: int) -> list[Action]:
        """Return the compute actions of a rank in execution order."""
        return self._native.actions(rank)

    def overlaps(self, rank: int) -> list[int]:
        """Return the positions of a rank's forwards that overlap with the action after them.

        Source: DualPipe, arXiv:2412.19437.
        """
        return self._native.overlaps(rank)

    def order(self, rank: int) -> list[int]:
        """Return the order list of a rank.

        ``+(chunk + 1)`` stands for a forward and ``-(chunk + 1)`` for a backward (of a split one,
        its I).

        Source: the list that CUDA-graph capture of Megatron-LM and TransformerEngine uses.
        """
        return self._native.order(rank)

    def validate(self, *, memory_limit: int | Sequence[int] | None = None) -> None:
        """Prove again that the schedule is complete and free of deadlock, and that it fits.

        Args:
            memory_limit: Activations that a rank may hold, one number for all ranks or one per
                rank.

        Raises:
            ValueError: If a rank holds more. The rest holds for every schedule that exists.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> build_schedule("gpipe", num_ranks=2, num_microbatches=4).validate(memory_limit=4)
        """
        self._native.validate()
        if memory_limit is not None:
            self._native.validate_memory(entries(memory_limit))

    def forward_only(self) -> Schedule:
        """Return all forwards without backwards, in an order of their own, for evaluation.

        The order depends on placement and number of microbatches alone: that of training waits
        for backwards. With equal stages in a loop, a V or two chains none is faster.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> schedule = build_schedule("v_min", num_ranks=4, num_microbatches=8)
            >>> schedule.forward_only().simulate().makespan
            22.0
        """
        return Schedule(self._native.forward_only())

    def program(
        self, rank: int, *, receives: Receives = "ahead", recompute: Recompute | None = None
    ) -> Program:
        """Return the program of one rank: its actions, with sends and receives.

        The first call proves the programs of all ranks together, but makes them one by one and
        keeps only that of ``rank``.

        Args:
            rank: Pipeline rank.
            receives: ``"ahead"`` posts a receive before the compute action that precedes its
                reader, so that transfer and compute overlap; the transport needs a queue of its own
                per ordered pair of ranks, as gloo has. ``"in_order"`` lets all transfers follow one
                global order, which is safe on any transport; NCCL needs it.
            recompute: Adds RECOMPUTE for the activations that are not kept.

        Raises:
            ValueError: If there is no such rank, or an option is out of range.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        lowering = Lowering(receives=receives, recompute=recompute)
        program = _core.lower_rank(
            self._native, rank, **native_options(lowering), prove=lowering not in self._proved
        )
        self._proved.add(lowering)
        return program

    def programs_from(self, rows: Sequence[Sequence[Action | str]]) -> list[Program]:
        """Take over the programs that another lowering made for these stages, and prove them.

        Args:
            rows: Per rank, its actions with sends and receives in execution order; an action may be
                its text, ``"1RECV_F0"``.

        Returns:
            The programs of all ranks.

        Raises:
            ValueError: If they cannot be executed: an action is missing, repeated or out of place,
                ranks wait for each other, or a channel is not received in the order of sending. The
                message names rank, position and action.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=1)
            >>> first = ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
            >>> last = ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]
            >>> [program.peers for program in schedule.programs_from([first, last])]
            [[-1, 1, 1, -1], [0, -1, -1, 0]]
        """
        actions = [[Action.parse(a) if isinstance(a, str) else a for a in row] for row in rows]
        programs = _core.programs_from_actions(self._native, actions)
        _core.validate_programs(programs)
        return programs

    def lower(self, lowering: Lowering = _DEFAULT_LOWERING) -> list[Program]:
        """Return and prove the programs of all ranks; as ``program``, with more options.

        Args:
            lowering: Where receives stand, and whether activations are recomputed.

        Raises:
            ValueError: If an option is out of range.

        Example:
            >>> from megacore.pipeline import Recompute, build_schedule
            >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
            >>> schedule.lower(Lowering(recompute=Recompute(keep=1)))[0].to_text()
            '0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0RECOMPUTE1 0B1'
        """
        programs = _core.lower(self._native, **native_options(lowering))
        _core.validate_programs(programs)
        return programs

    def simulate(self, costs: Costs = _DEFAULT_COSTS) -> Timeline:
        """Run the schedule on paper: every action as early as its inputs and its rank allow.

        Args:
            costs: Times of the actions; by default F = I = W = 1, B = 2, and messages are free.

        Raises:
            ValueError: If a cost is negative or their number does not fit the stages.
        """
        times = self._native.simulate(
            forward=entries(costs.forward),
            backward_input=entries(costs.backward_input),
            backward_weight=entries(costs.backward_weight),
            send=costs.send,
            overlap=costs.overlap,
        )
        return Timeline(self._native, times)

    def lower_bound(
        self,
        costs: Costs = _DEFAULT_COSTS,
        *,
        memory_limit: int | Sequence[int] | None = None,
    ) -> LowerBound:
        """Return a makespan that no schedule beats, whatever its order of actions.

        The bound is for the same placement, microbatches and kind of backward (whole, or split in
        I and W).

        Args:
            costs: Times of the actions; ``overlap`` must be 0.
            memory_limit: Activations that a rank may hold, one number for all ranks or one per
                rank. Default: the peak of the ranks of this schedule.

        Returns:
            The bound: ``value``, ``reason`` (its name), ``explanation`` (a sentence) and
            ``by_reason`` (the values of all bounds).

        Raises:
            ValueError: If costs or limits make no sense, or the schedule is forward-only.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> schedule = build_schedule("zb_v", num_ranks=4, num_microbatches=8)
            >>> schedule.simulate().makespan, schedule.lower_bound().value
            (51.0, 51.0)
        """
        limits = None if memory_limit is None else entries(memory_limit)
        if costs.overlap != 0:
            raise ValueError(f"overlap is {costs.overlap}; the bounds hold without overlap only")
        return _core.lower_bound(
            self._native,
            forward=entries(costs.forward),
            backward_input=entries(costs.backward_input),
            backward_weight=entries(costs.backward_weight),
            send=costs.send,
            memory_limit=limits,
        )

    def to_text(self, *, grid: bool = False, costs: Costs = _DEFAULT_COSTS) -> str:
        """Return the schedule as text.

        Args:
            grid: Align the actions in time instead of listing them; not readable by ``from_text``.
            costs: Times for the grid.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> print(build_schedule("gpipe", num_ranks=1, num_microbatches=2).to_text(), end="")
            #megacore v1 name=gpipe num_ranks=1 num_stages=1 num_microbatches=2
            rank 0: 0F0 0F1 0B0 0B1
        """
        return self.simulate(costs).to_text() if grid else self._native.to_text()

    @staticmethod
    def from_text(text: str) -> Schedule:
        """Read what ``to_text`` wrote. The first line is optional.

        Raises:
            ValueError: If the text cannot be read or the schedule is not valid.
        """
        return Schedule(_core.Schedule.from_text(text))

    def to_csv(self, path: str | Path) -> None:
        """Write the compute actions in the CSV dialect of ``torch.distributed.pipelining``.

        Row i is rank i. Load the file there with ``format="compute_only"``.
        """
        Path(path).write_bytes(self._native.to_csv().encode())

    @staticmethod
    def from_csv(path: str | Path) -> Schedule:
        """Read a compute-only CSV file of ``torch.distributed.pipelining``.

        Which rank holds which stage follows from the rows, so any placement works. Empty cells are
        idle and do not matter.

        Raises:
            ValueError: If a cell is not an action (with row and column) or the schedule is not
                valid.
        """
        path = Path(path)
        try:
            text = path.read_bytes().decode("ascii")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not a schedule: it is not ASCII text") from None
        try:
            return Schedule(_core.Schedule.from_csv(text, name="_".join(path.stem.split())))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def __eq__(self, other: object) -> bool:
        """Compare the actions of all ranks; names are ignored."""
        return isinstance(other, Schedule) and self._native == other._native

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as text."""
        return (Schedule.from_text, (self._native.to_text(),))

    def __repr__(self) -> str:
        """Name and sizes; ``to_text`` has the actions."""
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches>"
        )
