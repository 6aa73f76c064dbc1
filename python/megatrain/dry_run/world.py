"""Surroundings of a dry run: process groups of any size in one process, and data of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch.distributed as dist

from megatrain.config import ResolvedConfig
from megatrain.data import TrainingData
from megatrain.data.sample import Sample
from megatrain.data.tokenizer import load_tokenizer
from megatrain.models.build import group_loss_of


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Initialize torch.distributed as one rank of a world that has no other process.

    Collectives and messages end at once and leave their results uninitialized.
    """
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:
        devices.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _SameSample:
    """Samples that are all the same one: token 0 everywhere; one group, for a loss of groups."""

    name = "dry run"

    def __init__(self, config: ResolvedConfig) -> None:
        self.seq_length = config.model.seq_length
        self.num_tokens = self.seq_length * config.train.global_batch_size
        zeros = np.zeros(self.seq_length, np.int64)
        compared = group_loss_of(config)
        count = 1 if compared is None else compared[0].group_size
        starts = tuple(self.seq_length * number // count for number in range(count))
        is_padded = config.data.packing == "best_fit" or compared is not None
        self._sample = Sample(
            tokens=zeros,
            labels=zeros,
            document_starts=starts if config.data.document_mask else (),
            length=self.seq_length if is_padded else None,
            values=None if compared is None else np.zeros((count, 1)),
        )

    def sample(self, number: int) -> Sample:  # noqa: ARG002
        """See `Samples`."""
        return self._sample

    def epochs(self, num_samples: int) -> Mapping[str, float]:
        """See `Samples`."""
        return {self.name: num_samples * self.seq_length / self.num_tokens}


def same_data(config: ResolvedConfig) -> TrainingData:
    """Return data with the shapes of a run's data, without reading any file."""
    samples = _SameSample(config)
    ignores = config.data.packing != "stream" or config.data.document_mask
    return TrainingData(
        sources={},
        tokenizer=load_tokenizer("bytes"),
        train=samples,
        validation={samples.name: samples},
        validation_weights={samples.name: 1.0},
        unigram_entropy=0.0,
        default_normalization="token" if ignores else "microbatch",
    )
