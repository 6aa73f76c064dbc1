"""The ``[model.mla]`` section: multi-head latent attention."""

from __future__ import annotations

from pydantic import Field

from megacore.config.base import Section


class MLAConfig(Section):
    """``[model.mla]``: multi-head latent attention, in place of grouped queries."""

    kv_rank: int = Field(
        default=0,
        ge=0,
        description="Width of the latent that keys and values are computed from; 0 turns MLA off.",
    )
    q_rank: int = Field(
        default=0,
        ge=0,
        description="Width of the latent that queries are computed from; 0: from the residual "
        "stream.",
    )
    nope_head_dim: int = Field(
        default=128, ge=1, description="Elements of a query or key head that are not rotated."
    )
    rope_head_dim: int = Field(
        default=64,
        ge=2,
        multiple_of=2,
        description="Elements that are rotated; of keys, they are the same for all heads.",
    )
    v_head_dim: int = Field(default=128, ge=1, description="Elements of a value head.")
