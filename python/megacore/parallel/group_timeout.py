"""How long the collectives of a group wait for its members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megacore.parallel.process_groups import Group


def timeout_of(group: Group, device: torch.device) -> timedelta:
    """Return the limit of collectives on tensors of a device; of a group of several members."""
    assert group.handle is not None
    timeout: timedelta = group.handle._get_backend(device).options._timeout
    return timeout


@contextmanager
def longer_timeout(group: Group, timeout: timedelta) -> Iterator[None]:
    """Let collectives that begin inside wait longer, where members may be late on purpose.

    Those in shared memory keep their own limit. A limit that is longer already is kept.

    Args:
        group: The group; all members enter.
        timeout: Limit inside.
    """
    backends: set[Any] = set()
    if isinstance(group.handle, ProcessGroup) and not group.is_fake:
        backends = {group.handle._get_backend(device) for device in group.handle._device_types}
    before = {backend: backend.options._timeout for backend in backends}
    for backend, limit in before.items():
        backend._set_default_timeout(max(limit, timeout))
    try:
        yield
    finally:
        for backend, limit in before.items():
            backend._set_default_timeout(limit)
