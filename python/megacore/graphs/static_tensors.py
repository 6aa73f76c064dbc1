"""Facts that a capture fixes: tensor specifications, static tensors, signature of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megacore.graphs.errors import ReplayError
from megacore.ops.register import compiled
from megacore.ops.split_backward import DeferredWeightGrads


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Properties of a tensor that must be equal at a capture and at its replays.

    Attributes:
        shape: Shape.
        stride: Strides, in elements.
        dtype: Number format.
        device: Device.
        requires_grad: Whether the tensor requires a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the specification of a tensor."""
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return a new uninitialized tensor with this specification."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)

    def zeros(self) -> Tensor:
        """Return a new tensor with this specification, filled with zeros."""
        made = self.empty()
        with torch.no_grad():
            return made.zero_()

    def dense_zeros(self) -> Tensor:
        """Return a contiguous tensor of this shape, filled with zeros; it does not require grad."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def difference(self, other: TensorSpec) -> str:
        """Describe the differences for a message; empty if there are none.

        Example:
            >>> a = TensorSpec.of(torch.zeros(2, 3))
            >>> a.difference(TensorSpec.of(torch.zeros(3, 2).t()))
            'stride (3, 1), not (1, 2)'
        """
        return ", ".join(
            f"{name} {getattr(self, name)}, not {getattr(other, name)}"
            for name in ("shape", "stride", "dtype", "device", "requires_grad")
            if getattr(self, name) != getattr(other, name)
        )


def check_input(name: str, number: int, value: Any, captured: TensorSpec) -> None:
    """Check that an input of captured code has the form of the capture.

    Raises:
        ReplayError: If its form differs, or it is not a tensor.
    """
    # A tensor is never shown: that would read its values from the device.
    difference = (
        TensorSpec.of(value).difference(captured)
        if isinstance(value, Tensor)
        else f"{value!r}, not a tensor"
    )
    if difference:
        raise ReplayError(
            f"{name} was captured with another input {number}: now {difference}; capture again for "
            "other shapes"
        )


def distinct_elements(tensor: Tensor) -> Tensor:
    """Return a writable view without the repetitions of ``expand``.

    Example:
        >>> distinct_elements(torch.zeros(1, 2).expand(3, 2)).shape
        torch.Size([1, 2])
    """
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def overwrite(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape and strides, repeated elements once."""
    distinct_elements(target).copy_(distinct_elements(source))


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides and repetitions, so that later sums keep their order."""
    plain = tensor.detach()
    made = TensorSpec.of(plain).empty()
    overwrite(made, plain)
    return made


def weak_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor at the same address, with the same strides, that does not own the memory.

    The memory may be reused at any time. Use the result only where something else, such as the
    pool of a captured graph, guarantees its contents. The result has no autograd history.

    Raises:
        ValueError: If the device, the layout or a lazy conjugation is not supported.

    Example:
        >>> owner = torch.arange(6.0).view(2, 3).t()
        >>> weak = weak_tensor(owner)
        >>> weak.data_ptr() == owner.data_ptr(), weak.stride()
        (True, (1, 3))
    """
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided or is_lazy:
        raise ValueError(
            "no tensor without ownership can be made of a tensor with layout "
            f"{tensor.layout}{', lazily conjugated,' if is_lazy else ''} on {tensor.device}; "
            "layouts: strided; devices: cpu, cuda"
        )
    made: Tensor = _weak_tensor(tensor)
    return made


def _fake(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


_weak_tensor = compiled("weak_tensor(Tensor tensor) -> Tensor", _fake)


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


@dataclass(frozen=True, kw_only=True)
class CaptureSignature:
    """Facts about a step that its graphs have frozen.

    Attributes:
        facts: Values by readable name, such as ``"microbatches"``.
    """

    facts: Mapping[str, Any]

    def difference(self, captured: CaptureSignature) -> str:
        """Describe the differences from the signature of a capture; empty if there are none.

        Example:
            >>> now = CaptureSignature(facts={"microbatches": 8, "dtype": "float32"})
            >>> now.difference(CaptureSignature(facts={"microbatches": 4, "dtype": "float32"}))
            'microbatches 8, not 4'
        """
        names = dict.fromkeys([*captured.facts, *self.facts])
        return ", ".join(
            f"{name} {_shown(self.facts.get(name))}, not {_shown(captured.facts.get(name))}"
            for name in names
            if self.facts.get(name) != captured.facts.get(name)
        )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
