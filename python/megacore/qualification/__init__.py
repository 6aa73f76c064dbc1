"""Qualification of kernels: which operations our kernels compute on a device, and which torch.

`choose_kernels` compares and times each kernel, in a child process and once per device, driver and
build, and replaces those that differ, end the process or are slower. A training loop calls it once,
before it builds the model.
"""

from __future__ import annotations

from megacore.qualification.cases import Sizes, operation_names
from megacore.qualification.choice import KernelChoice, check_names, choose_kernels, keep_choice
from megacore.qualification.verdict import Verdict, find_verdict, known_verdict

__all__ = [
    "KernelChoice",
    "Sizes",
    "Verdict",
    "check_names",
    "choose_kernels",
    "find_verdict",
    "keep_choice",
    "known_verdict",
    "operation_names",
]
