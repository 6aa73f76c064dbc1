"""Graphs of parts of a model's layers, for every microbatch of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megacore._core import ActionKind, Program
from megacore.graphs.backend import GraphBackend
from megacore.graphs.callables import capture_layers
from megacore.graphs.capture_plan import CapturePlan
from megacore.graphs.options import CaptureOptions, Kwargs, describe_layers
from megacore.graphs.replay import GraphedCallable
from megacore.graphs.transformer_engine import DelegatedCallable

PartCall = GraphedCallable | DelegatedCallable

_ENTRIES = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: -1.0,
    ActionKind.BACKWARD_INPUT: -1.0,
    ActionKind.BACKWARD_WEIGHT: -1.5,
}


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """The passes of one pipeline rank in a step, as a capture plan takes them.

    Attributes:
        order: The order list, see ``plan_capture``; chunks without captured parts are left out.
        chunks: The chunk of each number in the list.
        microbatches: The microbatches of each of these chunks, in the order of its passes.
    """

    order: tuple[float, ...]
    chunks: tuple[int, ...]
    microbatches: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, program: Program, *, has_parts: Sequence[bool]) -> StepOrder:
        """Return the order of a rank's program.

        Args:
            program: The program.
            has_parts: For each chunk whether a part of it is captured.

        Raises:
            ValueError: If a chunk runs its backward passes in another order than its forward
                passes, so that its microbatches cannot share graphs.

        Example:
            >>> from megacore.pipeline import build_schedule
            >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
            >>> StepOrder.of(schedule.program(1), has_parts=[True]).order
            (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
        """
        chunks = tuple(chunk for chunk, has in enumerate(has_parts) if has)
        numbers = {program.stages[chunk]: at + 1 for at, chunk in enumerate(chunks)}
        split = {a.stage for a in program.actions if a.kind == ActionKind.BACKWARD_WEIGHT}
        order: list[float] = []
        seen: dict[tuple[int, float], list[int]] = {}
        for action in program.actions:
            if action.kind not in _ENTRIES or action.stage not in numbers:
                continue
            number = numbers[action.stage]
            entries = [_ENTRIES[action.kind]]
            if action.kind == ActionKind.BACKWARD and action.stage in split:
                entries.append(-1.5)  # split graphs; both halves run in a row
            for entry in entries:
                order.append(number if entry > 0 else -number - (0.5 if entry == -1.5 else 0.0))
                seen.setdefault((number, entry), []).append(action.microbatch)
        for number in numbers.values():
            forward = seen[number, 1.0]
            for entry in (-1.0, -1.5):
                if seen.get((number, entry), forward) != forward:
                    raise ValueError(
                        f"stage {program.stages[chunks[number - 1]]} runs its backward passes in "
                        f"another order than its forward passes ({seen[number, entry]}, not "
                        f"{forward}); graphs need one order, so use another schedule"
                    )
        return cls(
            order=tuple(float(entry) for entry in order),
            chunks=chunks,
            microbatches=tuple(tuple(seen[number, 1.0]) for number in numbers.values()),
        )


class PartialGraphs:
    """Graphs of all captured parts of one rank.

    Args:
        parts: The parts of each chunk in layer order, as modules with tensor inputs and outputs;
            chunks without parts are empty.
        samples: Arguments of a call of each part: positional and keyword tensors.
        program: The rank's program of one step.
        backend: Backend that records the graphs.
        num_warmup_iters: Passes of each part before its capture.

    Raises:
        ValueError: If microbatches cannot share graphs in the order of the program.
        CaptureError: If a part cannot be captured; the message has the line. The previous state is
            restored, except for gradients that kernels added to buffers directly.

    Example:
        >>> import torch
        >>> from megacore.graphs import EmulatedBackend
        >>> from megacore.pipeline import build_schedule
        >>> part, x = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
        >>> graphs = PartialGraphs(
        ...     [[part]], [[((x,), {})]], backend=EmulatedBackend(),
        ...     program=build_schedule("1f1b", num_ranks=1, num_microbatches=8).program(0),
        ... )
        >>> torch.equal(graphs.call(0, 0, 5)(x), part(x)), graphs.num_graphs
        (True, 2)
    """

    def __init__(
        self,
        parts: Sequence[Sequence[nn.Module]],
        samples: Sequence[Sequence[tuple[tuple[Any, ...], Kwargs]]],
        *,
        program: Program,
        backend: GraphBackend,
        num_warmup_iters: int = 2,
    ) -> None:
        self._order = StepOrder.of(program, has_parts=[bool(chunk) for chunk in parts])
        self._per_chunk = [len(parts[chunk]) for chunk in self._order.chunks]
        modules = [part for chunk in parts for part in chunk]
        flat = [sample for chunk in samples for sample in chunk]
        args, kwargs = [args for args, _ in flat], [named for _, named in flat]
        layers = describe_layers(modules, args, kwargs, run_pre_hooks=True)
        options = CaptureOptions(
            num_warmup_iters=num_warmup_iters,
            # The hook of a gradient buffer accumulates a gradient and releases it at once.
            clone_param_grads_on_return=False,
        )
        self._made = capture_layers(
            modules,
            layers,
            args,
            kwargs,
            self._order.order,
            self._per_chunk,
            options=options,
            backend=backend,
        )
        self._calls = self._by_call(self._made.callables())

    def call(self, chunk: int, part: int, microbatch: int) -> PartCall:
        """Return the replacement callable of a part for one microbatch."""
        return self._calls[chunk, part, microbatch]

    def calls_of(self, chunk: int, part: int) -> dict[int, PartCall]:
        """Return the callables of a part by microbatch."""
        return {
            microbatch: call
            for (c, p, microbatch), call in self._calls.items()
            if (c, p) == (chunk, part)
        }

    @property
    def plan(self) -> CapturePlan:
        """Plan of the graphs and static tensors."""
        return self._made.plan

    @property
    def num_graphs(self) -> int:
        """Number of recorded graphs."""
        return len(self.plan.captures)

    def static_bytes(self) -> dict[str, int]:
        """Return the bytes of static tensors by their use."""
        return self._made.static_bytes()

    def reset(self) -> None:
        """Release all graphs and their memory."""
        self._calls.clear()
        self._made.reset()

    def _by_call(self, calls: Sequence[PartCall]) -> dict[tuple[int, int, int], PartCall]:
        found, rest = {}, iter(calls)
        for chunk, numbers, count in zip(
            self._order.chunks, self._order.microbatches, self._per_chunk, strict=True
        ):
            for microbatch in numbers:
                for part in range(count):
                    found[chunk, part, microbatch] = next(rest)
        return found
