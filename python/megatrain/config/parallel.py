"""The ``[parallel]`` section: sizes and order of the parallel axes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.config.base import Section

AXES = ("tp", "cp", "ep", "dp", "pp")


class ParallelConfig(Section):
    """``[parallel]``: sizes and order of parallel axes; ``dp`` follows from the process count."""

    tp: int = Field(
        default=1, ge=1, description="Tensor parallel size: ranks that share each layer."
    )
    cp: int = Field(
        default=1, ge=1, description="Context parallel size: ranks that share each sequence."
    )
    pp: int = Field(
        default=1, ge=1, description="Pipeline parallel size: parts of the model in a row."
    )
    ep: int = Field(
        default=1, ge=1, description="Expert parallel size: ranks that share the experts."
    )
    etp: int | None = Field(
        default=None, ge=1, description="Tensor parallel size inside an expert. Default: `tp`."
    )
    order: str = Field(
        default="tp-cp-ep-dp-pp", description="Axes from adjacent ranks to far ones, joined by `-`."
    )
    cp_comm: Literal["allgather", "a2a", "ring"] = Field(
        default="allgather",
        description="Exchange of context parallelism: `allgather` gathers keys and values; `a2a` "
        "gives each rank all tokens of some heads (Ulysses), so `cp` divides each tp rank's heads; "
        "`ring` passes keys and values from rank to rank and keeps those of two ranks.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split the activations between tensor parallel regions along the sequence.",
    )

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: str) -> str:
        axes = order.split("-")
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f'axis "{axis}" is unknown; the axes are {", ".join(AXES)}')
            if axes.count(axis) > 1:
                raise ValueError(f'axis "{axis}" is named {axes.count(axis)} times; name it once')
        return order

    @model_validator(mode="after")
    def _check_order_is_complete(self) -> Self:
        named = self.order.split("-")
        for axis in ("tp", "cp", "ep", "pp"):
            size = getattr(self, axis)
            if size > 1 and axis not in named:
                raise ValueError(
                    f'order = "{self.order}" leaves out {axis}, which has size {size}; '
                    f'for example "{"-".join(AXES)}"'
                )
        return self
