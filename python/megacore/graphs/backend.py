"""How a captured function is recorded and played again.

``cuda`` records real CUDA graphs. ``emulated`` runs anywhere: it calls the captured function again,
on the static tensors, and writes the results to the addresses of the first ones. It also fills
every static tensor that a plan has released with NaN, so that a reuse too early shows in the loss.
An emulated replay runs Python again; to notice a Python number that a real capture would have
frozen, it compares what the function does with what it did at its capture.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from megacore.graphs.observe import Recording

Results = Sequence[Tensor | None]


class CapturedGraph(ABC):
    """A recorded function without arguments.

    Attributes:
        results: Its results; each replay writes them to the same addresses.
    """

    results: tuple[Tensor | None, ...]

    @abstractmethod
    def replay(self) -> None:
        """Run it again on what lies in its static inputs. Does not wait for the device."""

    @abstractmethod
    def reset(self) -> None:
        """Give up the recording and its memory; it cannot be replayed any more."""


class GraphBackend(ABC):
    """Records functions.

    Attributes:
        name: What users write.
        poisons: Whether released static tensors are to be filled with NaN.
    """

    name: str
    poisons: bool

    @abstractmethod
    def capture(self, function: Callable[[], Results]) -> CapturedGraph:
        """Run a function once and record it."""

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Surrounds the runs before a capture."""
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Surrounds all captures of a plan."""
        yield


def graph_backend(name: str | None = None, *, device: torch.device | str) -> GraphBackend:
    """The backend of a name, or the right one for a device: ``cuda`` on CUDA, else ``emulated``.

    Raises:
        ValueError: If the name is unknown or the device has no such graphs.
    """
    device = torch.device(device)
    if name is None:
        name = "cuda" if device.type == "cuda" else "emulated"
    if name == "emulated":
        return EmulatedBackend()
    if name == "cuda":
        if device.type != "cuda":
            raise ValueError(
                f'graph backend "cuda" needs tensors on a CUDA device, not on {device}'
            )
        return CudaBackend(device)
    raise ValueError(f'graph backend "{name}" is unknown; the backends are cuda, emulated')


class EmulatedBackend(GraphBackend):
    """Calls the function again at each replay.

    Args:
        poisons: Fill static tensors that the plan has released with NaN.
        checks: Refuse what a real graph could not record, and compare each replay to the capture,
            operation by operation.
    """

    name = "emulated"

    def __init__(self, *, poisons: bool = True, checks: bool = True) -> None:
        self.poisons = poisons
        self._checks = checks

    def capture(self, function: Callable[[], Results]) -> CapturedGraph:
        """Run the function once and keep it."""
        return _EmulatedGraph(function, Recording() if self._checks else None)


class _EmulatedGraph(CapturedGraph):
    def __init__(self, function: Callable[[], Results], recording: Recording | None) -> None:
        self._function: Callable[[], Results] | None = function
        self._recording = recording
        with nullcontext() if recording is None else recording.capture():
            found = function()
        # Copies: the function may return one of its inputs, which has its own address.
        self.results = tuple(None if r is None else r.detach().clone() for r in found)
        self._addresses = [None if r is None else r.data_ptr() for r in self.results]

    @torch.no_grad()
    def replay(self) -> None:
        if self._function is None:
            raise RuntimeError("the graph was reset and cannot be replayed")
        recording = self._recording
        with torch.enable_grad(), nullcontext() if recording is None else recording.replay():
            found = self._function()
        for number, (static, result) in enumerate(zip(self.results, found, strict=True)):
            if (static is None) != (result is None):
                raise RuntimeError(
                    f"result {number} of a captured function is sometimes None; a graph always "
                    "does the same"
                )
            if static is None or result is None:
                continue
            if static.data_ptr() != self._addresses[number]:
                raise RuntimeError(f"static result {number} has moved to another address")
            if static.shape != result.shape or static.dtype != result.dtype:
                raise RuntimeError(
                    f"result {number} of a captured function was {list(static.shape)} "
                    f"{static.dtype} and is now {list(result.shape)} {result.dtype}; a graph "
                    "always does the same"
                )
            static.copy_(result)

    def reset(self) -> None:
        self._function = None
        self.results = ()


class CudaBackend(GraphBackend):
    """Real CUDA graphs, all in one memory pool, recorded on one side stream.

    Args:
        device: The CUDA device.
        pool: A pool to share with other captures, from ``torch.cuda.graph_pool_handle()``.
        generators: Random generators besides the default one that captured code draws from.
    """

    name = "cuda"
    poisons = False

    def __init__(
        self,
        device: torch.device,
        *,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._generators = list(generators)

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Run on the side stream; waits for the device before and after."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record on the side stream, without garbage collection."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        _clear_workspaces()
        torch.cuda.empty_cache()
        # A graph that the collector destroys while another one is recorded breaks the recording.
        was_enabled = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if was_enabled:
                gc.enable()
            _clear_workspaces()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, function: Callable[[], Results]) -> CapturedGraph:
        """Record the function's kernels."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = tuple(function())
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
        return _CudaGraph(graph, results)


def _clear_workspaces() -> None:
    """Let go of cuBLAS's workspaces, which it keeps for every stream it has ever run on.

    Those of a capture then lie in the pool of its graphs and go when the graphs go.
    """
    torch._C._cuda_clearCublasWorkspaces()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a recording that failed; the error that is under way says why."""
    with suppress(RuntimeError):
        graph.capture_end()
    graph.reset()


class _CudaGraph(CapturedGraph):
    def __init__(self, graph: torch.cuda.CUDAGraph, results: tuple[Tensor | None, ...]) -> None:
        self._graph = graph
        self.results = results

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self.results = ()
        self._graph.reset()
