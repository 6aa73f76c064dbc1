"""Text generation with a whole model in one process.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from megacore.parallel.batch import Microbatch
from megatrain.models.attention.kv_cache import remembering
from megatrain.models.gpt import GPTChunk

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the next token.

    Attributes:
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_k: Sample from this many most likely tokens; ``None`` for all.
        top_p: Sample from the most likely tokens that together reach this probability.
        seed: Seed of the samples, from 0 to ``MAX_SEED``. The tokens of prompt b do not depend on
            the other prompts.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(
                f"temperature = {self.temperature} is not a finite number of at least 0; 0 takes "
                "the most likely token, 1 draws as the model predicts"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k = {self.top_k} must be at least 1; leave it out for all tokens"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p} is not in (0, 1]; 1 draws from all tokens")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed = {self.seed} is not in 0..{MAX_SEED}")


def generate(
    model: GPTChunk, tokens_BS: Tensor, *, max_new_tokens: int, sampling: Sampling = Sampling()
) -> Tensor:
    """Append tokens to prompts of equal length, as `stream` does.

    Args:
        model: As in `stream`.
        tokens_BS: The prompts, ``(B, S)``, integers of the vocabulary, ``B >= 1``, ``S >= 1``.
        max_new_tokens: Tokens to append to each prompt.
        sampling: Choice of tokens.

    Returns:
        ``(B, S + max_new_tokens)``, int64, prompts included.

    Raises:
        ValueError: If an argument is out of range or the model is not whole.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is negative; use 0 or more")
    if tokens_BS.dim() != 2 or tokens_BS.numel() == 0:
        raise ValueError(
            f"the prompt has shape {tuple(tokens_BS.shape)}; expected (batch, sequence) with at "
            "least one prompt and at least one token in each, so (1, 1) or more"
        )
    if tokens_BS.is_floating_point() or tokens_BS.is_complex() or tokens_BS.dtype == torch.bool:
        raise ValueError(
            f"the prompt has dtype {tokens_BS.dtype}; token ids are integers, as torch.int64"
        )
    new = islice(stream(model, tokens_BS.tolist(), sampling), max_new_tokens)
    columns = [
        tokens_BS.long(),
        *(tokens_BS.new_tensor(row, dtype=torch.int64)[:, None] for row in new),
    ]
    return torch.cat(columns, dim=1)


def stream(
    model: GPTChunk, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, without end.

    Keys and values are kept, so a token costs the work of one token. When a sequence has
    ``seq_length`` tokens, the later half of them becomes the context of the next ones, with
    positions from 0, as in training.

    Longer prompts are read token by token after the beginning that all prompts have: while one is
    read, its next token is ``None``. So the tokens of a prompt do not depend on the others.

    Args:
        model: A chunk with the embedding, all layers and the head, on one rank. Its training mode
            is restored at the end.
        prompts: Token ids, at least one in each.
        sampling: Choice of tokens.

    Raises:
        ValueError: If a prompt is empty or has an unknown id, or the model is not whole.

    Sync:
        Waits for the device for each token.
    """
    if model.embedding is None or model.head is None or model.region.group.size > 1:
        raise ValueError("generate needs the whole model in one process: embedding, layers, head")
    for prompt in prompts:
        _check_prompt(prompt, model.shape.vocab)
    return _stream(model, [list(prompt) for prompt in prompts], sampling)


@torch.inference_mode()
def _stream(
    model: GPTChunk, rows: list[list[int]], sampling: Sampling
) -> Iterator[list[int | None]]:
    generators = [torch.Generator().manual_seed(sampling.seed + i) for i in range(len(rows))]
    limit = model.shape.seq_length
    end = min(map(len, rows))
    begin = fed = max(0, end - limit)
    was_training = model.training
    model.eval()
    try:
        with remembering(model.layers) as pasts:
            while True:
                if end - begin > limit:
                    begin = fed = end - (limit + 1) // 2
                    for past in pasts:
                        past.clear()
                elif model.tables.switches(fed - begin, end - begin):
                    fed = begin  # kept keys have the old rotation
                    for past in pasts:
                        past.clear()
                tokens_BS = torch.tensor([row[fed:end] for row in rows], device=model.device)
                batch = _batch(tokens_BS)
                logits_BV = model.logits(None, batch, last_only=True, start=fed - begin)[:, 0]
                chosen = _choose(logits_BV, sampling, generators, [len(r) > end for r in rows])
                for row, token in zip(rows, chosen, strict=True):
                    if token is not None:
                        row.append(token)
                fed, end = end, end + 1
                yield chosen
    finally:
        model.train(was_training)


def _choose(
    logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator], known: list[bool]
) -> list[int | None]:
    """Choose the next token of each row; ``None`` where it is known."""
    if sampling.temperature == 0.0:
        best = logits_BV.argmax(-1).tolist()
        return [None if skip else token for skip, token in zip(known, best, strict=True)]
    if sampling.top_k is not None:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    probs_BV = nucleus(_divided(logits_BV, sampling.temperature).softmax(-1), sampling.top_p).cpu()
    return [
        None if skip else int(torch.multinomial(probs_V, 1, generator=generator))
        for probs_V, generator, skip in zip(probs_BV, generators, known, strict=True)
    ]


def _divided(logits_BV: Tensor, temperature: float) -> Tensor:
    """Compute ``logits_BV / temperature``; rows that overflow are shifted to a maximum of 0.

    The shift preserves the probabilities but not their last bits, so other rows are not shifted.
    """
    divided_BV = logits_BV / temperature
    from_max_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    # The smallest normal number: subnormals may be flushed to 0, and 0 / 0 is NaN.
    shifted_BV = from_max_BV / max(temperature, torch.finfo(torch.float32).tiny)
    return torch.where(divided_BV.amax(-1, keepdim=True).isfinite(), divided_BV, shifted_BV)


def nucleus(probs_BV: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose probabilities reach ``top_p``.

    The most likely token is always kept. The result is not normalized.

    Source:
        Holtzman et al., arXiv:1904.09751.

    Example:
        >>> nucleus(torch.tensor([[0.5, 0.125, 0.375]]), 0.75).tolist()
        [[0.5, 0.0, 0.375]]
    """
    if top_p >= 1.0:
        return probs_BV
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    reached_before_BV = sorted_BV.cumsum(-1) - sorted_BV >= top_p
    return torch.zeros_like(probs_BV).scatter(
        -1, order_BV, sorted_BV.masked_fill(reached_before_BV, 0.0)
    )


def _batch(tokens_BS: Tensor) -> Microbatch:
    sample_ids_B = torch.arange(tokens_BS.shape[0], device=tokens_BS.device)
    return Microbatch(tokens=tokens_BS, labels=None, sample_ids=sample_ids_B, step=0)


def _check_prompt(prompt: Sequence[int], vocab: int) -> None:
    if len(prompt) == 0:
        raise ValueError("a prompt is empty; it must have at least one token")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab:
        wrong, nearest = (lowest, 0) if lowest < 0 else (highest, vocab - 1)
        raise ValueError(
            f"the prompt holds token id {wrong}; the model's ids are 0 to {vocab - 1}, the nearest "
            f"is {nearest}; was it encoded with another tokenizer?"
        )
