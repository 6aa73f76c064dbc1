"""The optimizer state of one buffer: fp32 parameters and moments of the elements a rank owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer, ShardPiece
from megacore.ops.optim import AdamWSettings, adamw_step_
from megacore.optim.grad_norm import merge_neighbours
from megacore.parallel.params import ParamInfo


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """A range of one parameter that this rank optimizes, with its state.

    Attributes:
        info: Which parameter.
        start: First element in the flattened parameter as this rank's model holds it (the
            tensor-parallel shard).
        end: One past the last element.
        tensors: Views of the optimizer's own storage, ``(end - start,)``, fp32: ``"main_param"``,
            ``"exp_avg"``, ``"exp_avg_sq"``. Read them to save; fill them in place to load.
    """

    info: ParamInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive elements that share their settings: one kernel call."""

    decayed: bool
    main_param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy_out: Tensor | None


class OptimizerShard:
    """fp32 parameters, first and second moments of what this rank owns of one buffer.

    The main parameters of an fp32 buffer are the buffer itself: no copy exists. Those of a bfloat16
    buffer are fp32 copies, and each step writes the rounded result back into the buffer.
    """

    def __init__(self, buffer: ParamGradBuffer) -> None:
        self.buffer = buffer
        numel = buffer.shard_plan.shard_numel
        device = buffer.param_data.device
        self._is_low_precision = buffer.param_data.dtype != torch.float32
        self._exp_avg = torch.zeros(numel, dtype=torch.float32, device=device)
        self._exp_avg_sq = torch.zeros_like(self._exp_avg)
        self._main = torch.zeros_like(self._exp_avg) if self._is_low_precision else None
        pieces = buffer.owned_pieces()
        for piece in pieces:
            if self._is_low_precision:
                source = buffer.param_data[piece.world_start : piece.world_end]
                self._main_param(piece, piece).copy_(source)
        decayed = [info.weight_decay for info, _ in buffer.params]
        marked = [(piece, decayed[piece.param_index]) for piece in pieces]
        self._runs = [
            self._make_run(run, decayed=decayed[run[0].param_index])
            for run in merge_neighbours(marked)
        ]

    @torch.no_grad()
    def step(self, *, decayed: AdamWSettings, undecayed: AdamWSettings) -> None:
        """Update the owned parameters from the reduced gradients.

        Args:
            decayed: Settings for parameters with weight decay.
            undecayed: Settings for the others.

        Sync:
            None on CUDA.
        """
        for run in self._runs:
            adamw_step_(
                run.main_param,
                run.grad.float(),  # itself if it is fp32 already
                run.exp_avg,
                run.exp_avg_sq,
                decayed if run.decayed else undecayed,
                copy_out=run.copy_out,
            )

    def pieces(self) -> list[ParamPiece]:
        """Return every owned range of every parameter with views of its state."""
        pieces = []
        for piece in self.buffer.owned_pieces():
            local = slice(piece.local_start, piece.local_end)
            pieces.append(
                ParamPiece(
                    info=self.buffer.params[piece.param_index][0],
                    start=piece.param_start,
                    end=piece.param_end,
                    tensors={
                        "main_param": self._main_param(piece, piece),
                        "exp_avg": self._exp_avg[local],
                        "exp_avg_sq": self._exp_avg_sq[local],
                    },
                )
            )
        return pieces

    @torch.no_grad()
    def copy_main_to_params(self) -> None:
        """Round the main parameters into the owned part of the parameter buffer."""
        for run in self._runs:
            if run.copy_out is not None:
                run.copy_out.copy_(run.main_param)

    def _main_param(self, first: ShardPiece, last: ShardPiece) -> Tensor:
        if self._main is not None:
            return self._main[first.local_start : last.local_end]
        return self.buffer.param_data[first.world_start : last.world_end]

    def _make_run(self, run: tuple[ShardPiece, ...], *, decayed: bool) -> _Run:
        first, last = run[0], run[-1]
        world = slice(first.world_start, last.world_end)
        local = slice(first.local_start, last.local_end)
        return _Run(
            decayed=decayed,
            main_param=self._main_param(first, last),
            grad=self.buffer.grad_data[world],
            exp_avg=self._exp_avg[local],
            exp_avg_sq=self._exp_avg_sq[local],
            copy_out=self.buffer.param_data[world] if self._is_low_precision else None,
        )
