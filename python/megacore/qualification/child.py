"""The process that tries kernels: a kernel that ends it has ended nothing else.

It reads a request (`Request`) as JSON from standard input, and prints one event as JSON in a line:
``["start", name]`` before an operation, then ``["fault", name, text or null]`` or
``["times", name, ours, torch]`` in seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from megacore.qualification.cases import Sizes
from megacore.qualification.compare import first_difference, times_of


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a process tries.

    Attributes:
        device: Device, as torch writes it.
        threads: Threads of operations on the CPU.
        dtype: dtype of activations in the run, such as ``"bfloat16"``.
        sizes: Sizes of the run; ``None`` to time no operation but products of linear layers.
        compared: Operations to compare.
        timed: Operations to time.
        left: Operations whose kernels must not be used.
        imports: Modules to import first, such as those that replace kernels.
    """

    device: str
    threads: int
    dtype: str
    sizes: Sizes | None
    compared: tuple[str, ...]
    timed: tuple[str, ...]
    left: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Format the request."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Request:
        """Parse the result of `to_json`."""
        values = json.loads(text)
        sizes = values.pop("sizes")
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**values | lists, sizes=None if sizes is None else Sizes(**sizes))


def events(request: Request) -> Iterator[list[object]]:
    """Try the operations of a request, and yield what happens."""
    device, left = torch.device(request.device), set(request.left)
    for name in request.compared:
        yield ["start", name]
        fault = first_difference(name, device, left)
        yield ["fault", name, fault]
        if fault is not None:
            left.add(name)
            if device.type == "cuda" and fault.startswith("fails"):
                return  # after an error on the device, all later calls fail too
    for name in request.timed:
        if name not in left:
            yield ["start", name]
            dtype = getattr(torch, request.dtype)
            times = times_of(name, device, request.sizes, dtype, left)
            yield ["times", name, *(times or (0.0, 0.0))]


def main() -> None:
    """Answer the request of standard input."""
    # What kernels print belongs elsewhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = Request.of_json(sys.stdin.read())
    torch.set_num_threads(request.threads)
    for name in request.imports:
        importlib.import_module(name)
    if request.device.startswith("cuda"):
        torch.cuda.set_device(request.device)
    for event in events(request):
        print(json.dumps(event), file=answers)
