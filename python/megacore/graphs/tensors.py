"""What a capture knows of a tensor, and tensors that do not own their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megacore import _core

# DLPack's codes of dtype kinds and devices.
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
    """Everything that must not change between a capture and its replays.

    Attributes:
        shape: Shape.
        stride: Strides, in elements.
        dtype: Number format.
        device: Where it lives.
        requires_grad: Whether a gradient is asked for.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The specification of a tensor."""
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
        """A new tensor like that, not filled."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)

    def zeros(self) -> Tensor:
        """A new tensor like that, filled with zeros."""
        made = self.empty()
        with torch.no_grad():
            return made.zero_()

    def dense_zeros(self) -> Tensor:
        """A new tensor of that shape without gaps, filled with zeros; it does not require grad."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def difference(self, other: TensorSpec) -> str:
        """What differs, for a message; empty if nothing does.

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
    """A view without the repetitions that ``expand`` makes, which may be written to.

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
    """A copy with the same strides, repetitions included: what follows sums in the same order."""
    plain = tensor.detach()
    made = TensorSpec.of(plain).empty()
    overwrite(made, plain)
    return made


def weak_tensor(tensor: Tensor) -> Tensor:
    """A tensor at the same address, with the same strides, that does not keep the memory alive.

    The memory may be given to something else at any time; use the result only where something
    else, such as the pool of a captured graph, guarantees what lies there. It has no autograd
    history.

    Raises:
        ValueError: If the dtype or device has no such form.

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
