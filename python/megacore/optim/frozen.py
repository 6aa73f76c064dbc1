"""Parameters that are not trained: no gradient, no main copy and no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.buffers.param_checks import NamedParams, check_params
from megacore.optim.memory import frozen_numel
from megacore.optim.param_group import ParamGroup, group_of
from megacore.optim.shard import ParamPiece


class FrozenParams:
    """Parameters of a rank without gradients, in one contiguous tensor per number format.

    Every rank has its parameters whole, because no rank updates them: there is nothing to reduce,
    to shard or to gather. They need no gradient from then on.

    Args:
        params: Description and parameter, in forward order; may be empty.

    Raises:
        ValueError: If a parameter is listed twice or has another shape than its description.

    Example:
        >>> from megacore.parallel import ParamInfo
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> frozen = FrozenParams([(ParamInfo(name="w", full_shape=(2, 3), tp_dim=None), weight)])
        >>> weight.requires_grad, frozen.num_bytes
        (False, 256)
    """

    def __init__(self, params: NamedParams) -> None:
        self.params = tuple(params)
        self._data: dict[torch.dtype, Tensor] = {}
        for dtype in dict.fromkeys(param.dtype for _, param in self.params):
            self._adopt([pair for pair in self.params if pair[1].dtype == dtype], dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters on this rank, with padding."""
        return sum(data.nbytes for data in self._data.values())

    def pieces(self) -> list[ParamPiece]:
        """Return every parameter as a piece with its values, ``"main_param"``, to save or load."""
        return [
            ParamPiece(
                info=info,
                start=0,
                end=param.numel(),
                tensors={"main_param": param.detach().view(-1)},
            )
            for info, param in self.params
        ]

    @torch.no_grad()
    def _adopt(self, params: NamedParams, dtype: torch.dtype) -> None:
        """Move parameters of one number format into one tensor, and take their gradients away."""
        for expert in (False, True):
            if chosen := [pair for pair in params if pair[0].expert == expert]:
                check_params(chosen, torch.float32, trained=False)
        sizes = [frozen_numel(param.numel()) for _, param in params]
        data = torch.zeros(sum(sizes), dtype=dtype, device=params[0][1].device)
        for (_, param), home in zip(params, torch.split(data, sizes), strict=True):
            own = home[: param.numel()].view(param.shape)
            own.copy_(param.data)
            param.data = own
            param.grad = None
            param.requires_grad_(False)
            if hasattr(param, "main_grad"):  # of an earlier buffer
                del param.main_grad
        self._data[dtype] = data


def split_frozen(
    params: NamedParams, param_groups: Sequence[ParamGroup]
) -> tuple[NamedParams, NamedParams]:
    """Split parameters into those that are trained and those that are frozen, in their order.

    Args:
        params: Description and parameter of every parameter of this rank.
        param_groups: Parameter groups; the first that matches decides.
    """
    frozen = [pair for pair in params if group_of(pair[0].name, param_groups).frozen]
    trained = [pair for pair in params if not group_of(pair[0].name, param_groups).frozen]
    return trained, frozen
