"""How much memory tensors take, counted exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Bytes of all tensors that operations made and that still live, and what was computed.

    Tensors that were there before are not counted.
    """

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self.num_products = 0
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func is torch.ops.aten.mm.default
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata in self._others:
                    continue
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())
