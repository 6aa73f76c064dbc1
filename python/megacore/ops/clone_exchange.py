"""Registered operations that exchange weights and gradients of clones in the memory of peer GPUs.

Each is a kernel of ``cuda/include/megacore/cuda/clone_exchange.h``, without host sync, and changes
memory that is not an argument. ``memory`` has the addresses of all ranks' memory, ``(R,)`` int64;
``failure`` is an int64 word, 0 at first. ``slot_expert`` is that of a plan, ``(R, slots)`` int64,
and ``tensor`` the weights or the float32 sum of gradients of a projection, one per home expert;
steps that need neither take None. Bytes are those of an expert. CPUs have no such operations.
"""

from __future__ import annotations

from typing import Any

from megacore.ops.register import compiled


def _step(name: str, tensor: str = "Tensor?") -> Any:
    return compiled(
        f"clones_{name}(Tensor memory, Tensor(a!) failure, Tensor? slot_expert, {tensor} tensor,"
        " int projection, int num_slots, int num_experts, int position, int fc1_bytes,"
        " int fc2_bytes, int fc1_grad_bytes, int fc2_grad_bytes, float timeout_s) -> ()",
        lambda *_: None,
    )


open_slots = _step("open")
push = _step("push")
wait = _step("wait")
reserve_grads = _step("reserve_grads")
offer_grads = _step("offer_grads")
collect = _step("collect", "Tensor(b!)?")
