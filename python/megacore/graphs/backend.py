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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from megacore.graphs.observe import Recording
from megacore.graphs.tensors import TensorSpec, copy_of, overwrite, weak_tensor

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

    def disown(self, first: int = 0) -> None:
        """Results from ``first`` on are read no more when later graphs run: give up their memory.

        Later captures may take it. Replays must then come in the order of the captures. Where
        every graph has memory of its own, nothing happens.
        """
        del first


class GraphBackend(ABC):
    """Records functions.

    Attributes:
        name: What users write.
        poisons: Whether released static tensors are to be filled with NaN.
        computes: Whether a capture runs what it records, messages to other ranks included.
        generators: Random generators, besides the default one, that captured code draws from.
    """

    name: str
    poisons: bool
    computes: bool
    generators: Sequence[torch.Generator] = ()

    @abstractmethod
    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        """Run a function once and record it.

        Args:
            function: What to record.
            apart: Graphs of different values share no memory, so they may be replayed in any order.
                Those of one value are replayed in the order of their captures.
        """

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Surrounds the runs before a capture."""
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Surrounds all captures of a plan."""
        yield

    @contextmanager
    def replaying(self, stream: Any = None, event: Any = None) -> Iterator[None]:
        """Surrounds a replay.

        Args:
            stream: Where to replay. Default: the current stream.
            event: An external event recorded inside the graph. The current stream waits for it
                then, instead of for the whole replay.

        Raises:
            ValueError: If there are no streams.
        """
        if stream is not None or event is not None:
            raise ValueError(
                f"the {self.name} backend replays at once, on no stream; leave out "
                "cuda_graph_stream and cuda_graph_event, or take the cuda backend"
            )
        yield


def graph_backend(
    name: str | None = None,
    *,
    device: torch.device | str,
    pool: Any = None,
    generators: Sequence[torch.Generator] = (),
) -> GraphBackend:
    """The backend of a name, or the right one for a device: ``cuda`` on CUDA, else ``emulated``.

    Args:
        name: ``"cuda"`` or ``"emulated"``.
        device: Where the captured code computes.
        pool: See :class:`CudaBackend`.
        generators: See :class:`CudaBackend`.

    Raises:
        ValueError: If the name is unknown, or the device has no such graphs.
    """
    device = torch.device(device)
    if name is None:
        name = "cuda" if device.type == "cuda" else "emulated"
    if name == "emulated":
        if pool is not None:
            raise ValueError("the emulated backend has no memory pool to share; leave out pool")
        return EmulatedBackend()
    if name == "cuda":
        if device.type != "cuda":
            raise ValueError(
                f'graph backend "cuda" needs tensors on a CUDA device, not on {device}'
            )
        return CudaBackend(device, pool=pool, generators=generators)
    raise ValueError(
        f'graph backend "{name}" is unknown; the backends are cuda, emulated and, for captures of '
        "modules, transformer_engine"
    )


class EmulatedBackend(GraphBackend):
    """Calls the function again at each replay.

    Args:
        poisons: Fill static tensors that the plan has released with NaN.
        checks: Refuse what a real graph could not record, and compare each replay to the capture,
            operation by operation.
    """

    name = "emulated"
    computes = True

    def __init__(self, *, poisons: bool = True, checks: bool = True) -> None:
        self.poisons = poisons
        self._checks = checks

    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        """Run the function once and keep it."""
        del apart  # temporary tensors of an emulated replay are its own
        return _EmulatedGraph(function, Recording() if self._checks else None)


class _EmulatedGraph(CapturedGraph):
    def __init__(self, function: Callable[[], Results], recording: Recording | None) -> None:
        self._function: Callable[[], Results] | None = function
        self._recording = recording
        with nullcontext() if recording is None else recording.capture():
            found = function()
        # Copies: the function may return one of its inputs, which has its own address.
        self.results = tuple(None if r is None else copy_of(r) for r in found)
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
            if difference := TensorSpec.of(result.detach()).difference(TensorSpec.of(static)):
                raise RuntimeError(
                    f"result {number} of a captured function has another form than at its capture: "
                    f"{difference}; a graph always does the same"
                )
            overwrite(static, result)

    def reset(self) -> None:
        self._function = None
        self.results = ()


class CudaBackend(GraphBackend):
    """Real CUDA graphs, recorded on one side stream.

    Args:
        device: The CUDA device.
        pool: A pool to share with other captures, from ``torch.cuda.graph_pool_handle()``.
        generators: Random generators besides the default one that captured code draws from.
    """

    name = "cuda"
    poisons = False
    computes = False

    def __init__(
        self,
        device: torch.device,
        *,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._device = device
        self._given = pool
        self._pools: dict[Hashable, Any] = {}
        self._family = _Family()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.generators = list(generators)

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

    @contextmanager
    def replaying(self, stream: Any = None, event: Any = None) -> Iterator[None]:
        """Replay on another stream, between what the current one has done and does next."""
        current = torch.cuda.current_stream(self._device)
        if stream is None or stream == current:
            yield
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        if event is not None:
            current.wait_event(event)
        else:
            current.wait_stream(stream)

    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        """Record the function's kernels.

        Raises:
            ValueError: If graphs that share no memory are to share the pool that was given.
        """
        pool = self._pools.setdefault(apart, self._given)
        if pool is None:
            pool = self._pools[apart] = torch.cuda.graph_pool_handle()
        elif self._given is not None and len(self._pools) > 1:
            raise ValueError(
                "graphs that microbatches share need memory apart from each other, but one pool "
                'was given; leave out pool, or set reuse = "buffers"'
            )
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            results = tuple(function())
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
        return _CudaGraph(graph, results, self._family)


def _weak(tensor: Tensor) -> Tensor:
    with suppress(ValueError):  # dtypes that have no such form stay as they are
        return weak_tensor(tensor)
    return tensor


def _clear_workspaces() -> None:
    """Let go of cuBLAS's workspaces, of which it keeps one for each handle and stream.

    Cleared before a capture, the side stream gets a new one at the first matrix product: in the
    pool of that graph, since every tensor made on a capturing stream lies there. All graphs of the
    capture use it. Cleared after the capture, torch forgets it; nobody else gets its memory as long
    as the pool has graphs, and with the last of them it goes back (see `_Family`). Without the
    second call torch would keep the workspace, and with it the pool, for each capture anew.
    """
    torch._C._cuda_clearCublasWorkspaces()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a recording that failed; the error that is under way says why."""
    with suppress(RuntimeError):
        graph.capture_end()
    graph.reset()


class _Family:
    """The graphs of one backend, whose memory goes together: they share cuBLAS's workspace."""

    def __init__(self) -> None:
        self._num_open = 0
        self._closed: list[torch.cuda.CUDAGraph] = []

    def join(self) -> None:
        self._num_open += 1

    def leave(self, graph: torch.cuda.CUDAGraph) -> None:
        self._num_open -= 1
        self._closed.append(graph)
        if self._num_open == 0:
            while self._closed:
                self._closed.pop().reset()


class _CudaGraph(CapturedGraph):
    def __init__(
        self, graph: torch.cuda.CUDAGraph, results: tuple[Tensor | None, ...], family: _Family
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._family = family
        self.results = results
        family.join()

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("the graph was reset and cannot be replayed")
        self._graph.replay()

    def disown(self, first: int = 0) -> None:
        # The pool keeps the memory at its address; views of it must not keep it from other graphs.
        weak = [None if r is None else _weak(r) for r in self.results[first:]]
        self.results = (*self.results[:first], *weak)

    def reset(self) -> None:
        self.results = ()
        if self._graph is not None:
            graph, self._graph = self._graph, None
            self._family.leave(graph)
