"""Description of a parameter, without torch: global name, full shape, and how ranks split it.

A parameter may be split along two dimensions: ``tp_dim`` over tensor-parallel ranks (the etp axis
for experts) and ``ep_dim`` over expert-parallel ranks. The parts are boxes of the full tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """Description of a model parameter, independent of rank and layout.

    Buffers, the optimizer and checkpoints identify parameters by this value only.

    Attributes:
        name: Global name, the same for every layout, e.g. ``"layers.3.attention.qkv"``.
        full_shape: Shape of the whole parameter.
        tp_dim: Dimension that tensor parallelism splits (etp for experts); ``None`` for a parameter
            that is replicated over tp.
        sequence_parallel: The parameter is replicated over tp, but each tp rank had only part of
            the activations (mostly a slice of the sequence), so its gradient is partial and must
            be summed over tp. Routers and norms of heads are so without sequence parallelism too.
        weight_decay: Whether weight decay applies (to matrices, not to norm weights).
        shared: Name of a set of parameters that must stay equal across pipeline stages;
            ``"embedding"`` for tied word embeddings and those of multi-token prediction. Their
            gradients are summed.
        is_shared_copy: Whether this is a further copy of a shared parameter, which is excluded
            from norms and checkpoints.
        expert: Whether it belongs to an expert, and thus to the expert view of the topology.
        ep_dim: Dimension of experts, split by expert parallelism; for expert parameters only.

    Raises:
        ValueError: If ``tp_dim`` or ``ep_dim`` is not a dimension of ``full_shape``, or flags
            contradict each other.

    Example:
        >>> ParamInfo(name="layers.0.mlp.gate_up", full_shape=(2, 8, 4), tp_dim=1).local_shape(2)
        (2, 4, 4)
        >>> experts = ParamInfo(name="layers.0.moe.experts.fc2", full_shape=(8, 16, 32), tp_dim=2,
        ...                     ep_dim=0, expert=True)
        >>> experts.local_shape(2, ep_size=4)
        (2, 16, 16)
    """

    name: str
    full_shape: tuple[int, ...]
    tp_dim: int | None
    sequence_parallel: bool = False
    weight_decay: bool = True
    shared: str | None = None
    is_shared_copy: bool = False
    expert: bool = False
    ep_dim: int | None = None

    def __post_init__(self) -> None:
        for axis, dim in (("tp", self.tp_dim), ("ep", self.ep_dim)):
            if dim is not None and not 0 <= dim < len(self.full_shape):
                raise ValueError(
                    f"{self.name}: {axis}_dim={dim} is not a dimension of {self.full_shape}; "
                    f"use 0 to {len(self.full_shape) - 1}, or None for a replicated parameter"
                )
        if self.ep_dim is not None and (not self.expert or self.ep_dim == self.tp_dim):
            raise ValueError(
                f"{self.name}: ep_dim={self.ep_dim} is for experts (expert=True) and differs from "
                f"tp_dim={self.tp_dim}"
            )
        if self.sequence_parallel and self.tp_dim is not None:
            raise ValueError(
                f"{self.name}: sequence_parallel is for parameters replicated over tp "
                f"(tp_dim=None), but tp_dim={self.tp_dim}"
            )
        if self.is_shared_copy and self.shared is None:
            raise ValueError(f"{self.name}: is_shared_copy needs the name of the shared set")

    def local_shape(self, tp_size: int, *, ep_size: int = 1) -> tuple[int, ...]:
        """Return the shape of the shard on one of ``tp_size`` x ``ep_size`` ranks.

        Raises:
            ValueError: If a size does not divide the dimension it splits.
        """
        local = list(self.full_shape)
        for axis, dim, size in (("tp", self.tp_dim, tp_size), ("ep", self.ep_dim, ep_size)):
            if dim is None:
                continue
            if size < 1 or local[dim] % size != 0:
                raise ValueError(
                    f"{self.name}: {axis}={size} does not divide dimension {dim} of "
                    f"{self.full_shape}; legal values are the divisors of {local[dim]}"
                )
            local[dim] //= size
        return tuple(local)
