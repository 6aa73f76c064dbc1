"""Forward and backward passes in the manner that users of Megatron-LM know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from megacore.parallel.process_groups import Group
from megacore.pipeline.activation import ActivationSpec, receives_for
from megacore.pipeline.build import build_schedule, require_schedule_name, schedule_catalog
from megacore.pipeline.execution import BeforeBackward, StageOutput, token_count
from megacore.pipeline.executor import PipelineExecutor
from megacore.pipeline.schedule import Schedule

# Output of the last stage -> (loss, report) or (sum of token losses, number of tokens, report).
LossFunc: TypeAlias = Callable[[Tensor], tuple[Tensor, Any] | tuple[Tensor, Tensor, Any]]
# (data iterator, model chunk) -> (output, loss function).
ForwardStepFunc: TypeAlias = Callable[[Any, Any], tuple[Tensor, LossFunc]]


class StepReports(list[Any]):
    """Reports of the loss function, by microbatch.

    Attributes:
        num_tokens: Sum of the numbers of tokens, on the device; ``None`` if none were returned.
    """

    num_tokens: Tensor | None = None


class ForwardBackwardFunc:
    """Runs steps; made by ``get_forward_backward_func``."""

    def __init__(
        self,
        schedule: str | Schedule,
        *,
        group: Group,
        activation: ActivationSpec | Mapping[int, ActivationSpec],
        group_size: int | None,
        per_token: bool,
    ) -> None:
        if isinstance(schedule, str):
            require_schedule_name(schedule)
        elif schedule.num_ranks != group.size:
            raise ValueError(
                f"the schedule {schedule.name} is for {schedule.num_ranks} ranks, but group "
                f"{group.name} has {group.size}"
            )
        self._given = schedule
        self._group = group
        self._activation = activation
        self._group_size = group_size
        self._per_token = per_token
        self._receives: Literal["ahead", "in_order"] = receives_for(group, activation)
        # By numbers of chunks and microbatches, which are equal on all ranks. Chunks are passed to
        # each run, so that executors keep no model alive.
        self._schedules: dict[tuple[int, int], Schedule] = {}
        self._executors: dict[tuple[int, int], PipelineExecutor] = {}

    def __call__(
        self,
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        forward_only: bool = False,
        before_backward: BeforeBackward | None = None,
    ) -> StepReports:
        """Run one step over all microbatches.

        Args:
            forward_step_func: Called as ``forward_step_func(data_iterator, chunk)`` for every
                forward; returns ``(output, loss_func)``. Before each call the chunk gets the
                previous stage's output by ``chunk.set_input_tensor(hidden)``, ``None`` on the first
                stage. On the last stage ``loss_func(output)`` returns ``(loss, report)``, with the
                mean loss of the microbatch; or ``(sum of token losses, number of tokens, report)``.
            data_iterator: Handed on; with several chunks a list, one per chunk. Every chunk sees
                the microbatches in ascending order, but chunks take turns in the order of the
                schedule: those that read data must not share an iterator.
            model: This rank's chunks, in the order of their stages.
            num_microbatches: Microbatches of this step.
            forward_only: Run the forward passes only, without autograd.
            before_backward: See ``PipelineExecutor.run``.

        Returns:
            On a rank with a last stage the reports of its microbatches in ascending order; else an
            empty list.

        Raises:
            ValueError: If the schedule cannot run these sizes, a chunk has no
                ``set_input_tensor``, a function returns something else, or the data ends too early.
            ConfigError: On all ranks, if a call with new numbers of chunks and microbatches meets
                another schedule on another rank.
        """
        chunks = _chunks_of(model)
        by_chunk = _data_by_chunk(data_iterator, chunks)
        schedule = self._schedule(len(chunks), num_microbatches)
        executor = self._executor(schedule, len(chunks))
        is_last = self._last_stages(schedule, chunks)
        reports: dict[int, Any] = {}

        def forward_step(chunk: nn.Module, hidden: Tensor | None, microbatch: int) -> StageOutput:
            _set_input(chunk, hidden)
            try:
                returned = forward_step_func(by_chunk[id(chunk)], chunk)
            except StopIteration as error:
                # As it is, it would end a loop or a generator around the step without a word.
                raise ValueError(
                    f"the data iterator ended before microbatch {microbatch} (of "
                    f"{num_microbatches}, from 0); every chunk that reads data needs one of its "
                    "own, with that many entries per step"
                ) from error
            output, loss_func = _require_pair(returned)
            if not is_last[id(chunk)]:
                return output
            loss: Tensor
            loss, *num_tokens, reports[microbatch] = _require_results(loss_func(output))
            if not num_tokens:
                return loss / num_microbatches
            tokens = token_count(num_tokens[0], device=loss.device)
            if self._per_token:
                return loss, tokens
            mean = loss / tokens.clamp(min=1).float()
            return mean / num_microbatches, tokens

        losses = executor.run(
            forward_step,
            forward_only=forward_only,
            before_backward=before_backward,
            chunks=chunks,
        )
        result = StepReports(report for _, report in sorted(reports.items()))
        result.num_tokens = losses.num_tokens
        return result

    def _executor(self, schedule: Schedule, num_chunks: int) -> PipelineExecutor:
        key = (num_chunks, schedule.num_microbatches)
        if key not in self._executors:
            self._executors[key] = PipelineExecutor(
                schedule.program(self._group.position, receives=self._receives),
                None,
                group=self._group,
                activation=self._activation,
                schedule=schedule,
            )
        return self._executors[key]

    def _last_stages(self, schedule: Schedule, chunks: list[nn.Module]) -> dict[int, bool]:
        """By a chunk's id, whether it is a last stage."""
        length = schedule.num_stages // schedule.num_chains
        stages = schedule.stages(self._group.position)
        return {
            id(chunk): (stage + 1) % length == 0
            for chunk, stage in zip(chunks, stages, strict=False)  # the executor compares numbers
        }

    def _schedule(self, num_chunks: int, num_microbatches: int) -> Schedule:
        if isinstance(self._given, Schedule):
            if self._given.num_microbatches != num_microbatches:
                raise ValueError(
                    f"the schedule {self._given.name} is for {self._given.num_microbatches} "
                    f"microbatches, but num_microbatches is {num_microbatches}; give the schedule "
                    "by name"
                )
            return self._given
        key = (num_chunks, num_microbatches)
        if key not in self._schedules:
            self._require_chunks(num_chunks)
            self._schedules[key] = build_schedule(
                self._given,
                num_ranks=self._group.size,
                num_microbatches=num_microbatches,
                num_chunks=num_chunks,
                group_size=self._group_size,
            )
        return self._schedules[key]

    def _require_chunks(self, num_chunks: int) -> None:
        """Check the number of chunks, in words of the caller, who gives them as ``model``."""
        catalog = {info.name: info.num_chunks for info in schedule_catalog()}
        needed = catalog.get(str(self._given), 0)
        if needed in (0, num_chunks):
            return
        wanted = "one module" if needed == 1 else f"a list of {needed} modules"
        # A schedule without a pipeline has no place for several ranks.
        fitting = [name for name, number in catalog.items() if number in (0, num_chunks)]
        alone = self._group.size == 1
        others = ", ".join(name for name in fitting if alone or name != "no_pipelining")
        raise ValueError(
            f"model must be {wanted} for schedule {self._given!r} (the model chunks of this rank), "
            f"got {num_chunks}; or choose one of {others}"
        )


def _chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The chunks of a rank, one module each."""
    is_one = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
    chunks: list[nn.Module] = [model] if is_one else list(model)  # type: ignore[arg-type, list-item]
    if len({id(chunk) for chunk in chunks}) < len(chunks):
        raise ValueError(
            "one module stands for several model chunks; give each stage a module of its own "
            "(they may share parameters)"
        )
    return chunks


def _require_pair(returned: Any) -> tuple[Tensor, LossFunc]:
    """Check that the result of a forward step function has the form of `ForwardStepFunc`."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    many = isinstance(returned, (tuple, list))
    shown = f"{len(returned)} values" if many else f"a {type(returned).__name__}"
    raise ValueError(
        f"the forward step function returned {shown}; it must return (output, loss function)"
    )


def _require_results(returned: Any) -> Sequence[Any]:
    """Check that the result of a loss function has the form of `LossFunc`."""
    if isinstance(returned, (tuple, list)) and len(returned) in (2, 3):
        if isinstance(returned[0], Tensor):
            return returned
        shown = f"{type(returned[0]).__name__} first"
    elif isinstance(returned, (tuple, list)):
        shown = f"{len(returned)} values"
    else:
        shown = f"a {type(returned).__name__}"
    raise ValueError(
        f"the loss function returned {shown}; it must return (loss, report), or (sum of token "
        "losses, number of tokens, report), with a tensor as the loss"
    )


def _data_by_chunk(data_iterator: Any, chunks: list[nn.Module]) -> dict[int, Any]:
    """Each chunk's data, by the chunk's id."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    if len(iterators) != len(chunks):
        raise ValueError(
            f"there are {len(chunks)} model chunks, but {len(iterators)} data iterators; give "
            "one per chunk"
        )
    return {id(chunk): data for chunk, data in zip(chunks, iterators, strict=True)}


def _set_input(chunk: nn.Module, hidden: Tensor | None) -> None:
    set_input_tensor: Any = getattr(chunk, "set_input_tensor", None)
    if set_input_tensor is None:
        raise ValueError(
            f"{type(chunk).__name__} has no set_input_tensor(hidden), by which a model "
            "chunk gets its input; add one, or use megacore.pipeline.PipelineExecutor"
        )
    set_input_tensor(hidden)


def get_forward_backward_func(
    schedule: str | Schedule = "1f1b",
    *,
    group: Group,
    activation: ActivationSpec | Mapping[int, ActivationSpec],
    group_size: int | None = None,
    per_token: bool = False,
) -> ForwardBackwardFunc:
    """Return a function that runs the forward and backward passes of a step.

    It is called as in Megatron-LM, with the same forward step and loss functions. What is global
    there (process groups, settings) or given with every call (``seq_length``,
    ``micro_batch_size``: the shapes) is given here, once. Gradients add up in the parameters'
    ``grad``, or wherever hooks put them.

    Args:
        schedule: Name, as of ``build_schedule``, or a schedule for one number of microbatches.
        group: The pipeline's ranks, ``ProcessGroups.pp``.
        activation: What stages send to each other.
        group_size: See ``build_schedule``.
        per_token: Sums of token losses go into the backward pass as they are; divide the gradients
            by the total of ``num_tokens`` (``DistributedOptimizer.step(num_tokens=...)`` does,
            without waiting for the device). Otherwise every microbatch counts by its mean.

    Raises:
        ValueError: If ``schedule`` names none, or is for another number of ranks.

    Example:
        >>> import torch
        >>> from megacore.pipeline import ActivationSpec, get_forward_backward_func
        >>> class Model(torch.nn.Linear):
        ...     def set_input_tensor(self, hidden):
        ...         pass  # the only stage reads its data
        >>> def forward_step(data, model):
        ...     output = model(next(data))
        ...     return output, lambda out: (out.mean(), {"mean": out.mean().item()})
        >>> step = get_forward_backward_func(
        ...     group=Group.solo(),
        ...     activation=ActivationSpec(shape=(1,), dtype=torch.float32, device="cpu"),
        ... )
        >>> model = Model(2, 1)
        >>> reports = step(forward_step_func=forward_step, model=model, num_microbatches=2,
        ...                data_iterator=iter([torch.ones(2), torch.zeros(2)]))
        >>> len(reports), model.weight.grad.tolist()
        (2, [[0.5, 0.5]])
    """
    return ForwardBackwardFunc(
        schedule,
        group=group,
        activation=activation,
        group_size=group_size,
        per_token=per_token,
    )
