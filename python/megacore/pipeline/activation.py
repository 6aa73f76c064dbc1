"""Specifications of the messages between pipeline stages, and choice of the transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """Specification of an activation that a stage sends to the next stage, and of its gradient.

    Attributes:
        shape: Shape of every message.
        dtype: Dtype of every message.
        device: Device of every message.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str

    def __post_init__(self) -> None:
        """Take any sequence of sizes."""
        object.__setattr__(self, "shape", tuple(self.shape))

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


class StageActivations:
    """Output specifications of all pipeline stages: one for all stages, or one per stage.

    Args:
        activation: One description for all stages, or one for each stage but the last of a chain,
            by the stage whose output it describes.
        num_stages: Stages of all chains.
        num_chains: Copies of the model through which different microbatches flow.

    Raises:
        ValueError: If a stage is missing, or the stages live on different devices.
    """

    def __init__(
        self,
        activation: ActivationSpec | Mapping[int, ActivationSpec],
        *,
        num_stages: int,
        num_chains: int = 1,
    ) -> None:
        length = num_stages // num_chains
        senders = [stage for stage in range(num_stages) if (stage + 1) % length != 0]
        if isinstance(activation, ActivationSpec):
            self.device = torch.device(activation.device)
            self._by_stage = dict.fromkeys(senders, activation)
            return
        if sorted(activation) != senders:
            raise ValueError(
                f"activation describes the outputs of the stages {sorted(activation)}, but those "
                f"that have a next stage are {senders}"
            )
        devices = {torch.device(spec.device) for spec in activation.values()}
        if len(devices) > 1:
            raise ValueError(
                f"activation names the devices {sorted(map(str, devices))}; a rank has one"
            )
        self.device = devices.pop() if devices else torch.device("cpu")
        self._by_stage = dict(activation)

    @property
    def specs(self) -> list[ActivationSpec]:
        """Output specifications by ascending stage."""
        return list(self._by_stage.values())

    def of_output(self, stage: int) -> ActivationSpec:
        """Return the specification of a stage's output."""
        return self._by_stage[stage]

    def of_message(self, receiver: int, *, forward: bool) -> ActivationSpec:
        """Return the specification of a stage's input, or of the gradient of its output."""
        return self._by_stage[receiver - 1 if forward else receiver]


def receives_for(
    group: Group,
    activation: ActivationSpec | Mapping[int, ActivationSpec],
    *,
    overlap: bool | None = None,
) -> Literal["ahead", "in_order"]:
    """Return where the receives of a program should stand for the backend of a group.

    Args:
        group: The pipeline's ranks.
        activation: Specification of the messages between stages.
        overlap: Whether transfers run beside compute. By default on all backends but NCCL, where
            each sender and receiver need a group of their own
            (``ProcessGroups.create(pp_channels=True)``).

    Example:
        >>> from megacore.parallel import Group
        >>> spec = ActivationSpec(shape=(4,), dtype=torch.float32, device="cpu")
        >>> receives_for(Group.solo(), spec)
        'ahead'
    """
    if overlap is None:
        specs = [activation] if isinstance(activation, ActivationSpec) else activation.values()
        overlap = not any(uses_nccl(group, torch.device(spec.device)) for spec in specs)
    return "ahead" if overlap else "in_order"


def uses_nccl(group: Group, device: torch.device) -> bool:
    """Check if the messages of a group use NCCL."""
    if group.handle is None or device.type != "cuda":
        return False
    return "nccl" in dist.get_backend_config(group.handle)
