"""The thread that exchanges the chunks of reductions."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor

from megacore.parallel.host.gloo_messages import _Reducer, _Reduction


class _Arrived:
    """A message that has arrived."""

    def wait(self) -> None:
        """Return at once."""


class _Handle:
    """Process group of two whose other member sends ones."""

    def recv(self, tensors: list[Tensor], *_: Any) -> _Arrived:
        tensors[0].fill_(1.0)
        return _Arrived()

    def send(self, *_: Any) -> _Arrived:
        return _Arrived()


def test_the_thread_ends_if_its_group_goes_during_an_exchange() -> None:
    reductions = queue.SimpleQueue[_Reduction | None]()
    output, done = torch.zeros(4), Future[None]()
    slices = torch.arange(8.0).view(2, 4)
    reductions.put(_Reduction(output=output, slices=slices, average=False, tag=1, done=done))
    reductions.put(None)  # found while the chunk of the reduction is in flight
    reducer = _Reducer(cast(Any, _Handle()), 0, [1], reductions)
    thread = threading.Thread(target=reducer.run, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert done.done()
    assert output.tolist() == [1.0, 2.0, 3.0, 4.0]
