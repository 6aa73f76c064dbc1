"""Parameters that are not trained: no gradient, no main copy and no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacore.buffers.param_checks import NamedParams, check_params
from megacore.optim.param_group import ParamGroup, group_of
from megacore.optim.shard import ParamPiece


class FrozenParams:
    """Parameters of a rank without gradients, which stay where they are in memory.

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
        (False, 24)
    """

    def __init__(self, params: NamedParams) -> None:
        self.params = tuple(params)
        kinds = ((param.dtype, info.expert) for info, param in self.params)
        for kind in dict.fromkeys(kinds):
            chosen = [pair for pair in self.params if (pair[1].dtype, pair[0].expert) == kind]
            check_params(chosen, torch.float32, trained=False)
        for _, param in self.params:
            param.grad = None
            param.data = param.data.contiguous()
            param.requires_grad_(False)
            if hasattr(param, "main_grad"):  # of an earlier buffer
                del param.main_grad

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters on this rank."""
        return sum(param.nbytes for _, param in self.params)

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
