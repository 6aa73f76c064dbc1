"""Muon: momentum whose matrices are orthogonalized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Literal

from megacore.optim.matrix_rule import MatrixRule
from megacore.optim.rules.adamw import AdamW
from megacore.optim.update_rule import MomentDtype, StateTensor, UpdateRule
from megacore.options import check_options, check_values

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.optim.newton_schulz import Coefficients, CutMatrix
    from megacore.parallel.param_info import ParamInfo
    from megacore.parallel.process_groups import Group

CoefficientSet = Literal["simple", "quintic", "deepseekv4", "polar_express", "cubic5"]
Scale = Literal["match_rms_adamw", "original", "spectral", "unit_rms_norm"]

_SIMPLE = (3.4445, -4.7750, 2.0315)
# Coefficients of the iterations, and whether further ones repeat the last or all of them.
_SETS: Mapping[str, tuple[tuple[Coefficients, ...], bool]] = {
    "simple": ((_SIMPLE,) * 5, False),
    "quintic": (
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        False,
    ),
    "deepseekv4": ((_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, True),
    "polar_express": (
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.875, -1.25, 0.375),
        ),
        True,
    ),
    "cubic5": (
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Muon(MatrixRule):
    """Muon for parameters with ``ParamInfo.matrices``; the others get another rule.

    The mean of gradients is orthogonalized by Newton-Schulz iterations for each whole matrix, in
    any layout. Weight decay is decoupled and not scaled.

    Attributes:
        momentum: Decay of the mean of gradients.
        nesterov: Look ahead by one step of the momentum.
        coefficients: Set of coefficients of the iterations. ``"simple"`` is that of torch;
            ``"quintic"`` that of NVIDIA; ``"polar_express"`` and ``"deepseekv4"`` come
            nearest to 1.
        steps: Number of iterations. Default: as many as the set has.
        scale: Factor for a matrix of r rows and c columns: ``"match_rms_adamw"``, 0.2 sqrt(max(r,
            c)), steps as large as AdamW's, so its learning rate and weight decay carry over;
            ``"original"``, sqrt(max(1, r / c)); ``"spectral"``, sqrt(max(r, c));
            ``"unit_rms_norm"``, sqrt(r / c).
        precision: Number format of the iterations; bfloat16 is as good and faster on GPUs.
        moments_dtype: Number format of the mean.
        others: Rule of the other parameters: embeddings, output layer, vectors, biases.
        others_lr_scale: Factor on the learning rate of the others.

    Raises:
        ValueError: If a value is not valid.

    Source:
        Jordan et al., 2024; Liu et al., arXiv:2502.16982 (scale); Amsel et al., arXiv:2505.16932
        (Polar Express). Checked against ``torch.optim.Muon``.

    Example:
        >>> Muon(steps=7).num_steps, Muon(coefficients="deepseekv4").num_steps
        (7, 10)
    """

    momentum: float = 0.95
    nesterov: bool = True
    coefficients: CoefficientSet = "simple"
    steps: int | None = None
    scale: Scale = "match_rms_adamw"
    precision: MomentDtype = "float32"
    moments_dtype: MomentDtype = "float32"
    others: UpdateRule = field(default_factory=AdamW)
    others_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        check_options(self.others, UpdateRule, "others")
        least = {"momentum": 0, "steps": 1, "others_lr_scale": 0}
        check_values(self, least=least, below={"momentum": 1})
        if self.coefficients == "cubic5" and self.num_steps != 5:
            raise ValueError(f"steps must be 5 with the coefficients 'cubic5', got {self.steps}")

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Mean of gradients."""
        return (StateTensor(name="momentum", dtype=self.moments_dtype),)

    @property
    def num_steps(self) -> int:
        """Number of iterations."""
        return len(_SETS[self.coefficients][0]) if self.steps is None else self.steps

    @property
    def iterations(self) -> tuple[Coefficients, ...]:
        """Coefficients of each iteration."""
        known, repeats_last = _SETS[self.coefficients]
        if repeats_last:
            known = known[: self.num_steps]
            return known + known[-1:] * (self.num_steps - len(known))
        return tuple(islice(cycle(known), self.num_steps))

    def rules_by_kind(self) -> dict[str, UpdateRule]:
        """Return this rule and that of the other parameters."""
        return {"matrices": self, "others": self.others}

    def rule_for(self, info: ParamInfo) -> tuple[UpdateRule, float]:
        """Return this rule for matrices, else that of the other parameters."""
        if info.matrices is not None:
            return self, 1.0
        rule, lr_scale = self.others.rule_for(info)
        return rule, self.others_lr_scale * lr_scale

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Update the mean, and return it or the mean one step ahead."""
        mean = state["momentum"]
        grad.mul_(1.0 - self.momentum)
        mean.mul_(self.momentum).add_(grad)
        return grad.add_(mean * self.momentum) if self.nesterov else mean

    def transform(self, matrices: Sequence[CutMatrix], group: Group) -> list[Tensor]:
        """Orthogonalize matrices and scale them."""
        import torch

        from megacore.optim.newton_schulz import orthogonalize

        found = orthogonalize(
            matrices, self.iterations, group=group, dtype=getattr(torch, self.precision)
        )
        return [
            update.mul_(self.scale_of(matrix.rows, matrix.columns))
            for update, matrix in zip(found, matrices, strict=True)
        ]

    def scale_of(self, rows: int, columns: int) -> float:
        """Return the factor for a matrix.

        Example:
            >>> Muon(scale="spectral").scale_of(4, 9)
            3.0
        """
        longer = max(rows, columns)
        return {
            "match_rms_adamw": 0.2 * math.sqrt(longer),
            "original": math.sqrt(max(1.0, rows / columns)),
            "spectral": math.sqrt(longer),
            "unit_rms_norm": math.sqrt(rows / columns),
        }[self.scale]

    def cost(self, rows: int, columns: int) -> float:
        """Return the floating point operations of the iterations."""
        short, long = sorted((rows, columns))
        return self.num_steps * (4.0 * short**2 * long + 2.0 * short**3)
