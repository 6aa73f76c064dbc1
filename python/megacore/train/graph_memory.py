"""What a capture took, beside what it was predicted to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megacore.train.graph_plan import GraphBytes

_PARTS = ("objects", "static_inputs", "boundary", "pool")


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of the GPU in use; all zero without one.

    Attributes:
        reserved: Bytes that torch's allocator holds, those of graphs' pools included.
        others: Bytes that are in use besides: the driver's, with its graphs, and other processes'.
    """

    reserved: int = 0
    others: int = 0

    @classmethod
    def now(cls) -> DeviceMemory:
        """What is in use now.

        Sync:
            Waits for the device.
        """
        if not torch.cuda.is_available():
            return cls()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is only kept for later does not count
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return cls(reserved=reserved, others=total - free - reserved)


def measured_bytes(
    num_graphs: int, static: Sequence[Mapping[str, int]], before: DeviceMemory
) -> GraphBytes:
    """What graphs took.

    Args:
        num_graphs: How many there are.
        static: For each that holds some, bytes of static tensors by use, as ``static_bytes`` tells.
        before: The memory before the capture. Without a GPU, objects and pool are not known: 0.
    """
    now = DeviceMemory.now()
    inputs = sum(sizes.get("static_inputs", 0) for sizes in static)
    boundary = sum(sizes.get(name, 0) for sizes in static for name in ("output_grads", "results"))
    reserved = now.reserved - before.reserved
    return GraphBytes(
        num_graphs=num_graphs,
        objects=max(0, now.others - before.others),
        static_inputs=inputs,
        boundary=boundary,
        pool=max(0, reserved - inputs - boundary),
    )


def measured_text(found: GraphBytes, predicted: GraphBytes | None, *, has_device: bool) -> str:
    """Both for people, the prediction in brackets.

    Example:
        >>> parts = {"num_graphs": 2, "static_inputs": 1 << 20, "boundary": 0}
        >>> found = GraphBytes(**parts, objects=1 << 20, pool=3 << 20)
        >>> predicted = GraphBytes(**parts, objects=1 << 20, pool=1 << 20)
        >>> measured_text(found, predicted, has_device=True)  # doctest: +ELLIPSIS
        'captured 2 graphs: 5.0 (3.0) MiB: objects 1.0 (1.0), static inputs 1.0 (1.0), ...'
    """

    def shown(name: str) -> str:
        megabytes = f"{getattr(found, name) / 2**20:.1f}"
        return megabytes + (f" ({getattr(predicted, name) / 2**20:.1f})" if predicted else "")

    count = f"captured {found.num_graphs} graph{'' if found.num_graphs == 1 else 's'}"
    names = _PARTS if has_device else ("static_inputs", "boundary")
    listed = ", ".join(f"{name.replace('_', ' ')} {shown(name)}" for name in names)
    if not has_device:
        return f"{count}: {listed} MiB; objects and pool are measured on a GPU"
    return f"{count}: {shown('total')} MiB: {listed}"
