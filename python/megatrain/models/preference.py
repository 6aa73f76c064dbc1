"""Losses of pairs of a chosen and a rejected answer: DPO and its kin.

Sources:
    DPO: Rafailov et al., arXiv:2305.18290, with the smoothed labels of Mitchell, "A note on DPO
    with noisy preferences". IPO: Azar et al., arXiv:2310.12036. Hinge: Zhao et al., "SLiC-HF",
    arXiv:2305.10425. APO: D'Oosterlinck et al., arXiv:2408.06266. SimPO: Meng et al.,
    arXiv:2405.14734. Names and formulas are those of TRL 1.16.

Shapes: G pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from megatrain.models.group_loss import AnswerLogprobs

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Ratios of log-probs to those of the reference, ``(G,)``, and what formulas need beside."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    beta: float
    smoothing: float

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> Tensor:
        """Difference of the means over the tokens of the answers."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


def _sigmoid(pairs: _Pairs) -> Tensor:
    z, smoothing = pairs.beta * pairs.difference, pairs.smoothing
    return -(1.0 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def _apo_zero(pairs: _Pairs) -> Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return 1.0 - chosen.sigmoid() + rejected.sigmoid()


def _apo_down(pairs: _Pairs) -> Tensor:
    return (pairs.beta * pairs.chosen).sigmoid() + 1.0 - (pairs.beta * pairs.difference).sigmoid()


_FORMULAS: Mapping[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda pairs: relu(1.0 - pairs.beta * pairs.difference),
    "ipo": lambda pairs: (pairs.mean_difference - 0.5 / pairs.beta).square(),
    "sigmoid_norm": lambda pairs: -logsigmoid(pairs.beta * pairs.mean_difference),
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    # The margin of half of beta is that of the paper's first experiments.
    "simpo": lambda pairs: -logsigmoid(pairs.beta * (pairs.mean_difference - 0.5)),
}
# Without a reference: its log-probs count as 0.
WITHOUT_REFERENCE = ("simpo",)


class PreferenceLoss:
    """Loss of pairs, the chosen answer first; see `GroupLoss`.

    ``answers.values`` has one column, the log-probs of the reference, or none.

    Args:
        name: A loss of ``preference.loss``.
        beta: Factor on the differences of log-probs to those of the reference.
        label_smoothing: Share of pairs whose labels are taken to be the wrong way round.

    Example:
        >>> answers = AnswerLogprobs(logprobs=torch.tensor([-2.0, -3.0]),
        ...                          num_tokens=torch.tensor([2.0, 2.0]),
        ...                          values=torch.tensor([[-2.5], [-2.5]]))
        >>> losses, metrics = PreferenceLoss("sigmoid", beta=0.1)(answers)
        >>> f"{losses.item():.4f}", [f"{x:.2f}" for x in metrics.flatten().tolist()]
        ('0.6444', ['0.05', '-0.05', '0.10', '1.00', '-2.00', '-3.00'])
    """

    group_size = 2
    metrics = METRICS

    def __init__(self, name: str, *, beta: float, label_smoothing: float = 0.0) -> None:
        self._formula = _FORMULAS[name]
        self._beta, self._smoothing = beta, label_smoothing

    def __call__(self, answers: AnswerLogprobs) -> tuple[Tensor, Tensor]:
        """Compute the loss of each pair, ``(G,)``, and the metrics, ``(6, G)``."""
        reference = answers.values.sum(-1)  # 0 without a column
        chosen, rejected = (answers.logprobs - reference).view(-1, 2).unbind(1)
        chosen_tokens, rejected_tokens = answers.num_tokens.view(-1, 2).unbind(1)
        pairs = _Pairs(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            beta=self._beta,
            smoothing=self._smoothing,
        )
        with torch.no_grad():
            better, worse = self._beta * chosen, self._beta * rejected
            logps = answers.logprobs.view(-1, 2).t()
            metrics = torch.stack((better, worse, better - worse, (better > worse).float(), *logps))
        return self._formula(pairs), metrics
