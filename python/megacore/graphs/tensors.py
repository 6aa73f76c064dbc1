"""Tensor specifications for captures, and tensors that do not own their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megacore import _core

# DLPack codes of dtype kinds and devices.
_DTYPE_CODES = {
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.bool: 6,
}
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}


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
        ValueError: If the dtype or device is not supported.

    Example:
        >>> owner = torch.arange(6.0).view(2, 3).t()
        >>> weak = weak_tensor(owner)
        >>> weak.data_ptr() == owner.data_ptr(), weak.stride()
        (True, (1, 3))
    """
    code = _DTYPE_CODES.get(tensor.dtype)
    device = _DEVICE_TYPES.get(tensor.device.type)
    if code is None or device is None:
        raise ValueError(
            f"no tensor without ownership can be made of {tensor.dtype} on {tensor.device}; "
            f"dtypes: {', '.join(str(dtype) for dtype in _DTYPE_CODES)}; devices: cpu, cuda"
        )
    capsule = _core.weak_tensor_capsule(
        tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        dtype_code=code,
        dtype_bits=8 * tensor.dtype.itemsize,
        device_type=device,
        device_id=tensor.device.index or 0,
    )
    made: Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return made
