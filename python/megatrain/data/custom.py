"""Datasets of the user's own, made by the function of ``data.factory``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from megacore.errors import DataError
from megacore.parallel.batch import problem_of_starts
from megatrain.config import ResolvedConfig
from megatrain.config.user_objects import call_object, import_object
from megatrain.data.sample import Sample, Samples


class SampleSource(Protocol):
    """Interface of a dataset of one's own.

    Attributes:
        num_samples: Samples of one epoch.
    """

    num_samples: int

    def sample(self, number: int) -> Sample:
        """Return sample ``number`` >= 0 of any epoch; a function of the number alone."""


class DataFactory(Protocol):
    """Function of ``data.factory``."""

    def __call__(self, config: ResolvedConfig) -> tuple[SampleSource, Mapping[str, SampleSource]]:
        """Make the training samples and the validation sets by name, possibly none.

        Every rank calls it separately and must get equal data.

        Args:
            config: The resolved configuration.
        """


def own_datasets(config: ResolvedConfig) -> tuple[Samples, dict[str, Samples]]:
    """Call the function of ``data.factory``, and check the first sample of each dataset.

    Raises:
        ConfigError: If it cannot be imported or fails.
        DataError: If it returns something else, or a sample does not fit the model.
    """
    shown = f'data.factory = "{config.data.factory}"'
    factory: DataFactory = import_object(config.data.factory or "", setting="data.factory")
    made = call_object(factory, config, shown=shown)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise DataError(
            f"{shown} must return a pair of training samples and a mapping of validation sets, got "
            f"a {type(made).__name__}"
        )
    checked = functools.partial(
        _CheckedSamples,
        seq_length=config.model.seq_length,
        vocab_size=config.model.vocab_size,
        document_mask=config.data.document_mask,
        shown=shown,
    )
    train = checked(made[0], name="training")
    validation = {str(name): checked(source, name=str(name)) for name, source in made[1].items()}
    return train, dict(validation)


class _CheckedSamples:
    """Samples of one's own, each checked before a model sees it."""

    def __init__(
        self,
        source: SampleSource,
        *,
        name: str,
        seq_length: int,
        vocab_size: int,
        document_mask: bool,
        shown: str,
    ) -> None:
        self.name = name
        self.seq_length = seq_length
        self._source = source
        self._vocab = vocab_size
        self._document_mask = document_mask
        self._shown = f"{shown}, {name} samples"
        count = getattr(source, "num_samples", None)
        if not isinstance(count, int) or count < 1 or not callable(getattr(source, "sample", None)):
            raise DataError(
                f"{self._shown} must have a positive num_samples and a method sample(number), got "
                f"a {type(source).__name__}"
            )
        self._num_samples = count
        self.sample(0)

    @property
    def num_tokens(self) -> int:
        """Predicted tokens of one epoch."""
        return self._num_samples * self.seq_length

    def sample(self, number: int) -> Sample:
        """Return a sample; see `SampleSource`."""
        sample = call_object(self._source.sample, number, shown=self._shown)
        shape = (self.seq_length,)
        for name in ("tokens", "labels"):
            values = getattr(sample, name, None)
            if not isinstance(values, np.ndarray) or (values.shape, values.dtype) != (
                shape,
                np.int64,
            ):
                raise DataError(
                    f"{self._shown}: {name} of sample {number} must be an int64 array of shape "
                    f"{shape} (model.seq_length), in a megatrain.api.Sample"
                )
        if not isinstance(sample, Sample):
            raise DataError(
                f"{self._shown}: sample {number} must be a megatrain.api.Sample, got a "
                f"{type(sample).__name__}"
            )
        low, high = sample.tokens.min(), max(sample.tokens.max(), sample.labels.max())
        if low < 0 or high >= self._vocab:
            raise DataError(
                f"{self._shown}: token ids of sample {number} must be in 0 to {self._vocab - 1} "
                f"(model.vocab_size), got {low} to {high}"
            )
        self._check_values(sample, number)
        return replace(sample, document_starts=self._starts(sample, number))

    def _check_values(self, sample: Sample, number: int) -> None:
        values = sample.values
        if values is None:
            return
        is_array = isinstance(values, np.ndarray)
        if not is_array or values.ndim != 2 or values.dtype != np.float64:
            found = type(values).__name__
            if is_array:
                found = f"{values.dtype} {values.shape}"
            raise DataError(
                f"{self._shown}: values of sample {number} must be a float64 array (answers, K), "
                f"got {found}"
            )

    def _starts(self, sample: Sample, number: int) -> tuple[int, ...]:
        """Return the starts of documents, checked."""
        try:
            starts = tuple(map(operator.index, sample.document_starts))
        except TypeError as error:
            raise DataError(
                f"{self._shown}: document_starts of sample {number} must be integers: {error}"
            ) from error
        # Without the mask, a sample may begin inside of a document.
        whole = starts if self._document_mask or starts[:1] == (0,) else (0, *starts)
        if problem := problem_of_starts(whole, self.seq_length):
            raise DataError(f"{self._shown}: document_starts of sample {number} {problem}")
        return starts

    def epochs(self, num_samples: int) -> dict[str, float]:
        """Return the passes that the first samples make over this dataset."""
        return {self.name: num_samples / self._num_samples}
