"""Graph backends: recording and replay of a captured function.

``cuda`` records real CUDA graphs. ``emulated`` works on any device: a replay calls the captured
function again on the static tensors and writes its results to the static output addresses. After
their last use, static tensors are filled with NaN, so premature buffer reuse shows in the loss.
An emulated replay executes Python again. It compares the operations with those of the capture, to
detect Python numbers that a real graph would have frozen.
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
from megacore.graphs.static_tensors import TensorSpec, copy_of, overwrite, weak_tensor

Results = Sequence[Tensor | None]


class CapturedGraph(ABC):
    """A recorded function without arguments.

    Attributes:
        results: Results of the function; each replay writes them to the same addresses.
    """

    results: tuple[Tensor | None, ...]

    @abstractmethod
    def replay(self) -> None:
        """Replay on the current contents of the static inputs. Does not wait for the device."""

    @abstractmethod
    def reset(self) -> None:
        """Release the recording and its memory; the graph cannot be replayed afterwards."""

    def disown(self, first: int = 0) -> None:
        """Release the memory of results from index ``first`` on, which later graphs may overwrite.

        Later captures may reuse this memory. Replays must then follow the order of the captures. A
        no-op where every graph has its own memory.
        """
        del first


class GraphBackend(ABC):
    """Interface of graph backends.

    Attributes:
        name: Name in the configuration.
        poisons: Whether released static tensors are filled with NaN.
        computes: Whether a capture executes the recorded work, including messages to other ranks.
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
            function: The function to record.
            apart: Graphs with different values share no memory, so they may be replayed in any
                order. Graphs with the same value are replayed in the order of their captures.
        """

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """Context of the warmup runs before a capture."""
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of all captures of a plan."""
        yield

    @contextmanager
    def replaying(self, stream: Any = None, event: Any = None) -> Iterator[None]:
        """Context of a replay.

        Args:
            stream: Stream of the replay. Default: the current stream.
            event: An external event recorded inside the graph. The current stream waits for this
                event instead of the whole replay.

        Raises:
            ValueError: If the backend has no streams.
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
    """Return a backend by name; default: ``cuda`` on CUDA devices, else ``emulated``.

    Args:
        name: ``"cuda"`` or ``"emulated"``.
        device: Device of the captured code.
        pool: See :class:`CudaBackend`.
        generators: See :class:`CudaBackend`.

    Raises:
        ValueError: If the name is unknown or the device does not support the backend.
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
    """Backend that calls the function again at each replay.

    Args:
        poisons: Fill released static tensors with NaN.
        checks: Raise on operations that a real graph cannot record, and compare the operations of
            each replay with the capture.
    """

    name = "emulated"
    computes = True

    def __init__(self, *, poisons: bool = True, checks: bool = True) -> None:
        self.poisons = poisons
        self._checks = checks

    def capture(self, function: Callable[[], Results], *, apart: Hashable = None) -> CapturedGraph:
        """Run the function once and keep it for replays."""
        del apart  # an emulated replay allocates its own temporary tensors
        return _EmulatedGraph(function, Recording() if self._checks else None)


class _EmulatedGraph(CapturedGraph):
    def __init__(self, function: Callable[[], Results], recording: Recording | None) -> None:
        self._function: Callable[[], Results] | None = function
        self._recording = recording
        with nullcontext() if recording is None else recording.capture():
            found = function()
        # Copies, since the function may return an input, which already has a static address.
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
        """Run on the side stream. Sync: waits for the device before and after."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record on the side stream with garbage collection disabled."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        _clear_workspaces()
        torch.cuda.empty_cache()
        # A graph that the collector destroys during another capture breaks that capture.
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
        """Replay on another stream, between earlier and later work of the current stream."""
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
            ValueError: If one pool was given, but some graphs must not share memory.
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
    with suppress(ValueError):  # such tensors stay owners
        return weak_tensor(tensor)
    return tensor


def _clear_workspaces() -> None:
    """Release cuBLAS workspaces, of which cuBLAS keeps one per handle and stream.

    After a release before the capture, the first matrix product on the side stream allocates a new
    workspace in the pool of the graph, since every allocation on a capturing stream is taken from
    that pool. All graphs of the capture use this workspace. The release after the capture drops
    torch's reference; the memory stays reserved while the pool has graphs, and is freed with the
    last graph (see `_Family`). Without the second release, torch would keep one workspace, and
    with it one pool, per capture.
    """
    torch._C._cuda_clearCublasWorkspaces()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Discard a failed recording; the error in flight has the cause."""
    with suppress(RuntimeError):
        graph.capture_end()
    graph.reset()


class _Family:
    """Graphs of one backend, freed together because they share the cuBLAS workspace."""

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
        # The pool keeps the memory reserved; strong views would keep it from other graphs.
        weak = [None if r is None else _weak(r) for r in self.results[first:]]
        self.results = (*self.results[:first], *weak)

    def reset(self) -> None:
        self.results = ()
        if self._graph is not None:
            graph, self._graph = self._graph, None
            self._family.leave(graph)
