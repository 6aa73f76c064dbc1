"""Log-probs of the labels of an evaluation, gathered from all ranks and written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megacore import host_values
from megacore.errors import ConfigError, MegacoreError
from megacore.parallel.batch import Microbatch
from megacore.parallel.collectives import gather_objects
from megatrain.checkpoint.agreement import on_rank_0
from megatrain.files import describe_os_error
from megatrain.models.gpt import GPTChunk, Head
from megatrain.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class SampleLogprobs:
    """Log-probs of one sample.

    Attributes:
        sample: Number of the sample.
        tokens: Token ids without padding, ``(S,)``.
        labels: The token after each, below 0 where it does not count, ``(S,)``.
        logprobs: Log-probs of the labels, float32; 0 where they do not count.
        starts: First token of each document that attention does not leave.
    """

    sample: int
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    starts: Sequence[int]

    def to_json(self, set_name: str) -> str:
        """Format as a line of the file: a label that does not count has ``null``."""
        counts = self.labels >= 0
        shown = [
            # The shortest digits that give back the float32.
            float(str(value)) if is_counted else None
            for value, is_counted in zip(self.logprobs, counts, strict=True)
        ]
        record: dict[str, Any] = {"set": set_name, "sample": self.sample}
        if len(self.starts) > 1:
            record["document_starts"] = list(self.starts)
        record |= {"tokens": self.tokens.tolist(), "labels": self.labels.tolist()}
        return json.dumps(record | {"logprobs": shown})


class LogprobRecorder:
    """Keeps the log-probs of each pass of a trainer until they are gathered.

    Exact in every layout: the vocabulary is summed over tp, and each cp rank gives the tokens that
    it has.

    Args:
        trainer: A trainer of megacore's GPT.

    Raises:
        ConfigError: For a model of one's own, whose output is not known.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.config.model.factory is not None:
            raise ConfigError(
                f"log-probs are those of megacore's GPT, but model.factory = "
                f'"{trainer.config.model.factory}"; take them in its train.loss'
            )
        self._groups = trainer.groups
        self._held: list[tuple[list[int], dict[str, Any]]] = []
        for chunk in trainer.chunks:
            if isinstance(chunk, GPTChunk) and chunk.head is not None:
                # Other tp ranks have the same.
                chunk.head.recorder = self._recorder(chunk.head)

    def take(self) -> Iterator[SampleLogprobs]:
        """Yield the samples of the passes since the last call, by number; on rank 0. Collective.

        Sync:
            Waits for all ranks.
        """
        held, self._held = self._held, []
        rows: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for records in gather_objects(held, self._groups.world):
            for samples, record in records:
                for row, sample in enumerate(samples):
                    rows.setdefault(sample, []).append((row, record))
        for sample in sorted(rows):
            yield _joined(sample, rows[sample])

    def _recorder(self, head: Head) -> Callable[[Tensor, Microbatch], None]:
        def record(losses_SB: Tensor, batch: Microbatch) -> None:
            if head.region.group.position > 0:
                return
            assert batch.labels is not None
            sequence = batch.shape[1]
            places = head.region.share_positions(sequence, device=losses_SB.device)
            found: dict[str, Any] = {
                "places": _on_host(places),
                "logprobs": -_on_host(losses_SB.detach().float().t()),
            }
            if head.region.cp.position == 0:
                found |= {"tokens": _on_host(batch.tokens), "labels": _on_host(batch.labels)}
                documents, lengths = batch.documents, batch.lengths
                if documents is not None:
                    found["starts"] = documents.starts
                if lengths is not None:
                    found["lengths"] = _on_host(lengths)
            self._held.append((_on_host(batch.sample_ids).tolist(), found))

        return record


def _on_host(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = host_values.to_host(tensor, "log-probs").numpy()
    return array


def _joined(sample: int, parts: Sequence[tuple[int, Mapping[str, Any]]]) -> SampleLogprobs:
    """Join the tokens that the cp ranks had."""
    row, whole = next((row, record) for row, record in parts if "tokens" in record)
    tokens, labels = whole["tokens"][row], whole["labels"][row]
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    for own_row, record in parts:
        logprobs[record["places"]] = record["logprobs"][own_row]
    starts = whole["starts"][row] if "starts" in whole else (0,)
    end = int(whole["lengths"][row]) if "lengths" in whole else len(tokens)
    return SampleLogprobs(
        sample=sample,
        tokens=tokens[:end],
        labels=labels[:end],
        logprobs=logprobs[:end],
        starts=[start for start in starts if start < end],
    )


class LogprobFile:
    """File that rank 0 writes line by line; it gets its name when it is complete. Collective.

    Args:
        path: The file; an existing one is replaced.
        trainer: The trainer whose ranks take part.

    Raises:
        MegacoreError: On every rank, if it cannot be written.
    """

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self._path, self._groups = path, trainer.groups
        self._partial = path.with_name(path.name + ".partial")
        self._on_rank_0(lambda: self._partial.write_text(""))

    def write(self, lines: Sequence[str]) -> None:
        """Append lines; those of rank 0 count."""

        def append() -> None:
            with self._partial.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)

        self._on_rank_0(append)

    def finish(self) -> None:
        """Give the file its name."""
        self._on_rank_0(lambda: self._partial.replace(self._path))

    def _on_rank_0(self, action: Callable[[], object]) -> None:
        def act() -> None:
            try:
                action()
            except OSError as error:
                raise MegacoreError(
                    f"cannot write {self._path}: {describe_os_error(error)}"
                ) from error

        on_rank_0(act, self._groups)
