"""Optimizer over gradient buffers, with its state sharded over data-parallel ranks (ZeRO-1)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacore import host_values
from megacore.buffers import GradReducer, ParamGatherer, ParamGradBuffer
from megacore.ops.optim import (
    ControlAt,
    StateAt,
    StepRules,
    SumsAt,
    decide_step_,
    sum_of_squares,
)
from megacore.optim.frozen import FrozenParams
from megacore.optim.gradients import (
    count_zeros,
    grad_ranges,
    needs_sum,
    norm_parts,
    sum_partial_grads,
    sum_shared_grads,
)
from megacore.optim.matrix_rule import MatrixRule
from megacore.optim.options import OptimizerOptions
from megacore.optim.param_group import ParamGroup, check_patterns
from megacore.optim.shard import OptimizerShard, ParamPiece
from megacore.optim.step_result import StepResult
from megacore.optim.update_rule import UpdateRule
from megacore.options import check_options
from megacore.parallel.async_collectives import PendingCollective
from megacore.parallel.collectives import all_gather_objects, all_reduce_
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megacore.pipeline.clock import PhaseClock, in_phase

# Numbers in a checkpoint, in the order of the state on the device.
_SCALARS = tuple(position.name.lower() for position in StateAt)


class DistributedOptimizer:
    """Optimizer with its state sharded over the data-parallel ranks, or replicated on each.

    The update itself is that of ``options.rule``, AdamW by default, or of the group of a parameter.

    A step processes the gradients accumulated in the buffers: sums over tied replicas and over
    tp, mean over data-parallel ranks, norm and clipping, fp32 update of the owned slices,
    all-gather of the updated parameters. If any gradient is not finite, all ranks skip the update.

    Args:
        buffers: The buffers of all parameters of this rank, see
            :func:`megacore.buffers.make_buffers`.
        groups: Process groups of this rank.
        options: Update rule, clipping, loss scale and overlaps. Default: ``OptimizerOptions()``.
        modules: The model of this rank; needed if ``overlap`` includes the parameters.
        param_groups: Learning rate factor, weight decay and update rule of parameters by name;
            equal on every rank.
        frozen: Parameters of this rank that are not trained. A rank may have no others, and then no
            buffer.
        clock: Measures the phases of :meth:`step`.

    Attributes:
        gathers_at_once: If ``overlap`` includes the parameters: start their gather at the end of a
            step, instead of in the next calls of their modules.

    Raises:
        ValueError: If there is no parameter, a group of ``param_groups`` gets no parameter of any
            rank, ``modules`` lacks a parameter whose gather overlaps, or a rule is of whole
            matrices and no parameter is described as such.

    Example:
        >>> from megacore.buffers import make_buffers
        >>> from megacore.parallel.param_info import ParamInfo
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> info = ParamInfo(name="w", full_shape=(2,), tp_dim=None, weight_decay=False)
        >>> groups, options = ProcessGroups.single(), OptimizerOptions(clip_grad=0.0)
        >>> buffers = make_buffers([(info, weight)], groups=groups)
        >>> optimizer = DistributedOptimizer(buffers, groups=groups, options=options)
        >>> (weight * torch.tensor([3.0, -4.0])).sum().backward()
        >>> optimizer.step(lr=0.5).grad_norm, [round(x, 4) for x in weight.tolist()]
        (5.0, [0.5, 1.5])
    """

    def __init__(
        self,
        buffers: Sequence[ParamGradBuffer],
        *,
        groups: ProcessGroups,
        options: OptimizerOptions | None = None,
        modules: Sequence[nn.Module] = (),
        param_groups: Sequence[ParamGroup] = (),
        frozen: FrozenParams | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        options = OptimizerOptions() if options is None else options
        check_options(options, OptimizerOptions, "options")
        params = [pair for buffer in buffers for pair in buffer.params]
        params += () if frozen is None else frozen.params
        if not params:
            raise ValueError("the optimizer needs at least one buffer of parameters")
        check_patterns(param_groups, [info.name for info, _ in params], groups)
        self.buffers = tuple(buffers)
        self._groups = groups
        self._options = options
        self._clock = clock
        self._device = params[0][1].device
        self._shards = [
            OptimizerShard(
                buffer,
                rule=options.rule,
                weight_decay=options.weight_decay,
                groups=groups,
                param_groups=param_groups,
            )
            for buffer in self.buffers
        ]
        named = [options.rule, *(group.rule for group in param_groups)]
        self._check_matrices(named, [info for info, _ in params])
        # Pairs of decays, for whose bias corrections a step is decided.
        rules = {options.rule}.union(*(shard.rules for shard in self._shards))
        self._decays = sorted({rule.decays for rule in rules})
        self._scales_loss = any(param.dtype == torch.float16 for _, param in params)
        self._state = torch.zeros(len(StateAt), dtype=torch.float64, device=self._device)
        self._state[StateAt.LOSS_SCALE] = options.loss_scale if self._scales_loss else 1.0
        self._grad_ranges = grad_ranges(self.buffers, groups)
        self._reducer: GradReducer | None = None
        if options.overlaps_grads and buffers:
            self._reducer = GradReducer(self.buffers, waits=lambda info: needs_sum(info, groups))
        self._gatherer: ParamGatherer | None = None
        if options.overlaps_params and buffers:
            self._gatherer = ParamGatherer(self.buffers, modules)
        self._is_reduced = False
        self.gathers_at_once = True

    def _check_matrices(
        self, rules: Collection[UpdateRule | None], infos: Sequence[ParamInfo]
    ) -> None:
        """Check that the model has matrices, on any rank; collective for rules that need them.

        They may all be frozen, or in groups with other rules.
        """
        needs_some = [type(rule).__name__ for rule in rules if isinstance(rule, MatrixRule)]
        if not needs_some or self._groups.world.is_fake:  # the model of other ranks is not known
            return
        has_some = any(info.matrices is not None for info in infos)
        if not any(all_gather_objects(has_some, self._groups.world)):
            raise ValueError(
                f"{needs_some[0]} computes with whole matrices, but no parameter is described"
                " as one: set ParamInfo.matrices, as Matrices() for a weight of (rows, columns)"
            )

    def __repr__(self) -> str:
        numel = sum(buffer.plan.numel for buffer in self.buffers)
        state = sum(shard.state_bytes for shard in self._shards)
        how = "sharded" if all(buffer.distributed for buffer in self.buffers) else "replicated"
        return (
            f"<DistributedOptimizer: {numel:,} elements in {len(self.buffers)} buffers, "
            f"{how} state of {state:,} bytes on this rank>"
        )

    @property
    def step_count(self) -> int:
        """Number of updates; skipped steps do not count.

        Sync:
            Waits for the device, as the other numbers of this class do.
        """
        return int(host_values.read(self._state[StateAt.STEP_COUNT], "number of updates"))

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped because of a non-finite gradient."""
        return int(host_values.read(self._state[StateAt.NUM_SKIPPED], "skipped steps"))

    @num_skipped.setter
    def num_skipped(self, value: int) -> None:
        self._state[StateAt.NUM_SKIPPED] = value

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before the backward pass; a power of two.

        The factor is 1 without float16 parameters; otherwise it adapts after every step.
        """
        if not self._scales_loss:
            return 1.0
        return float(host_values.read(self._state[StateAt.LOSS_SCALE], "loss scale"))

    def loss_scale_on_device(self) -> Tensor | float:
        """Return ``loss_scale`` without host sync: a copy on the device, fp32, 0-d; or 1.0."""
        return self._state[StateAt.LOSS_SCALE].float() if self._scales_loss else 1.0

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state on this rank: moments and copies of main parameters."""
        return sum(shard.state_bytes for shard in self._shards)

    def zero_grads(self) -> None:
        """Set all gradients to zero; call it before the first backward pass of a step.

        Raises:
            ValueError: If a parameter has left its buffer or was frozen since.
        """
        self._is_reduced = False
        if self._reducer is not None:
            self._reducer.start()
        for buffer in self.buffers:
            buffer.zero_grads()

    def before_backward(self, *, is_last: bool) -> None:
        """Announce a backward pass; needed if ``overlap`` includes the gradients.

        Args:
            is_last: Whether it is the last one of its model chunk in this step: gradients that it
                completes are final, and their buckets may be reduced from then on.
        """
        if is_last:
            self.finish_param_gather()  # so that all ranks gather before they reduce
        if self._reducer is not None:
            self._reducer.before_backward(is_last=is_last)

    def finish_param_gather(self) -> None:
        """Make the weights of all parameters current on every rank. Collective.

        Needed before weights are read other than by calls of the modules that own them. A no-op
        if ``overlap`` does not include the parameters.
        """
        if self._gatherer is not None:
            self._gatherer.finish()

    def missing_grads(self) -> list[str]:
        """Return the names of parameters without a gradient since :meth:`zero_grads`.

        Their gradients count as 0.
        """
        return [name for buffer in self.buffers for name in buffer.missing_grads()]

    def grad_states(self) -> tuple[Any, ...]:
        """Return the bookkeeping of gradients, for :meth:`note_replay`."""
        return tuple(buffer.grad_state() for buffer in self.buffers)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Context of the passes of a step, and later work, that a CUDA graph records.

        A graph repeats the same work, so the recorded work must not differ between steps: the
        passes gather all weights, and transfers are not polled. No transfer may be in flight on
        entry; on exit there is none if :meth:`reduce_grads` was called inside.
        """
        if self._gatherer is not None:
            self._gatherer.restart()
        if self._reducer is not None:
            self._reducer.polls_transfers = False
        try:
            yield
        except BaseException:
            if self._device.type == "cuda":
                self._forget_transfers()
            raise
        finally:
            if self._reducer is not None:
                self._reducer.polls_transfers = True

    def note_replay(self, states: tuple[Any, ...], *, updated: bool) -> None:
        """Update the bookkeeping after a CUDA graph has replayed the work inside :meth:`captured`.

        Args:
            states: The value of :meth:`grad_states` after the capture.
            updated: Whether :meth:`step` is part of the graph.
        """
        for buffer, own in zip(self.buffers, states, strict=True):
            buffer.load_grad_state(own)
        self._is_reduced = not updated
        if self._gatherer is not None:
            self._gatherer.note_replay(updated=updated)

    def reduce_grads(self) -> None:
        """Sum and average the gradients, the first part of :meth:`step`. Collective.

        A no-op if it was called since :meth:`zero_grads`.
        """
        if self._is_reduced:
            return
        sum_shared_grads(self.buffers, self._groups)
        sum_partial_grads(self.buffers, self._groups)
        if self._reducer is not None:
            self._reducer.finish()
        else:
            for buffer in self.buffers:
                buffer.reduce_scatter_grads()
        self._is_reduced = True

    def step(
        self,
        *,
        lr: float | Tensor,
        extra: Tensor | None = None,
        num_tokens: Tensor | None = None,
        veto: Tensor | None = None,
        mean_limit: Tensor | None = None,
        count_at: int | None = None,
    ) -> StepResult:
        """Reduce the gradients and update the parameters. Collective over the world.

        Args:
            lr: Learning rate of this step, equal on every rank; a 0-d fp64 tensor on the device
                where a CUDA graph records the step.
            num_tokens: For losses that are sums over tokens (per-token scaling): number of tokens
                in this rank's gradients, one number, any dtype, on any device. The gradient is then
                the sum over all data-parallel ranks divided by the sum of ``num_tokens`` over the
                world (by 1 if that is less), instead of the mean over ranks. As with a loss in
                ``extra``, ranks with the same tokens as another one (other tensor-parallel
                positions and pipeline stages) pass 0. Either all ranks pass a number or none does.
                The number is part of the step's all-reduce, so there is no host sync.
            extra: A few numbers, 1-D, of equal length on every rank (for example the loss), that
                are summed over the world in the single all-reduce of the step.
            veto: A number, on the device: if it is not 0 on some rank, no rank changes anything,
                including the counts of steps. Either all ranks pass one or none does.
            mean_limit: A number, on the device: if ``extra[0] / extra[1]`` of the summed ``extra``
                is larger, as for ``veto``.
            count_at: Index of a count in ``extra``: if the summed count is 0, there is nothing to
                learn from, as for ``veto``.

        Returns:
            The gradient norm, whether the update was skipped, and the summed ``extra``.

        Sync:
            None on CUDA: skipping, clipping and the loss scale are decided on the device. Reading
            the result waits for the device.

        Raises:
            ValueError: If ``lr`` is negative or not finite.
        """
        if isinstance(lr, (int, float)) and not 0.0 <= lr < math.inf:
            raise ValueError(f"lr must be a number of at least 0, got {lr}")
        with in_phase(self._clock, "grad_reduce"):
            self.reduce_grads()
        self._is_reduced = False
        sums = self._reduce_over_world(extra, num_tokens, veto)
        first_extra = len(SumsAt)
        is_vetoed = None
        if veto is not None:
            is_vetoed = sums[first_extra] != 0.0
            first_extra += 1
        if mean_limit is not None:
            is_above = sums[first_extra] > mean_limit * sums[first_extra + 1]
            is_vetoed = is_above if is_vetoed is None else is_vetoed | is_above
        if count_at is not None:
            is_empty = sums[first_extra + count_at] == 0.0
            is_vetoed = is_empty if is_vetoed is None else is_vetoed | is_empty
        with in_phase(self._clock, "param_gather"):
            self.finish_param_gather()
        with in_phase(self._clock, "optimizer"):
            controls = self._decide(sums, per_token=num_tokens is not None, is_vetoed=is_vetoed)
            for control in controls.values():
                control[ControlAt.LR].fill_(lr)
            gathers = self._update(controls)
        with in_phase(self._clock, "param_gather"):
            self._finish_update(gathers)
        control = controls[self._decays[0]]  # they differ in their bias corrections only
        is_skipped = 1.0 - control[ControlAt.IS_APPLIED]
        numbers = control[ControlAt.GRAD_NORM], is_skipped, self._state[StateAt.NUM_SKIPPED]
        return StepResult(torch.cat((torch.stack(numbers), sums[first_extra:])))

    @torch.no_grad()
    def param_square_sum(self) -> Tensor:
        """Compute this rank's share of the squared norm of the weights; 0-d fp64, on the device.

        Frozen weights do not count.

        Over all ranks, each weight is counted once.

        Sync:
            None on CUDA.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for item in self._grad_ranges:
            if item.counted:
                total += sum_of_squares(item.param)
        return total

    @torch.no_grad()
    def count_zero_grads(self) -> Tensor:
        """Count this rank's share of the zeros in the gradient of a step. Collective.

        Over all ranks, each element is counted once. Reduces the gradients first, see
        :meth:`reduce_grads`.

        Returns:
            ``(1,)``, fp64, on the device: a number for ``extra`` of :meth:`step`.

        Sync:
            None on CUDA.
        """
        with in_phase(self._clock, "grad_reduce"):
            self.reduce_grads()
        with in_phase(self._clock, "optimizer"):
            return count_zeros(self._grad_ranges, device=self._device)

    def _finish_update(self, gathers: Sequence[PendingCollective]) -> None:
        if self._gatherer is not None:
            self._gatherer.start(at_once=self.gathers_at_once)
            return
        for gather in gathers:
            gather.wait()
        for buffer in self.buffers:
            buffer.wait_until_params_free()

    def pieces(self) -> list[ParamPiece]:
        """Return every range of every parameter that this rank optimizes, with its state.

        Over the data-parallel ranks, each element is in one piece; without sharding, each rank has
        all pieces. Tensor-parallel replicas and tied copies appear on each of their ranks.
        """
        return [piece for shard in self._shards for piece in shard.pieces()]

    def scalars(self) -> dict[str, float | int]:
        """Return the numbers of the optimizer state for a checkpoint, equal on every rank.

        ``step_count``, ``num_skipped`` and, with float16, ``loss_scale`` and
        ``loss_scale_good_steps`` (steps since the loss scale last changed). Give them to
        :meth:`load_scalars`.

        Sync:
            Waits for the device.
        """
        step_count, num_skipped, loss_scale, good_steps = host_values.read(
            self._state, "state of the optimizer"
        )
        scalars: dict[str, float | int] = {
            "step_count": int(step_count),
            "num_skipped": int(num_skipped),
        }
        if self._scales_loss:
            scalars |= {"loss_scale": loss_scale, "loss_scale_good_steps": int(good_steps)}
        return scalars

    def load_scalars(self, scalars: Mapping[str, float | int]) -> None:
        """Load numbers from :meth:`scalars`; missing ones are unchanged.

        A loss scale is ignored if this optimizer has none, since a checkpoint may have another
        number format. Training in float16 from a checkpoint without a loss scale starts with that
        of its options.

        Call :meth:`finish_load` as well, after filling the tensors of :meth:`pieces`.

        Raises:
            ValueError: If a name is unknown or a number is out of range.
        """
        state = host_values.read(self._state, "state of the optimizer")
        values = dict(zip(_SCALARS, state, strict=True))
        for name, value in scalars.items():
            if name not in values:
                raise ValueError(f"unknown scalar {name!r}; use some of {', '.join(values)}")
            least = 1 if name == "loss_scale" else 0
            if not least <= value < math.inf:
                raise ValueError(f"{name} must be a number of at least {least}, got {value}")
            if self._scales_loss or not name.startswith("loss_scale"):
                values[name] = value
        self._state.copy_(torch.tensor(list(values.values()), dtype=torch.float64))

    def reload_model_params(self) -> None:
        """Update the state after an external write of weights, such as ``load_state_dict``.

        With 16-bit parameters, the optimizer keeps fp32 copies of its shard, from which every step
        writes the weights; without this call, the next step reverts such a change. Moments are
        unchanged. Collective: afterwards all ranks have the values of the owner of each slice.

        Raises:
            RuntimeError: If a gather of weights is in flight, which would overwrite the new values;
                call :meth:`finish_param_gather` before writing.
        """
        if self._gatherer is not None and not self._gatherer.is_finished:
            raise RuntimeError(
                "weights of the last step are still being collected and would overwrite those that "
                "were written; call finish_param_gather() before writing, then this"
            )
        for shard in self._shards:
            shard.copy_params_to_main()
            shard.buffer.all_gather_params()

    def finish_load(self, step_count: int) -> None:
        """Publish state that was loaded into the tensors of :meth:`pieces`. Collective.

        Args:
            step_count: Number of updates in the loaded state.

        Raises:
            ValueError: If ``step_count`` is negative.
        """
        if step_count < 0:
            raise ValueError(f"step_count is {step_count}; it cannot be negative")
        self._state[StateAt.STEP_COUNT] = step_count
        self.finish_param_gather()
        for shard in self._shards:
            shard.copy_main_to_params()
            shard.buffer.all_gather_params()

    def _forget_transfers(self) -> None:
        """Discard transfers that were recorded but will never run."""
        if self._gatherer is not None:
            self._gatherer.forget()
        if self._reducer is not None:
            self._reducer.forget()

    @torch.no_grad()
    def _reduce_over_world(
        self, extra: Tensor | None, num_tokens: Tensor | None, veto: Tensor | None
    ) -> Tensor:
        """Sum ``[norm^2, non-finite ranks, tokens, *veto, *extra]`` over the world."""
        with in_phase(self._clock, "optimizer"):
            parts = [norm_parts(self._grad_ranges, device=self._device)]
        tokens = torch.zeros(1, device=self._device) if num_tokens is None else num_tokens
        for numbers in (tokens.reshape(1), None if veto is None else veto.reshape(1), extra):
            if numbers is not None:
                parts.append(numbers.to(self._device, torch.float64, non_blocking=True))
        sums = torch.cat(parts)
        with in_phase(self._clock, "grad_reduce"):
            all_reduce_(sums, self._groups.world)
        return sums

    @torch.no_grad()
    def _decide(
        self, sums: Tensor, *, per_token: bool, is_vetoed: Tensor | None
    ) -> dict[tuple[float, float], Tensor]:
        """Return the decision on the step for each pair of decays, and update the state."""
        before = self._state
        if is_vetoed is not None or len(self._decays) > 1:
            before = self._state.clone()
        if is_vetoed is not None:
            sums[SumsAt.NUM_NON_FINITE] += is_vetoed.double()
        controls = {}
        for number, decays in enumerate(self._decays):
            control = torch.empty(len(ControlAt), dtype=torch.float64, device=self._device)
            state = self._state if number == 0 else before.clone()
            decide_step_(state, sums, control, self._rules(decays, per_token=per_token))
            control[ControlAt.STEP_COUNT] = state[StateAt.STEP_COUNT]
            controls[decays] = control
        if is_vetoed is not None:
            self._state.copy_(torch.where(is_vetoed, before, self._state))
        return controls

    def _rules(self, decays: tuple[float, float], *, per_token: bool) -> StepRules:
        options = self._options
        return StepRules(
            beta1=decays[0],
            beta2=decays[1],
            clip_grad=options.clip_grad,
            loss_scale_interval=options.loss_scale_interval if self._scales_loss else 0,
            num_averaged=self._groups.dp_cp.size if per_token else 0,
        )

    def _update(self, controls: Mapping[tuple[float, float], Tensor]) -> list[PendingCollective]:
        """Update this rank's shard, and start to gather each bucket unless a gatherer does."""
        gathers = []
        for shard in self._shards:
            for bucket in shard.step(controls):
                if self._gatherer is None:
                    gathers.append(shard.buffer.start_gather(bucket))
        return gathers
