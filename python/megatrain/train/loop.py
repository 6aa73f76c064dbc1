"""The training loop of one rank: steps, validation, checkpoints, metrics, report."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import torch

from megacore.errors import CheckpointError, DivergedError
from megacore.parallel.collectives import barrier
from megacore.pipeline import ActionRecorder
from megatrain.checkpoint import (
    CheckpointSaver,
    FoundCheckpoint,
    TrainState,
    find_checkpoint,
)
from megatrain.checkpoint.model_files import (
    FOLDER_NAME,
    end_of_documents,
    files_of_run,
    keep_files,
)
from megatrain.checkpoint.run_folder import choose_resume, hold_folders, is_inside, move_aside
from megatrain.checkpoint.tokenizer_files import TOKENIZER_NAME
from megatrain.config import FOLDER_OF_FILE, ResolvedConfig, config_to_toml
from megatrain.config.debug import FEW_SOURCES
from megatrain.config.schedule_file import COPY_NAME
from megatrain.data.loading import load_run_data
from megatrain.launch.context import RankContext
from megatrain.launch.stopping import STOPPED_EARLY
from megatrain.report import RunInfo, write_info
from megatrain.train.callbacks import Callback, make_callbacks
from megatrain.train.console import Console, RunSummary
from megatrain.train.control import RunControl, Verdict
from megatrain.train.diagnosis import NonFiniteSearch, first_of_all
from megatrain.train.initial_weights import load_base, load_initial_weights
from megatrain.train.kernels import kernel_notes
from megatrain.train.metrics import StepRecord
from megatrain.train.profiling import StepProfiler
from megatrain.train.references import check_references
from megatrain.train.results import run_info, write_results
from megatrain.train.resume import resume_run, run_state
from megatrain.train.saver import check_room_to_save, make_saver
from megatrain.train.step import Evaluation, StepMetrics
from megatrain.train.trainer import Trainer, build_trainer
from megatrain.train.trainer_parts import make_groups
from megatrain.train.watch import RunWatch
from megatrain.train.writers import RunFileGuard, RunWriters, check_writers

STOPPED_NAME = "stopped"  # exists while a run has stopped early and is to be continued


def train(config: ResolvedConfig, context: RankContext) -> int:
    """Run the training of ``config`` on one rank, from construction to report.

    Rank 0 writes ``config.toml``, ``run.json``, ``metrics.jsonl``, ``timeline.json`` and
    ``report.html`` into ``run.dir``; every rank writes its pieces of the checkpoints.

    Args:
        config: Resolved configuration, the same on every rank.
        context: Rank, world size and device of this process.

    Returns:
        Exit code: 0, or 75 (0 under torchrun) if the run stopped early and has saved its state.

    Raises:
        MegacoreError: For every error that a user can fix; also if the last checkpoint could not be
            saved, with ``checkpoint.on_failure = "continue"``.
    """
    started = time.monotonic()
    check_writers(config.run.writers)
    groups = make_groups(config, context.world_size, calls=context.calls)
    data = load_run_data(config)  # before anything is written
    run_dir = Path(config.run.dir)
    with contextlib.ExitStack() as held:
        held.enter_context(hold_folders(run_dir, config.checkpoint, groups))
        resume = choose_resume(config, groups, restarts=context.restarts)
        found = find_checkpoint(resume, config.checkpoint.dir, groups=groups)
        trainer = build_trainer(
            config,
            world_size=context.world_size,
            device=context.device,
            calls=context.calls,
            data=data,
            groups=groups,
            # Weights that a file replaces are not drawn.
            initialize=found.path is None and config.checkpoint.load_weights is None,
        )
        # Until here a signal ends the rank at once: preparing data may take long.
        held.enter_context(context.stop.deferred())
        callbacks = make_callbacks(config)
        control = RunControl(
            config.train,
            config.run,
            context,
            save_interval_s=config.checkpoint.interval_s,
            started=started,
        )
        saver: CheckpointSaver | None = None
        notes: tuple[str, ...] = ()
        if config.checkpoint.saves:
            saver, notes = make_saver(trainer, ranks_per_host=context.local_world_size)
            notes += check_room_to_save(trainer, saver)
        trainer, start, of_state = _load_state(trainer, found, control, callbacks)
        # Last, after all checks, so that a failed start does not move earlier results.
        moved = move_aside(run_dir, config.checkpoint, found.path, trainer.groups)
        run = _Run(
            trainer,
            found,
            saver,
            control,
            start=start,
            notes=moved + notes + of_state,
            callbacks=callbacks,
        )
        try:
            stopped = run.loop()
            run.finish(wall_time_s=time.monotonic() - started, stopped=stopped)
        except BaseException:
            run.close(failed=True)
            raise
        run.close(failed=False)
        run.check_saved()
        if context.rank == 0 and stopped is not None:
            # For scripts: torchrun exits with 0 or 1, whatever the ranks exit with.
            (run_dir / STOPPED_NAME).write_text(f"{stopped}\n")
    return _exit_code(context, stopped, is_saved=saver is not None)


def _load_state(
    trainer: Trainer,
    found: FoundCheckpoint,
    control: RunControl,
    callbacks: Sequence[Callback],
) -> tuple[Trainer, TrainState, tuple[str, ...]]:
    """Load what the run begins with: base weights, a checkpoint or weights; collective.

    Returns:
        The trainer, where the run begins, and notes.
    """
    notes: tuple[str, ...] = ()
    given = trainer.config.checkpoint.load_weights
    if trainer.config.lora.is_on:
        base, notes = load_base(trainer, given, adapters=found.path)
        trainer = replace(trainer, base=base)
    trainer, start, resumed = resume_run(trainer, found, control, callbacks)
    notes += resumed
    if trainer.graphs is not None:  # the choice of kernels is final
        notes += trainer.graphs.leave_out_experts()
    if given is not None and found.path is None:
        notes += load_initial_weights(trainer, given)
        check_references(trainer)
    return trainer, start, notes


def _exit_code(context: RankContext, stopped: str | None, *, is_saved: bool) -> int:
    if stopped is None:
        return 0
    if not is_saved:
        return 128 + (context.stop.signal or signal.SIGTERM)
    # torchrun takes any other code for a failure, and restarts the ranks.
    return 0 if context.launched_by == "torchrun" else STOPPED_EARLY


class _Run:
    """Steps of one rank, with their validation, metrics, checkpoints and console output."""

    def __init__(
        self,
        trainer: Trainer,
        found: FoundCheckpoint,
        saver: CheckpointSaver | None,
        control: RunControl,
        *,
        start: TrainState,
        notes: tuple[str, ...] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        config, first_step = trainer.config, start.step
        self._trainer = trainer
        self._saver = saver
        self._callbacks = callbacks
        self._control = control
        self._next_step = self._saved_step = start.step
        self._config = config
        self._first_step = first_step
        # Not 0 if the batch size has changed, so that the data continue at the same sample.
        self._tokens_per_step = config.train.global_batch_size * config.model.seq_length
        assert start.tokens is not None
        # For learning rates over samples or tokens, too.
        self._sample_offset = start.samples - start.step * config.train.global_batch_size
        self._token_offset = start.tokens - start.step * self._tokens_per_step
        self._is_main = trainer.groups.rank == 0
        self._dir = Path(config.run.dir)
        self._is_due_to_save = False
        self._save_failure: str | None = None  # of the newest save
        self._validation_loss: float | None = None
        self._has_noted_empty = False
        self._last: StepRecord | None = None
        self._last_loss: float | None = None
        self._tokens = self._seconds = 0.0
        self._step_times_s: list[float] = []
        self._recorder: ActionRecorder | None = None
        self._traced_step = self._choose_traced_step()
        self._started_at = datetime.now()
        self._resumed_from = found.path
        self._console = Console(
            steps=config.train.steps,
            first_step=first_step,
            plain=config.run.plain,
            silent=not self._is_main,
        )
        self._watch = RunWatch(trainer)
        self._profiler = StepProfiler(
            config.debug.profiled,
            self._dir,
            world=trainer.groups.world,
            device=trainer.device,
            settle=trainer.optimizer.finish_param_gather,
        )
        self._files = RunFileGuard(
            self._console.note, tolerant=config.checkpoint.on_failure == "continue"
        )
        self._writers: RunWriters | None = None
        if self._is_main:
            self._dir.mkdir(parents=True, exist_ok=True)
            (self._dir / STOPPED_NAME).unlink(missing_ok=True)
            self._write_config(config)
            self._writers = RunWriters(
                config.run,
                config.model_dump(mode="json"),
                first_step=first_step,
                guard=self._files,
            )
            self._console.start(
                self._info(wall_time_s=None),
                layout=trainer.layout_text(),
                folder=self._dir,
                notes=config.notes
                + trainer.data.notes
                + found.skipped
                + notes
                + trainer.kernels.notes()
                + kernel_notes(config.train, trainer.chunks, device=trainer.device),
            )

    def _write_config(self, config: ResolvedConfig) -> None:
        """Write the configuration, its schedule file and the model's files: a folder that moves."""
        origin, weights = self._resumed_from, config.checkpoint.load_weights
        if origin is None and weights is not None:
            origin = Path(weights)
        ends = functools.partial(end_of_documents, self._trainer.data, eod=config.data.eod)
        files = files_of_run(config.data.tokenizer, origin, ends)
        folders = [self._dir]
        if config.checkpoint.saves and not is_inside(config.checkpoint.dir, self._dir):
            folders.append(Path(config.checkpoint.dir))
        for folder in folders:
            keep_files(files, folder)
        if TOKENIZER_NAME in files and config.data.tokenizer != "bytes":
            path = f"{FOLDER_OF_FILE}/{FOLDER_NAME}/{TOKENIZER_NAME}"
            data = config.data.model_copy(update={"tokenizer": path})
            config = config.model_copy(update={"data": data})
        if config.pipeline.file is not None:
            config.pipeline.file.schedule.to_csv(self._dir / COPY_NAME)
            pipeline = config.pipeline.model_copy(
                update={"schedule_file": f"{FOLDER_OF_FILE}/{COPY_NAME}"}
            )
            config = config.model_copy(update={"pipeline": pipeline})
        (self._dir / "config.toml").write_text(config_to_toml(config), encoding="utf-8")

    def loop(self) -> str | None:
        """Run the remaining steps; returns the reason if the run stopped early."""
        for callback in self._callbacks:
            callback.on_start(self._trainer)
        for step in range(self._first_step, self._config.train.steps):
            self._profiler.before_step(step)
            metrics, verdict = self._train(step)
            self._note(self._profiler.after_step(step))
            is_last = step + 1 == self._config.train.steps
            losses: dict[str, float] = {}
            groups: dict[str, Mapping[str, float]] = {}
            if verdict.stop is None and _is_due(
                step, self._config.train.eval_interval, is_last=is_last
            ):
                found = self._trainer.evaluate()
                losses = {name: each.loss for name, each in found.items() if each.num_labels > 0}
                groups = {name: each.groups for name, each in found.items() if each.groups}
                if losses:
                    self._validation_loss = self._trainer.mean_validation_loss(found)
                self._note_empty(found)
            self._write(record := self._record(step, metrics, losses, groups))
            for callback in self._callbacks:
                callback.on_step(record)
            for note in verdict.notes:
                self._console.note(note)
            if self._saver is not None and (failure := self._saver.poll()) is not None:
                self._note_failure(failure)
            self._remove_old(metrics)
            self._next_step = step + 1
            self._is_due_to_save |= verdict.save or _is_due(
                step, self._config.checkpoint.interval_steps, is_last=is_last
            )
            # Not while updates are skipped: the weights may be what causes it.
            if self._is_due_to_save and not self._control.is_skipping:
                self._save()
            if verdict.stop is not None and not is_last:
                return verdict.stop
        return None

    def finish(self, *, wall_time_s: float, stopped: str | None) -> None:
        """Save what is not saved yet, write the report, print the summary. Collective."""
        self._note(self._profiler.stop())
        if self._saver is not None:
            if self._saved_step < self._next_step:
                self._save()
            if (failure := self._saver.finish()) is not None:
                self._note_failure(failure)
            if self._last is not None and math.isfinite(self._last.loss or 0.0):
                self._saver.remove_old(self._saved_step)
        for callback in self._callbacks:
            callback.on_end()
        if stopped is not None:
            self._console.note(self._stop_text(stopped))
        info = self._info(wall_time_s=wall_time_s)
        files: dict[str, Path] = {}
        with self._files.guard("the report"):
            files = write_results(
                self._trainer,
                self._recorder,
                step=self._traced_step + 1,
                info=info,
                step_times_s=self._step_times_s,
                finished=stopped is None,
            )
        if self._last is None:
            self._console.note(
                f"nothing to do: the checkpoint is at step {self._first_step:,} and train.steps is "
                f"{self._config.train.steps:,}; raise train.steps to go on"
            )
        elif self._is_main:
            self._console.finish(self._summary(self._last, wall_time_s, files))
        # Other ranks must not exit before rank 0 has written the report.
        barrier(self._trainer.groups.world)

    def check_saved(self) -> None:
        """Check that the newest save succeeded, after the end of a run that tolerates failures.

        Raises:
            CheckpointError: On every rank, so that the run does not end with exit code 0.
        """
        if self._save_failure is not None:
            raise CheckpointError(
                f"the run has ended after step {self._next_step:,}, but its last checkpoint was "
                f"not saved: {self._save_failure}"
            )

    def _train(self, step: int) -> tuple[StepMetrics, Verdict]:
        """Run one step and decide with all ranks how to continue.

        Raises:
            DivergedError: If the run must not continue.
        """
        trainer, control = self._trainer, self._control
        trainer.eager.vote(control.votes())
        self._watch.before_step(step)
        trainer.eager.limit_loss(control.loss_limit)
        search = None
        if control.will_give_up:
            search = NonFiniteSearch(trainer.chunks, trainer.optimizer, rank=trainer.groups.rank)
        metrics = trainer.train_step(
            step,
            sample_offset=self._sample_offset,
            token_offset=self._token_offset,
            recorder=self._new_recorder(step),
            search=search,
        )
        for note in trainer.graphs.take_notes() if trainer.graphs else ():
            self._console.note(note)
        try:
            verdict = control.judge(
                metrics.votes,
                step=step,
                loss=metrics.loss,
                skipped=metrics.skipped,
                is_empty=metrics.num_labels == 0,
            )
        except DivergedError as error:
            self._write(self._record(step, metrics, {}))
            if search is None:
                raise
            first = first_of_all(search.found, trainer.groups.world)
            raise DivergedError(f"{error}; {first}") from error
        return metrics, verdict

    def close(self, *, failed: bool) -> None:
        """Remove the progress bar, close the writers and abandon a save in flight."""
        if self._saver is not None:
            self._saver.abandon()
        self._console.__exit__(None, None, None)
        if self._writers is not None:
            self._writers.close(failed=failed)

    def _choose_traced_step(self) -> int:
        """Choose the index of the step to trace, at least the second of this run; -1: none."""
        wanted = self._config.debug.trace_step - 1
        if wanted < 0:
            return -1
        return min(max(wanted, self._first_step + 1), self._config.train.steps - 1)

    def _new_recorder(self, step: int) -> ActionRecorder | None:
        if step != self._traced_step:
            return None
        device = self._trainer.device
        self._recorder = ActionRecorder(
            rank=self._trainer.groups.rank,
            synchronize=torch.cuda.synchronize if device.type == "cuda" else None,
        )
        return self._recorder

    def _record(
        self,
        step: int,
        metrics: StepMetrics,
        validation_losses: dict[str, float],
        validation_groups: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> StepRecord:
        train = self._config.train
        interval, is_last = self._config.debug.load_interval, step + 1 == train.steps
        has_labels, has_sets = metrics.num_labels > 0, len(self._trainer.data.validation) > 1
        has_tables = interval > 0 and (step % interval == 0 or is_last)
        epochs = self._trainer.data.train.epochs(self._samples_after(step + 1))
        return StepRecord(
            step=step + 1,
            loss=metrics.loss if has_labels else None,
            grad_norm=metrics.grad_norm if has_labels else None,
            num_zeros_in_grad=metrics.num_zeros_in_grad,
            lr=self._trainer.learning_rate(
                step, sample_offset=self._sample_offset, token_offset=self._token_offset
            ),
            step_time_s=metrics.step_time_s,
            num_skipped=metrics.num_skipped,
            samples=self._samples_after(step + 1),
            validation_loss=self._validation_loss if validation_losses else None,
            validation_losses=validation_losses if has_sets else {},
            validation_groups=validation_groups,
            epochs=epochs if has_tables or len(epochs) <= FEW_SOURCES else {},
            experts=metrics.experts,
            mtp_losses=metrics.mtp_losses if has_labels else (),
            groups=metrics.groups,
            with_load=has_tables,
            **self._watch.measure(step, metrics),
        )

    def _write(self, record: StepRecord) -> None:
        if self._last is None and self._is_main:
            # Written with the first step, so that a stopped run can still be reported.
            with self._files.guard("run.json"):
                write_info(self._dir, self._info(wall_time_s=None))
        self._last = record
        self._last_loss = self._last_loss if record.loss is None else record.loss
        self._seconds += record.step_time_s
        self._step_times_s.append(record.step_time_s)
        self._tokens += record.tokens_per_s * record.step_time_s
        if self._writers is not None:
            self._writers.write(record)
        self._console.step(record)

    def _stop_text(self, reason: str) -> str:
        done = f"stopped early after step {self._next_step:,} ({reason})"
        if self._saver is None:
            return f"{done}; nothing was saved, because checkpoint.interval is -1"
        return f"{done}; continue with the same command and --checkpoint.resume=auto"

    def _save(self) -> None:
        with self._watch.saving():
            self._save_now()

    def _save_now(self) -> None:
        assert self._saver is not None  # an interval of -1 saves nothing
        step = self._saved_step = self._next_step
        self._is_due_to_save = False
        self._trainer.optimizer.finish_param_gather()
        state = run_state(
            self._trainer,
            self._control,
            self._callbacks,
            step=step,
            samples=self._samples_after(step),
            tokens=step * self._tokens_per_step + self._token_offset,
        )
        # The former checkpoint may be the last good one, if this update made the weights useless.
        failure = self._saver.save(state, keep_all=True)
        self._note_failure(failure)
        if self._saver.in_background:
            self._save_failure = None  # it was that of the former save
        self._control.note_saved()

    def _remove_old(self, metrics: StepMetrics) -> None:
        """Remove old checkpoints once a step with the saved weights was sound."""
        has_loss = math.isfinite(metrics.loss) or metrics.num_labels == 0
        is_sound = has_loss and not self._control.is_skipping
        if self._saver is not None and self._saver.is_idle and is_sound:
            self._saver.remove_old(self._saved_step)

    def _samples_after(self, steps: int) -> int:
        return steps * self._config.train.global_batch_size + self._sample_offset

    def _note_empty(self, found: Mapping[str, Evaluation]) -> None:
        """Note, once, the validation sets without a label that counts."""
        names = [name for name, each in found.items() if each.num_labels == 0]
        if names and not self._has_noted_empty:
            self._has_noted_empty = True
            self._console.note(f"no label of the validation set {', '.join(names)} counts")

    def _note(self, text: str | None) -> None:
        if text is not None:
            self._console.note(text)

    def _note_failure(self, why: str | None) -> None:
        """Note the result of a save: an error message, or ``None``."""
        self._save_failure = why
        if why is not None:
            self._console.note(f"a checkpoint was not saved: {why}")

    def _info(self, *, wall_time_s: float | None) -> RunInfo:
        return run_info(
            self._trainer,
            started_at=self._started_at,
            wall_time_s=wall_time_s,
            resumed_from=self._resumed_from,
            first_step=self._first_step,
        )

    def _summary(self, last: StepRecord, wall_time_s: float, files: dict[str, Path]) -> RunSummary:
        return RunSummary(
            loss=self._last_loss,
            validation_loss=self._validation_loss,
            unigram_entropy=self._trainer.data.unigram_entropy,
            tokens_per_s=self._tokens / self._seconds,
            wall_time_s=wall_time_s,
            num_skipped=last.num_skipped,
            files=files,
        )


def _is_due(step: int, interval: int, *, is_last: bool) -> bool:
    return interval > 0 and ((step + 1) % interval == 0 or is_last)
