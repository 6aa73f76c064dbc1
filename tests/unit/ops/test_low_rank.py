"""Low-rank terms against plain operations of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacore.ops.low_rank import LowRankParts, add_low_rank

PARTS = {
    "one": LowRankParts(starts=(0,), widths=(12,), group_width=12),
    "two of three in groups": LowRankParts(
        starts=(0, 4), widths=(3, 2), group_width=6, num_groups=2
    ),
    "the last": LowRankParts(starts=(8,), widths=(4,), group_width=12),
}


def plain(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], parts: LowRankParts) -> Tensor:
    """Each part alone, in float32."""
    wide = y.float().view(*y.shape[:-1], parts.num_groups, parts.group_width)
    terms = torch.zeros_like(wide)
    for start, width, first, second in zip(parts.starts, parts.widths, a, b, strict=True):
        term = 0.5 * (x.float() @ first.t() @ second.t())
        padding = (start, parts.group_width - start - width)
        terms = terms + torch.nn.functional.pad(term.view(*wide.shape[:-1], width), padding)
    return (wide + terms).view(y.shape).to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_results_and_gradients_are_those_of_plain_operations(name: str, dtype: torch.dtype) -> None:
    parts, generator = PARTS[name], torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    y, x = draw(5, 2, 12).to(dtype), draw(5, 2, 7).to(dtype)
    a = [draw(rank, 7) for rank in (3, 2)[: len(parts.widths)]]
    b = [
        draw(parts.num_groups * width, len(first))
        for width, first in zip(parts.widths, a, strict=True)
    ]
    weight = draw(5, 2, 12)
    found = []
    for function in (add_low_rank, plain):
        inputs = [each.clone().requires_grad_() for each in (y, x, *a, *b)]
        first, second = inputs[2 : 2 + len(a)], inputs[2 + len(a) :]
        if function is add_low_rank:
            result = add_low_rank(*inputs[:2], first, second, parts=parts, scale=0.5)
        else:
            result = plain(*inputs[:2], first, second, parts)
        (result.float() * weight).sum().backward()
        assert result.dtype == dtype
        found.append([result.detach(), *(each.grad for each in inputs)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradients_that_nobody_needs_are_not_computed() -> None:
    parts = PARTS["one"]
    x, a, b = torch.ones(4, 7), torch.ones(3, 7), torch.ones(12, 3)
    y = torch.ones(4, 12, requires_grad=True)
    add_low_rank(y, x, [a], [b], parts=parts, scale=1.0).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, torch.ones(4, 12))
