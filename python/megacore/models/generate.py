"""Text generation with a whole model in one process.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megacore.models.gpt import GPTChunk
from megacore.parallel.batch import Microbatch

MAX_SEED = 2**63 - 1


@torch.no_grad()
def generate(
    model: GPTChunk,
    tokens_BS: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Append tokens predicted by the model, one at a time.

    Each token is predicted from at most the last ``seq_length`` tokens. There is no key-value
    cache, because the positions of a full window shift with every token.

    Args:
        model: A chunk with the embedding, all layers and the head, on one rank. Its training mode
            is restored afterwards.
        tokens_BS: The prompts, ``(B, S)``, integers of the vocabulary, ``B >= 1``, ``S >= 1``.
        max_new_tokens: Tokens to append to each prompt.
        temperature: Divisor of the logits; 0 selects the most likely token.
        top_p: Sample from the most likely tokens that together reach this probability.
        seed: Seed of the samples, from 0 to ``MAX_SEED``. The tokens of row b do not depend on the
            other rows.

    Returns:
        ``(B, S + max_new_tokens)``, int64, prompts included.

    Raises:
        ValueError: If an argument is out of range or the model is not whole.

    Sync:
        Waits for the device once, to check the prompts, and for each sampled token.
    """
    if model.embedding is None or model.head is None or model.region.group.size > 1:
        raise ValueError("generate needs the whole model in one process: embedding, layers, head")
    check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    tokens_BS = _checked_prompts(tokens_BS, model.shape.vocab)
    generators = [torch.Generator().manual_seed(seed + row) for row in range(tokens_BS.shape[0])]
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window_BS = tokens_BS[:, -model.shape.seq_length :]
            logits_BV = model.logits(None, _batch(window_BS), last_only=True)[:, 0]
            next_B = _choose(logits_BV, temperature, top_p, generators)
            tokens_BS = torch.cat((tokens_BS, next_B[:, None]), dim=1)
    finally:
        model.train(was_training)
    return tokens_BS


def _choose(
    logits_BV: Tensor, temperature: float, top_p: float, generators: list[torch.Generator]
) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    probs_BV = nucleus(_divided(logits_BV, temperature).softmax(-1), top_p).cpu()
    rows = [
        torch.multinomial(probs_V, 1, generator=generator)
        for probs_V, generator in zip(probs_BV, generators, strict=True)
    ]
    return torch.cat(rows).to(logits_BV.device)


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


def _checked_prompts(tokens_BS: Tensor, vocab: int) -> Tensor:
    """Return the prompts as int64 after checking that they are ids of the vocabulary."""
    if tokens_BS.dim() != 2 or tokens_BS.numel() == 0:
        raise ValueError(
            f"the prompt has shape {tuple(tokens_BS.shape)}; expected (batch, sequence) with at "
            "least one prompt and at least one token in each, so (1, 1) or more"
        )
    if tokens_BS.is_floating_point() or tokens_BS.is_complex() or tokens_BS.dtype == torch.bool:
        raise ValueError(
            f"the prompt has dtype {tokens_BS.dtype}; token ids are integers, as torch.int64"
        )
    lowest, highest = (int(extreme) for extreme in torch.aminmax(tokens_BS))
    if lowest < 0 or highest >= vocab:
        wrong, nearest = (lowest, 0) if lowest < 0 else (highest, vocab - 1)
        raise ValueError(
            f"the prompt holds token id {wrong}; the model's ids are 0 to {vocab - 1}, the nearest "
            f"is {nearest}; was it encoded with another tokenizer?"
        )
    return tokens_BS.long()


def check_sampling(*, max_new_tokens: int, temperature: float, top_p: float, seed: int) -> None:
    """Check the arguments of :func:`generate` other than model and prompts.

    Raises:
        ValueError: If an argument is out of range.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} is negative; use 0 or more")
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ValueError(
            f"temperature = {temperature} is not a finite number of at least 0; 0 takes the most "
            "likely token, 1 draws as the model predicts"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p = {top_p} is not in (0, 1]; 1 draws from all tokens")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed = {seed} is not in 0..{MAX_SEED}")
