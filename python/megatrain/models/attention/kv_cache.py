"""Keys and values of earlier tokens, for generation.

Shapes: S new tokens, T all tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from torch import Tensor, nn

_FIRST_TOKENS = 64


class Past:
    """Values of all tokens so far, of one layer; its memory doubles when it is full.

    Example:
        >>> import torch
        >>> past = Past()
        >>> past.extend(torch.tensor([1, 2])).tolist(), past.extend(torch.tensor([3])).tolist()
        ([1, 2], [1, 2, 3])
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, new: Tensor) -> Tensor:
        """Append ``(S, ...)`` and return all tokens, ``(T, ...)``, a view that lives until then."""
        start = self._length
        self._length += new.shape[0]
        if self._memory is None:
            self._memory = new.new_empty(max(2 * self._length, _FIRST_TOKENS), *new.shape[1:])
        memory = self._with_room(self._memory, start)
        memory[start : self._length] = new
        return memory[: self._length]

    def grow(self) -> Tensor:
        """Append a token to be written by the caller; return the memory, ``(>= T, ...)``.

        Raises:
            ValueError: If there is no earlier token, so that the shape of one is unknown.
        """
        if self._memory is None:
            raise ValueError("a token can be appended after the first call of extend only")
        self._length += 1
        return self._with_room(self._memory, self._length - 1)

    def _with_room(self, memory: Tensor, used: int) -> Tensor:
        """Move the tokens to new memory if there is no room for ``_length``."""
        if self._length > memory.shape[0]:
            self._memory = memory.new_empty(2 * self._length, *memory.shape[1:])
            self._memory[:used] = memory[:used]
        assert self._memory is not None
        return self._memory

    def clear(self) -> None:
        """Forget all tokens; the memory is kept."""
        self._length = 0


class _Layer(Protocol):
    past: Past | None


@contextmanager
def remembering(model: nn.Module) -> Iterator[list[Past]]:
    """Let the attention of all layers keep the keys and values of each call for the next.

    A model then takes the tokens of a sequence in several calls. Yields the memory of the layers.
    """
    layers = [cast(_Layer, module) for module in model.modules() if hasattr(module, "past")]
    pasts = [Past() for _ in layers]
    for module, past in zip(layers, pasts, strict=True):
        module.past = past
    try:
        yield pasts
    finally:
        for module in layers:
            module.past = None
