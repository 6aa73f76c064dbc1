"""Faulty kernels in place of those of the CPU; processes that import this module have them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from megacore.qualification import cases  # noqa: F401  registers the operations

# Replaces kernels for as long as it lives.
_LIBRARY = torch.library.Library("megacore", "IMPL")  # type: ignore[no-untyped-call]


def _wrong_at_33_rows(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> Any:
    total = x + added
    y, scale = torch.ops.megacore._rms_norm(total, weight, eps)
    return total, y + 0.25 * (len(x) == 33), scale


def _crash(*args: Any) -> Any:
    del args
    os.kill(os.getpid(), signal.SIGSEGV)


def _slow(a: Tensor, b: Tensor, m_splits: Tensor, product: int, out: Any = None, *rest: Any) -> Any:
    with torch.no_grad():
        time.sleep(0.1 * (a.shape[0] >= 512))
    from megacore.ops import gemm_cpu

    if product == 2:
        gemm_cpu.weight_grad_reference_(a, b, m_splits, out, bool(rest[2] if len(rest) > 2 else 0))
        return a.new_empty(0)
    found = gemm_cpu.REFERENCES[("forward", "input_grad")[product]](a, b, m_splits, True)
    if out is None:
        return found
    out.copy_(found)
    return a.new_empty(0)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the kernels are there
    for _name, _kernel in (
        ("_add_rms_norm", _wrong_at_33_rows),
        ("_swiglu_backward", _crash),
        ("_grouped_product", _slow),
    ):
        _LIBRARY.impl(_name, _kernel, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
