"""What tests on a GPU share: forbidding waits, poisoned memory, replays of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """Raise where torch would wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every new tensor with NaN, or the largest integer: what a kernel leaves out shows."""
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def capture(run: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Warm up, then capture ``run``; returns the graph and the tensors that its replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, list(outputs)
