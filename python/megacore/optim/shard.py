"""Optimizer state of one buffer: fp32 parameters and moments of this rank's elements."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer, ShardPiece
from megacore.ops.optim import AdamWSettings, adamw_step_
from megacore.optim.gradients import merge_neighbours
from megacore.optim.param_group import ParamGroup, ParamSettings, settings_of
from megacore.parallel.param_info import ParamInfo


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """A range of one parameter that this rank optimizes, with its state.

    Attributes:
        info: The parameter.
        start: First element in the flattened parameter of this rank's model (the tensor-parallel
            shard).
        end: One past the last element.
        tensors: Views of the optimizer's own storage, ``(end - start,)``: ``"main_param"`` (fp32),
            ``"exp_avg"``, ``"exp_avg_sq"`` (fp32 or bfloat16). Read these to save; fill them in
            place to load.
    """

    info: ParamInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]


# Elements per conversion block, if the dtypes of kernel and storage differ.
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive elements that share their settings, from element ``first`` of the buffer."""

    own: ParamSettings
    first: int
    main_param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy_out: Tensor | None

    @property
    def converts(self) -> bool:
        """True if a step needs fp32 copies of gradients or moments."""
        return self.grad.dtype != torch.float32 or self.exp_avg.dtype != torch.float32

    def part(self, start: int, end: int) -> _Run:
        """Return a range of the elements."""
        return _Run(
            own=self.own,
            first=self.first + start,
            main_param=self.main_param[start:end],
            grad=self.grad[start:end],
            exp_avg=self.exp_avg[start:end],
            exp_avg_sq=self.exp_avg_sq[start:end],
            copy_out=None if self.copy_out is None else self.copy_out[start:end],
        )

    def step(self, settings: AdamWSettings, control: Tensor) -> None:
        """Update these elements."""
        # float() returns the tensor itself if it is fp32 already.
        exp_avg, exp_avg_sq = self.exp_avg.float(), self.exp_avg_sq.float()
        adamw_step_(
            self.main_param,
            self.grad.float(),
            exp_avg,
            exp_avg_sq,
            settings,
            copy_out=self.copy_out,
            control=control,
        )
        if exp_avg is not self.exp_avg:
            self.exp_avg.copy_(exp_avg)
            self.exp_avg_sq.copy_(exp_avg_sq)


class OptimizerShard:
    """fp32 parameters, first and second moments of this rank's part of one buffer.

    The main parameters of an fp32 buffer are the buffer itself, without a copy. Those of a bfloat16
    or float16 buffer are fp32 copies, and each step writes the rounded result back into the buffer.

    Args:
        buffer: Parameters and gradients.
        weight_decay: Weight decay of parameters that use it.
        param_groups: Settings of parameters by name.
        moments_dtype: float32, or bfloat16 to store the moments in half the memory; they are
            computed in fp32 and rounded after each step.
    """

    def __init__(
        self,
        buffer: ParamGradBuffer,
        *,
        weight_decay: float,
        param_groups: Sequence[ParamGroup] = (),
        moments_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.buffer = buffer
        numel = buffer.shard_plan.shard_numel
        device = buffer.param_data.device
        self._is_low_precision = buffer.param_data.dtype != torch.float32
        self._exp_avg = torch.zeros(numel, dtype=moments_dtype, device=device)
        self._exp_avg_sq = torch.zeros_like(self._exp_avg)
        self._main: Tensor | None = None
        if self._is_low_precision:
            self._main = torch.zeros(numel, dtype=torch.float32, device=device)
        pieces = buffer.owned_pieces()
        self.copy_params_to_main()
        own = [
            settings_of(info, param_groups, weight_decay=weight_decay) for info, _ in buffer.params
        ]
        marked = [(piece, own[piece.param_index]) for piece in pieces]
        self._runs = [
            self._make_run(run, own=own[run[0].param_index]) for run in merge_neighbours(marked)
        ]

    @torch.no_grad()
    def step(self, settings: AdamWSettings, control: Tensor) -> Iterator[int]:
        """Update the owned parameters from the reduced gradients, bucket by bucket.

        Args:
            settings: Settings of all parameters; the group of a parameter changes its learning rate
                and weight decay.
            control: The result of :func:`megacore.ops.optim.decide_step_`.

        Yields:
            Every bucket of the buffer, when its parameters are updated.

        Sync:
            None on CUDA.
        """
        runs = deque(self._runs)
        for index, bucket in enumerate(self.buffer.plan.buckets):
            while runs and runs[0].first < bucket.end:
                self._update(runs.popleft(), settings, control)
            yield index

    def _update(self, run: _Run, settings: AdamWSettings, control: Tensor) -> None:
        own = replace(
            settings, lr=settings.lr * run.own.lr_scale, weight_decay=run.own.weight_decay
        )
        if not run.converts:
            run.step(own, control)
            return
        for start in range(0, run.grad.numel(), _BLOCK):
            run.part(start, start + _BLOCK).step(own, control)

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments, and of the main parameters if these are copies."""
        tensors = [self._exp_avg, self._exp_avg_sq]
        if self._main is not None:
            tensors.append(self._main)
        return sum(tensor.nbytes for tensor in tensors)

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
    def copy_params_to_main(self) -> None:
        """Copy the owned part of the parameter buffer to the main parameters."""
        if self._is_low_precision:
            for piece in self.buffer.owned_pieces():
                source = self.buffer.param_data[piece.world_start : piece.world_end]
                self._main_param(piece, piece).copy_(source)

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

    def _make_run(self, run: tuple[ShardPiece, ...], *, own: ParamSettings) -> _Run:
        first, last = run[0], run[-1]
        world = slice(first.world_start, last.world_end)
        local = slice(first.local_start, last.local_end)
        return _Run(
            own=own,
            first=first.world_start,
            main_param=self._main_param(first, last),
            grad=self.buffer.grad_data[world],
            exp_avg=self._exp_avg[local],
            exp_avg_sq=self._exp_avg_sq[local],
            copy_out=self.buffer.param_data[world] if self._is_low_precision else None,
        )
