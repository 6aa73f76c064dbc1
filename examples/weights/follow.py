"""A server that gets the weights of a running training every few steps, without a file.

The "server" here is a dictionary on rank 0. Of a real one, the loop on rank 0 is
``engine.load_weights((name, tensor) for name, tensor in stream)``, as vLLM and others have it.
"""

from __future__ import annotations

import time

import torch

from megatrain.api import (
    Callback,
    ResolvedConfig,
    StepRecord,
    Trainer,
    refresh_weights,
    stream_weights,
)


class Follow(Callback):
    """Streams the weights out after every tenth step, and back at the end."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.server: dict[str, torch.Tensor] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Keep the trainer."""
        self.trainer = trainer

    def on_step(self, record: StepRecord) -> None:
        """Stream the weights to rank 0; every rank takes part, others get None for a tensor."""
        if record.step % 10 or record.loss is None:
            return
        started = time.perf_counter()
        for name, tensor in stream_weights(self.trainer):
            if tensor is not None:
                self.server[name] = tensor
        if self.trainer.groups.rank == 0:
            size = sum(tensor.nbytes for tensor in self.server.values())
            print(
                f"step {record.step}: {len(self.server)} tensors, {size / 1e6:.1f} MB, "
                f"{time.perf_counter() - started:.3f} s",
                flush=True,
            )

    def on_end(self) -> None:
        """Give the server's weights to the trainer, as after a change outside; rank 0 reads."""
        refresh_weights(self.trainer, self.server.items())
