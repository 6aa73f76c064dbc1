"""Capture options, common to all backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from megacore.graphs.backend import GraphBackend

# Hooks by kind, then by an arbitrary key.
CaptureTimeHooks = Mapping[str, Mapping[Any, Callable[[nn.Module], None]]]
HOOK_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Options of :func:`megacore.graphs.make_graphed_callables`.

    Attributes:
        reuse: With an order list: the reuse between microbatches, see ``plan_capture``. Default:
            ``"graphs"``, or ``"buffers"`` with the backend ``transformer_engine``.
        num_warmup_iters: Passes of each module before its capture.
        allow_unused_input: Accept inputs that require grad but get no gradient.
        retain_graph_in_backward: Keep saved tensors after captured backward passes, so that replays
            may use another order than captures.
        clone_param_grads_on_return: Return copies of parameter gradients, which ``.grad`` may keep.
                Otherwise ``.grad`` must be consumed before the next replay.
            defer_weight_grads: If the order list has weight halves: compute parameter gradients in
                ``backward_dw()`` of each callable. Otherwise autograd computes them.
        pre_warmup_hook: Runs once before the warmup.
        post_warmup_hook: Runs once after the warmup.
        capture_time_hooks: For each module ``None``, or for each of ``forward_pre_hooks``,
            ``forward_hooks``, ``backward_pre_hooks``, ``backward_hooks`` a mapping of functions of
            the module. They run around each of its passes in warmup and capture, outside of the
            graphs, never at a replay, and return ``None``.
        run_pre_hooks: Accept modules with forward pre-hooks, and run those hooks before each replay
                with the module and no arguments. Otherwise such modules raise an error.
            generators: Random generators, besides the default one, used by captured code. A capture
                restores the states of all generators.
        pool: Memory pool to share with other graphs, from ``torch.cuda.graph_pool_handle()``. All
            graphs that share it must be replayed in the order of their captures.
        backend: ``"cuda"``, ``"emulated"``, ``"transformer_engine"``, or a ``GraphBackend``.
            Default: ``cuda`` for tensors on a CUDA device, else ``emulated``.
    """

    reuse: Literal["none", "buffers", "graphs"] | None = None
    num_warmup_iters: int = 3
    allow_unused_input: bool = False
    retain_graph_in_backward: bool = False
    clone_param_grads_on_return: bool = True
    defer_weight_grads: bool = False
    pre_warmup_hook: Callable[[], None] | None = None
    post_warmup_hook: Callable[[], None] | None = None
    capture_time_hooks: Sequence[CaptureTimeHooks | None] | None = None
    run_pre_hooks: bool = False
    generators: Sequence[torch.Generator] = ()
    pool: Any = None
    backend: GraphBackend | str | None = None

    def check(self, num_modules: int) -> None:
        """Check the options for a number of modules.

        Raises:
            ValueError: If capture-time hooks are not one mapping per module, or have an unknown
                kind; or if ``pool`` or ``generators`` accompany a backend object.
        """
        hooks = self.capture_time_hooks
        if hooks is not None and len(hooks) != num_modules:
            raise ValueError(
                f"capture_time_hooks has {len(hooks)} entries for {num_modules} modules; give one "
                "mapping, or None, for each"
            )
        for number, one in enumerate(hooks or ()):
            unknown = [kind for kind in one or () if kind not in HOOK_KINDS]
            if unknown:
                raise ValueError(
                    f'capture_time_hooks of module {number} names "{unknown[0]}"; the kinds are '
                    f"{', '.join(HOOK_KINDS)}"
                )
        if isinstance(self.backend, GraphBackend) and (self.pool is not None or self.generators):
            raise ValueError(
                "pool and generators are given to a backend when it is made, as in "
                "CudaBackend(device, pool=..., generators=...)"
            )

    def run_hooks(self, kind: str, number: int, module: nn.Module) -> None:
        """Run the capture-time hooks of a kind.

        Raises:
            RuntimeError: If a hook returns a value.
        """
        hooks = self.capture_time_hooks[number] if self.capture_time_hooks is not None else None
        for hook in ((hooks or {}).get(kind) or {}).values():
            if (result := hook(module)) is not None:
                raise RuntimeError(
                    f"capture-time hook {hook!r} returned {result!r}; it must return None, since "
                    "no replay would see the result"
                )
