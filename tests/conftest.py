"""Test-wide settings: one OpenMP thread (forked ranks need it), width, GPU skips, hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["COLUMNS"] = "120"  # what is printed does not depend on the terminal of who runs this

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is false here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    """Fail the test that leaves gradients off, not those that are started after it."""
    yield
    is_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert is_enabled, "gradients are off after this test"


@pytest.fixture(autouse=True)
def _kernel_choice() -> Iterator[None]:
    """Undo the choice of kernels of a run inside of the test's process."""
    # Not above: the plugin of emulated kernels is configured before megacore is imported.
    from megacore.ops.kernel_choice import leave_to_torch, left_operations

    before = {kind: left_operations(kind) for kind in ("cpu", "cuda")}
    yield
    for kind, names in before.items():
        leave_to_torch(names, kind)
