"""What pipeline stages send to each other, and over which transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """What one stage sends to the next, and back as a gradient.

    Attributes:
        shape: Shape of every message.
        dtype: Its dtype.
        device: Where it lives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str

    def empty(self) -> Tensor:
        """Return an uninitialised tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def require(self, tensor: Tensor, what: str) -> None:
        """Raise ``ValueError`` unless a tensor is as described.

        A message of another size would end the receiving process on gloo, so this is checked
        before anything is sent.
        """
        device = torch.device(self.device)
        same_device = tensor.device.type == device.type and device.index in (
            None,
            tensor.device.index,
        )
        if tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype and same_device:
            return
        raise ValueError(
            f"{what} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, but stages "
            f"exchange {list(self.shape)} {self.dtype} on {device} (see ActivationSpec)"
        )


def receives_for(group: Group, activation: ActivationSpec) -> Literal["ahead", "in_order"]:
    """Return where the receives of a program should stand for the backend of a group.

    Example:
        >>> from megacore.parallel import Group
        >>> spec = ActivationSpec(shape=(4,), dtype=torch.float32, device="cpu")
        >>> receives_for(Group.solo(), spec)
        'ahead'
    """
    return "in_order" if uses_nccl(group, activation) else "ahead"


def uses_nccl(group: Group, activation: ActivationSpec) -> bool:
    """Whether the messages of a group go over NCCL."""
    if group.handle is None or torch.device(activation.device).type != "cuda":
        return False
    return "nccl" in dist.get_backend_config(group.handle)
