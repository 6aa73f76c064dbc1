"""One CUDA graph for all passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megacore.graphs.backend import CapturedGraph, GraphBackend, Results
from megacore.graphs.errors import ReplayError, capture_error
from megacore.graphs.static_tensors import TensorSpec, check_input

StepFunction = Callable[[Sequence[Tensor]], Results]


class FullIterationGraph:
    """Graph of a function of a step's inputs, recorded once and replayed on new inputs.

    Inputs are copied into static tensors, on a CUDA device by a separate stream. Python code of
    the function runs at the capture only.

    Args:
        name: Name in messages.
        function: Maps the static inputs to tensors, such as loss sums.
        sample: Tensors with the form of the inputs of every call.
        backend: Backend that records the graph.

    Raises:
        CaptureError: If the function cannot be recorded; the message has the line.

    Example:
        >>> from megacore.graphs import EmulatedBackend
        >>> graph = FullIterationGraph(
        ...     "square", lambda inputs: [inputs[0] ** 2], [torch.zeros(2)],
        ...     backend=EmulatedBackend(),
        ... )
        >>> graph([torch.tensor([2.0, 3.0])])[0].tolist()
        [4.0, 9.0]
    """

    def __init__(
        self,
        name: str,
        function: StepFunction,
        sample: Sequence[Tensor],
        *,
        backend: GraphBackend,
    ) -> None:
        self._name = name
        self._backend = backend
        self._specs = [TensorSpec.of(tensor) for tensor in sample]
        self._inputs = [spec.empty() for spec in self._specs]
        device = self._inputs[0].device if self._inputs else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._load(sample)
        self._graph: CapturedGraph | None = None
        at = "warmup"
        try:
            with backend.warmup():
                function(self._inputs)
            at = "capture"
            with backend.capturing():
                self._graph = backend.capture(lambda: function(self._inputs))
        except Exception as error:
            computes = at == "warmup" or backend.computes
            raise capture_error(f"the {at} of {name}", error, computes=computes) from error

    def __call__(self, inputs: Sequence[Tensor]) -> Results:
        """Replay on these inputs.

        Returns:
            The results, at the same addresses for every call and valid until the next call.

        Raises:
            ReplayError: If an input differs in form from that of the capture.
        """
        if self._graph is None:
            raise ReplayError(f"the graph of {self._name} was reset; capture again")
        self._load(inputs)
        self._graph.replay()
        if self._backend.poisons:
            for tensor in self._inputs:
                _poison(tensor)
        return self._graph.results

    def static_bytes(self) -> dict[str, int]:
        """Return the bytes of static tensors by their use."""
        results = self._graph.results if self._graph is not None else ()
        return {
            "static_inputs": sum(spec.num_bytes for spec in self._specs),
            "output_grads": 0,
            "results": sum(r.nbytes for r in results if r is not None),
        }

    def reset(self) -> None:
        """Release the graph and its memory."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._inputs = None, []

    def _load(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self._specs):
            raise ReplayError(
                f"{self._name} was captured with {len(self._specs)} inputs, now there are "
                f"{len(inputs)}"
            )
        for number, (given, spec) in enumerate(zip(inputs, self._specs, strict=True)):
            check_input(self._name, number, given, spec)
        with self._beside(), torch.no_grad():
            for static, given in zip(self._inputs, inputs, strict=True):
                static.copy_(given, non_blocking=True)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run copies on a separate stream, after the last replay and before the next one."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@torch.no_grad()
def _poison(tensor: Tensor) -> None:
    """Fill a consumed static input with NaN, or with the smallest integer."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
