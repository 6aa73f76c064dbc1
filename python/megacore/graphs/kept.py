"""Static storage of the tensors that a backward pass keeps for its weight half."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megacore.graphs.tensors import TensorSpec, copy_of, overwrite
from megacore.ops.split_backward import DeferredWeightGrads


class KeptTensors:
    """One static buffer of the role ``KEPT`` in a capture plan.

    The first capture that uses the buffer adopts its kept tensors without a copy. Later captures,
    and every emulated replay, copy to these addresses.

    Args:
        foreign: Tensors that must not be overwritten; kept tensors in their memory are copied.

    Attributes:
        tensors: The kept tensors; empty until the first capture.
    """

    def __init__(self, foreign: Iterable[Tensor]) -> None:
        self._foreign = {tensor.untyped_storage().data_ptr() for tensor in foreign}
        self.tensors: list[Tensor] = []

    @torch.no_grad()
    def hold(self, deferred: DeferredWeightGrads) -> None:
        """Redirect a weight half to the tensors of this buffer, with the same values.

        Raises:
            RuntimeError: If the kept tensors differ in number or form from the first capture.
        """
        is_new = not self.tensors
        found: list[Tensor] = []

        def place(tensor: Tensor) -> Tensor:
            found.append(self._own(tensor) if is_new else self._copied(tensor, len(found)))
            return found[-1]

        # Emulated replays copy here. These copies are not operations of the captured code.
        with _disable_current_modes():
            deferred.map_kept(place)
        if not is_new and len(found) != len(self.tensors):
            raise RuntimeError(
                f"a weight half now needs {len(found)} gradients, and {len(self.tensors)} at its "
                "capture; a graph always does the same"
            )
        self.tensors = found

    def _own(self, tensor: Tensor) -> Tensor:
        is_foreign = tensor.untyped_storage().data_ptr() in self._foreign
        return copy_of(tensor) if is_foreign else tensor

    def _copied(self, tensor: Tensor, number: int) -> Tensor:
        static = self.tensors[number] if number < len(self.tensors) else tensor
        if difference := TensorSpec.of(tensor).difference(TensorSpec.of(static)):
            raise RuntimeError(
                f"gradient {number} that a weight half needs has another form than at its capture: "
                f"{difference}; a graph always does the same"
            )
        if static.data_ptr() != tensor.data_ptr():
            overwrite(static, tensor)
        return static
