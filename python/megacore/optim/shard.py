"""Optimizer state of one buffer: fp32 parameters and state of this rank's elements."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer, ShardPiece
from megacore.optim.gradients import merge_neighbours
from megacore.optim.matrix_rule import MatrixRule
from megacore.optim.matrix_update import MatrixUpdate
from megacore.optim.param_group import ParamGroup, ParamSettings, settings_of
from megacore.optim.update_piece import UpdatePiece
from megacore.optim.update_rule import UpdateRule
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import Group, ProcessGroups

# Kind of the fp32 parameters in the state of every rule.
MAIN_PARAM = "main_param"


@dataclass(frozen=True, kw_only=True)
class ParamPiece:
    """A range of one parameter that this rank optimizes, with its state.

    Attributes:
        info: The parameter.
        start: First element in the flattened parameter of this rank's model (the tensor-parallel
            shard).
        end: One past the last element.
        tensors: Views of the optimizer's own storage, ``(end - start,)``: ``"main_param"`` (fp32)
            and the state of its rule, as ``"exp_avg"`` and ``"exp_avg_sq"`` of AdamW (fp32 or
            bfloat16); fewer values where one is for a block of the last dimension. Read these to
            save; fill them in place to load.
        holders: Data-parallel ranks that have this same range; ``None`` for all that have the
            parameter, :attr:`ProcessGroups.holders` or ``expert_holders``.
    """

    info: ParamInfo
    start: int
    end: int
    tensors: Mapping[str, Tensor]
    holders: Group | None = None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive elements that share their settings, from element ``first`` of the buffer."""

    rule: UpdateRule
    first: int
    pieces: tuple[ShardPiece, ...]
    values: UpdatePiece

    def state_of(self, piece: ShardPiece) -> dict[str, Tensor]:
        """Return views of the state of one of the pieces."""
        start = piece.world_start - self.first
        part = self.values.part(start, start + piece.world_end - piece.world_start)
        return {MAIN_PARAM: part.param, **part.state}


class OptimizerShard:
    """fp32 parameters and the state of their update rules, of this rank's part of one buffer.

    The main parameters of an fp32 buffer are the buffer itself, without a copy. Those of a bfloat16
    or float16 buffer are fp32 copies, and each step writes the rounded result back into the buffer.

    Args:
        buffer: Parameters and gradients.
        rule: Update rule of parameters whose group names no other.
        weight_decay: Weight decay of parameters that use it.
        groups: Process groups of this rank.
        param_groups: Settings of parameters by name.
    """

    def __init__(
        self,
        buffer: ParamGradBuffer,
        *,
        rule: UpdateRule,
        weight_decay: float,
        groups: ProcessGroups,
        param_groups: Sequence[ParamGroup] = (),
    ) -> None:
        self.buffer = buffer
        device = buffer.param_data.device
        self._main: Tensor | None = None
        if buffer.param_data.dtype != torch.float32:
            numel = buffer.shard_plan.shard_numel
            self._main = torch.zeros(numel, dtype=torch.float32, device=device)
        own = [
            settings_of(info, param_groups, rule=rule, weight_decay=weight_decay)
            for info, _ in buffer.params
        ]
        for (info, param), of in zip(buffer.params, own, strict=True):
            _check_unit(buffer, info, param.shape, of.rule)
        marked = [(piece, own[piece.param_index]) for piece in buffer.owned_pieces()]
        runs = [(run, own[run[0].param_index]) for run in merge_neighbours(marked)]
        self._used = dict.fromkeys((of.rule for _, of in runs), 0)
        placed = [(run, of, self._place(run, of.rule)) for run, of in runs]
        if len(self._used) == 1:  # positions are those of the shard, with its padding
            self._used = dict.fromkeys(self._used, buffer.shard_plan.shard_numel)
        self._storage = {
            rule: {
                tensor.name: torch.zeros(
                    numel // tensor.elements, dtype=getattr(torch, tensor.dtype), device=device
                )
                for tensor in rule.state
            }
            for rule, numel in self._used.items()
        }
        self._runs = [self._make_run(*each) for each in placed]
        self._matrices = [
            (rule, self._make_matrices(rule, [of.rule for of in own], groups))
            for rule in dict.fromkeys(of.rule for of in own)
            if isinstance(rule, MatrixRule)
        ]
        self.copy_params_to_main()

    @torch.no_grad()
    def step(self, controls: Mapping[tuple[float, float], Tensor]) -> Iterator[int]:
        """Update the owned parameters from the reduced gradients, bucket by bucket.

        Args:
            controls: The result of :func:`megacore.ops.optim.decide_step_` for the decays of each
                rule.

        Yields:
            Every bucket of the buffer, when its parameters are updated.

        Sync:
            None on CUDA.
        """
        for rule, matrices in self._matrices:
            matrices.step(controls[rule.decays])
        runs = deque(run for run in self._runs if not isinstance(run.rule, MatrixRule))
        for index, bucket in enumerate(self.buffer.plan.buckets):
            while runs and runs[0].first < bucket.end:
                run = runs.popleft()
                run.rule.update(run.values, controls[run.rule.decays])
            yield index

    @property
    def rules(self) -> set[UpdateRule]:
        """Update rules of the parameters of which this rank has elements."""
        return set(self._storage)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of the rules, and of the main parameters if these are copies."""
        tensors = [tensor for storage in self._storage.values() for tensor in storage.values()]
        if self._main is not None:
            tensors.append(self._main)
        return sum(tensor.nbytes for tensor in tensors)

    def pieces(self) -> list[ParamPiece]:
        """Return every owned range of every parameter with views of its state."""
        return [
            ParamPiece(
                info=self.buffer.params[piece.param_index][0],
                start=piece.param_start,
                end=piece.param_end,
                tensors=run.state_of(piece),
                holders=self.buffer.across if self.buffer.distributed else None,
            )
            for run in self._runs
            for piece in run.pieces
        ]

    @torch.no_grad()
    def copy_params_to_main(self) -> None:
        """Copy the owned part of the parameter buffer to the main parameters."""
        for run in self._runs:
            if run.values.copy_out is not None:
                run.values.param.copy_(run.values.copy_out)

    @torch.no_grad()
    def copy_main_to_params(self) -> None:
        """Round the main parameters into the owned part of the parameter buffer."""
        for run in self._runs:
            run.values.write_copy()

    def _make_matrices(
        self, rule: MatrixRule, rules: Sequence[UpdateRule], groups: ProcessGroups
    ) -> MatrixUpdate:
        pieces = {
            piece.param_index: (
                piece.param_start,
                run.values.part(piece.world_start - run.first, piece.world_end - run.first),
            )
            for run in self._runs
            for piece in run.pieces
            if run.rule == rule
        }
        params = [index for index, each in enumerate(rules) if each == rule]
        return MatrixUpdate(self.buffer, rule, pieces=pieces, params=params, groups=groups)

    def _place(self, run: tuple[ShardPiece, ...], rule: UpdateRule) -> slice:
        """Return the place of a run in the state of its rule."""
        start = run[0].local_start if len(self._used) == 1 else self._used[rule]
        self._used[rule] = start + run[-1].local_end - run[0].local_start
        return slice(start, self._used[rule])

    def _make_run(self, run: tuple[ShardPiece, ...], own: ParamSettings, at: slice) -> _Run:
        world = slice(run[0].world_start, run[-1].world_end)
        local = slice(run[0].local_start, run[-1].local_end)
        elements = {tensor.name: tensor.elements for tensor in own.rule.state}
        in_buffer = self.buffer.param_data[world]
        storage = self._storage[own.rule]
        return _Run(
            rule=own.rule,
            first=world.start,
            pieces=run,
            values=UpdatePiece(
                param=in_buffer if self._main is None else self._main[local],
                grad=self.buffer.grad_data[world],
                state={
                    name: values[at.start // elements[name] : at.stop // elements[name]]
                    for name, values in storage.items()
                },
                copy_out=None if self._main is None else in_buffer,
                lr_scale=own.lr_scale,
                weight_decay=own.weight_decay,
            ),
        )


def _check_unit(
    buffer: ParamGradBuffer, info: ParamInfo, shape: Sequence[int], rule: UpdateRule
) -> None:
    """Check that ranks divide no block of a parameter."""
    unit = rule.unit
    if unit == 1:
        return
    if shape[-1] % unit:
        raise ValueError(
            f"{type(rule).__name__} has blocks of {unit} elements, but {info.name} has "
            f"{shape[-1]} columns on a rank; use a tensor-parallel size that leaves a multiple of "
            f"{unit}, or blocks of {math.gcd(shape[-1], unit)}"
        )
    if buffer.unit % unit:
        raise ValueError(
            f"{type(rule).__name__} has blocks of {unit} elements, which ranks divide in this "
            "buffer; give make_buffers unit_of=lambda info: rule.rule_for(info)[0].unit"
        )
