"""Checks of parameters that share a buffer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from megacore.parallel.param_info import ParamInfo

NamedParams = Sequence[tuple[ParamInfo, nn.Parameter]]

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_pairs(params: NamedParams) -> NamedParams:
    """Return the pairs of description and parameter as a list.

    Raises:
        TypeError: If an entry is not such a pair.
    """
    if isinstance(params, nn.Module):
        raise TypeError(f"params must be pairs of ParamInfo and Parameter, got a {_name(params)}")
    pairs = list(params)
    for position, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], ParamInfo) and isinstance(pair[1], nn.Parameter)):
            shown = ", ".join(map(_name, pair)) if is_pair else _name(pair)
            raise TypeError(
                f"params must be pairs of ParamInfo and Parameter, got {shown} at position "
                f"{position}; for a parameter that no rank splits, give (ParamInfo(name=name, "
                "full_shape=tuple(param.shape), tp_dim=None), param) for each name, param of "
                "model.named_parameters()"
            )
    return pairs


def _name(value: object) -> str:
    return type(value).__name__


def check_params(params: NamedParams, grad_dtype: torch.dtype, *, trained: bool = True) -> None:
    """Check that parameters can share a buffer; ``trained`` ones need a gradient.

    Raises:
        ValueError: If there are no parameters, or one is listed twice, needs no gradient, has
            another shape than its description, or does not match the others.
    """
    if not params:
        raise ValueError("a buffer needs at least one parameter")
    first_info, first = params[0]
    if first.dtype not in _PARAM_DTYPES:
        raise ValueError(f"{first_info.name} is {first.dtype}; use float32, bfloat16 or float16")
    if grad_dtype not in (torch.float32, first.dtype):
        raise ValueError(
            f"grad_dtype is {grad_dtype}; use torch.float32 or the parameters' {first.dtype}"
        )
    seen: dict[int, str] = {}
    for info, param in params:
        _check_names_and_shape(info, param, seen.values())
        if trained and not param.requires_grad:
            raise ValueError(f"{info.name} needs no gradient; leave it out of the buffer")
        if id(param) in seen:
            raise ValueError(f"{info.name} is the same tensor as {seen[id(param)]}; list it once")
        seen[id(param)] = info.name
        if (param.dtype, param.device, info.expert) != (
            first.dtype,
            first.device,
            first_info.expert,
        ):
            raise ValueError(
                f"{info.name} ({param.dtype}, {param.device}, expert={info.expert}) cannot share a "
                f"buffer with {first_info.name} ({first.dtype}, {first.device}, "
                f"expert={first_info.expert}); use one buffer per kind, see make_buffers"
            )


def _check_names_and_shape(info: ParamInfo, param: nn.Parameter, names: Collection[str]) -> None:
    if info.name in names and info.shared is None:
        raise ValueError(f"two parameters are called {info.name}; names are global, one for each")
    cut = {info.tp_dim, info.ep_dim}
    shape = tuple(param.shape)
    fits = len(shape) == len(info.full_shape) and all(
        own == whole or (dim in cut and own > 0 and whole % own == 0)
        for dim, (own, whole) in enumerate(zip(shape, info.full_shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{info.name} is {shape}, but its full_shape is {info.full_shape}; they may differ in "
            f"tp_dim ({info.tp_dim}) and ep_dim ({info.ep_dim}), where the part divides the whole"
        )


def lost_text(name: str, param: nn.Parameter) -> str:
    """Return the error message for a parameter that left its buffer or was frozen."""
    if not param.requires_grad:
        return (
            f"{name} needs no gradient any more, but its buffer was made with it; freeze "
            "parameters before the buffers and the optimizer are made, or make these anew"
        )
    return (
        f"{name} has left its buffer: another one was made of it, or it was given other memory (by "
        "module.to(), param.data = ... or load_state_dict(assign=True)); make buffers and "
        "optimizer after that, and copy into weights that have them"
    )
