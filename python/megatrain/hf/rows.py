"""Rows of a family's weight table: one parameter of megacore and its Hugging Face tensors.

A row is read in both directions: `Transform.join` makes the parameter from the tensors, and
`Transform.split` the tensors from the parameter. Both are linear, so they map gradients as well,
and exact inverses, so that an import followed by an export preserves every bit. The shapes of the
tensors follow from the parameter's shape by a `split` on the meta device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain.models.shape import GPTShape

TENSORS = -1
# Below this many elements a run, whole parameters are transformed instead.
_MIN_RUN = 64


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Invertible map between tensors and one parameter.

    Attributes:
        join: From the tensors of a row, in its order, to the parameter.
        split: The inverse: views or copies of parts of the parameter.
        dims: The tensors' dimension for each dimension of the parameter whose equal parts can be
            joined alone from the same parts of the tensors; `TENSORS` if they are whole tensors.
        views: Views of the parameter that are the tensors once they are flattened. Default: those
            of `split`, if they are views.
    """

    join: Callable[[Sequence[Tensor], GPTShape], Tensor]
    split: Callable[[Tensor, GPTShape], Sequence[Tensor]]
    dims: Mapping[int, int] = field(default_factory=dict)
    views: Callable[[Tensor, GPTShape], Sequence[Tensor]] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements that are consecutive in a flattened parameter and in one flattened tensor.

    Attributes:
        ours: First element in the parameter.
        theirs: First element in the tensor.
        numel: Number of elements.
    """

    ours: int
    theirs: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter and its tensors.

    Attributes:
        theirs: Names of the tensors. ``{layer}`` is the layer's index; a name with ``{expert}``
            stands for one tensor per expert.
        transform: The map between them.
        aliases: Other names and maps that are accepted on import, such as joined experts.
    """

    theirs: tuple[str, ...]
    transform: Transform
    aliases: tuple[Row, ...] = ()

    def names(self, layer: int | None, num_experts: int) -> list[str]:
        """Return the names of all tensors, expert by expert if there are experts.

        Example:
            >>> Row(theirs=("e.{expert}.w1", "e.{expert}.w3"), transform=SAME).names(0, 2)
            ['e.0.w1', 'e.0.w3', 'e.1.w1', 'e.1.w3']
        """
        per_expert = any("{expert}" in name for name in self.theirs)
        return [
            name.format(layer=layer, expert=expert)
            for expert in range(num_experts if per_expert else 1)
            for name in self.theirs
        ]


Table = Mapping[str, Row]


def local_name(name: str) -> tuple[int | None, str]:
    """Split a parameter's name into its layer and its name in the layer, the key of a `Table`.

    Example:
        >>> local_name("layers.3.attention.qkv"), local_name("final_norm")
        ((3, 'attention.qkv'), (None, 'final_norm'))
    """
    if not name.startswith("layers."):
        return None, name
    _, layer, rest = name.split(".", 2)
    return int(layer), rest


def rows_of(layer_name: str, table: Table, num_experts: int) -> Iterator[tuple[Row, list[str]]]:
    """Yield the row of a parameter and its aliases, each with the names of its tensors.

    Raises:
        KeyError: If the table has no row for the parameter.
    """
    layer, local = local_name(layer_name)
    row = table[local]
    for candidate in (row, *row.aliases):
        yield candidate, candidate.names(layer, num_experts)


def parts_of(transform: Transform, full_shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranges of a parameter's first dimension whose tensors are made without the others.

    Example:
        >>> parts_of(STACKED, (3, 8, 4)), parts_of(SAME, (8, 4))
        ([(0, 1), (1, 2), (2, 3)], [(0, 8)])
    """
    if transform.dims.get(0) == TENSORS:
        return [(at, at + 1) for at in range(full_shape[0])]
    return [(0, full_shape[0])]


def runs_of(
    transform: Transform, full_shape: tuple[int, ...], shape: GPTShape
) -> list[list[Run]] | None:
    """Return the runs of each tensor of a row in order; ``None`` if they are too short.

    Elements of the parameter that no run has are padding.
    """
    whole = torch.empty(full_shape, device="meta")
    runs = []
    for view in (transform.views or transform.split)(whole, shape):
        if view is not whole and view._base is not whole:
            return None
        inner, numel = view.dim(), 1
        while inner > 0 and (view.shape[inner - 1] == 1 or view.stride(inner - 1) == numel):
            inner -= 1
            numel *= view.shape[inner]
        outer = list(zip(view.shape[:inner], view.stride()[:inner], strict=True))
        if outer and numel < _MIN_RUN:
            return None
        steps = itertools.product(*(range(0, size * stride, stride) for size, stride in outer))
        runs.append(
            [
                Run(ours=int(view.storage_offset()) + sum(at), theirs=index * numel, numel=numel)
                for index, at in enumerate(steps)
            ]
        )
    return runs


# ---- transforms ----------------------------------------------------------------------------------


def _join_vocab(tensors: Sequence[Tensor], shape: GPTShape) -> Tensor:
    missing = shape.padded_vocab - tensors[0].shape[0]
    return torch.nn.functional.pad(tensors[0], (0, 0, 0, missing)) if missing else tensors[0]


def _join_qkv(tensors: Sequence[Tensor], shape: GPTShape) -> Tensor:
    rest = tensors[0].shape[1:]
    return torch.cat([each.reshape(shape.num_kv_heads, -1, *rest) for each in tensors], dim=1)


def _split_qkv(whole: Tensor, shape: GPTShape) -> Sequence[Tensor]:
    return [each.flatten(0, 1) for each in _view_qkv(whole, shape)]


def _view_qkv(whole: Tensor, shape: GPTShape) -> Sequence[Tensor]:
    width = shape.head_dim
    return torch.split_with_sizes(whole, [shape.q_per_kv * width, width, width], dim=1)


def _join_gated_experts(tensors: Sequence[Tensor], _shape: GPTShape) -> Tensor:
    return torch.stack(list(tensors)).view(-1, 2, *tensors[0].shape)


def _to_halves(x: Tensor, dim: int) -> Tensor:
    """Reorder rotated rows from pairs side by side to two halves."""
    pairs = x.reshape(*x.shape[:dim], -1, 2, *x.shape[dim + 1 :])
    return torch.cat(pairs.unbind(dim + 1), dim)


def _to_pairs(x: Tensor, dim: int) -> Tensor:
    """Invert `_to_halves`."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def _last(
    reorder: Callable[[Tensor, int], Tensor], x: Tensor, dim: int, num_rotated: int
) -> Tensor:
    """Reorder the last rotated rows."""
    kept, rotated = torch.split_with_sizes(x, [x.shape[dim] - num_rotated, num_rotated], dim=dim)
    return torch.cat((kept, reorder(rotated, dim)), dim)


def _first(reorder: Callable[[Tensor, int], Tensor], rows: Tensor, shape: GPTShape) -> Tensor:
    """Reorder the first rotated rows of each head; ``rows`` are those of several heads."""
    heads = rows.view(-1, shape.head_dim, *rows.shape[1:])
    rotated, kept = heads[:, : shape.num_rotated], heads[:, shape.num_rotated :]
    return torch.cat((reorder(rotated, 1), kept), 1).flatten(0, 1)


def _join_paired_qkv(tensors: Sequence[Tensor], shape: GPTShape) -> Tensor:
    q, k, v = tensors
    return _join_qkv([_first(_to_halves, q, shape), _first(_to_halves, k, shape), v], shape)


def _split_paired_qkv(whole: Tensor, shape: GPTShape) -> Sequence[Tensor]:
    q, k, v = _split_qkv(whole, shape)
    return [_first(_to_pairs, q, shape), _first(_to_pairs, k, shape), v]


def _join_fused_qkv(tensors: Sequence[Tensor], shape: GPTShape) -> Tensor:
    widths = [heads * shape.head_dim for heads in (shape.num_heads, *[shape.num_kv_heads] * 2)]
    return _join_qkv(torch.split_with_sizes(tensors[0], widths), shape)


def _heads(rows: Tensor, shape: GPTShape) -> Tensor:
    return rows.view(shape.num_heads, -1, rows.shape[-1])


SAME = Transform(
    join=lambda tensors, _: tensors[0], split=lambda whole, _: [whole], dims={0: 0, 1: 1, 2: 2}
)
# Rows of the vocabulary, without the padding.
VOCABULARY = Transform(
    join=_join_vocab, split=lambda whole, shape: [whole[: shape.vocab]], dims={0: 0}
)
# For each head of keys and values: its query heads, the key and the value.
QKV = Transform(join=_join_qkv, split=_split_qkv, dims={0: 0}, views=_view_qkv)
# The same, with the first rows of each query and key head rotated in pairs side by side.
PAIRED_QKV = Transform(join=_join_paired_qkv, split=_split_paired_qkv, dims={0: 0})
# The same in one tensor: all queries, all keys, all values.
FUSED_QKV = Transform(
    join=_join_fused_qkv, split=lambda whole, shape: [torch.cat(list(_split_qkv(whole, shape)))]
)
# Matrices with inputs first, as those of GPT-2.
INPUTS_FIRST = Transform(
    join=lambda tensors, _: tensors[0].t(), split=lambda whole, _: [whole.t()], dims={0: 1, 1: 0}
)
FUSED_QKV_INPUTS_FIRST = Transform(
    join=lambda tensors, shape: _join_fused_qkv([tensors[0].t()], shape),
    split=lambda whole, shape: [torch.cat(list(_split_qkv(whole, shape))).t()],
)
# Tensors of equal shape along a new first dimension: gate and up, or experts.
STACKED = Transform(
    join=lambda tensors, _: torch.stack(list(tensors)),
    split=lambda whole, _: whole.unbind(0),
    dims={0: TENSORS, 1: 0, 2: 1},
)
# The same in one tensor.
JOINED = Transform(
    join=lambda tensors, _: tensors[0].view(2, -1, *tensors[0].shape[1:]),
    split=lambda whole, _: [whole.flatten(0, 1)],
)
# A vector as the only row of a matrix.
ONE_ROW = Transform(
    join=lambda tensors, _: tensors[0].squeeze(0), split=lambda whole, _: [whole.unsqueeze(0)]
)
# Gate and up of each expert: `(E, 2, F, H)`.
GATED_EXPERTS = Transform(
    join=_join_gated_experts,
    split=lambda whole, _: whole.flatten(0, 1).unbind(0),
    dims={0: TENSORS, 2: 0},
)
# Rows of heads, ``(N * D, I)`` to ``(N, D, I)``.
HEADS = Transform(
    join=lambda tensors, shape: _heads(tensors[0], shape),
    split=lambda whole, _: [whole.flatten(0, 1)],
    dims={0: 0},
)
# The same, with the last rows of each head rotated in pairs side by side.
ROTATED_HEADS = Transform(
    join=lambda tensors, shape: _last(
        _to_halves, _heads(tensors[0], shape), 1, shape.rope_head_dim
    ),
    split=lambda whole, shape: [_last(_to_pairs, whole, 1, shape.rope_head_dim).flatten(0, 1)],
    dims={0: 0},
)
# The last rows rotated in pairs side by side.
ROTATED_ROWS = Transform(
    join=lambda tensors, shape: _last(_to_halves, tensors[0], 0, shape.rope_head_dim),
    split=lambda whole, shape: [_last(_to_pairs, whole, 0, shape.rope_head_dim)],
)
# One value or more for each head, grouped by heads of keys and values: `(G, X)`.
GROUPED = Transform(
    join=lambda tensors, shape: tensors[0].view(shape.num_kv_heads, -1),
    split=lambda whole, _: [whole.flatten()],
    dims={0: 0},
)
# Matrices of all experts with inputs first, `(E, I, O)` to `(E, O, I)`.
TRANSPOSED = Transform(
    join=lambda tensors, _: tensors[0].transpose(1, 2),
    split=lambda whole, _: [whole.transpose(1, 2)],
    dims={0: 0, 1: 2, 2: 1},
)
# Gate and up of all experts in alternating columns, `(E, H, 2F)` to `(E, 2, F, H)`; their biases.
ALTERNATING = Transform(
    join=lambda tensors, _: tensors[0].view(*tensors[0].shape[:2], -1, 2).permute(0, 3, 2, 1),
    split=lambda whole, _: [whole.permute(0, 3, 2, 1).flatten(2)],
    dims={0: 0, 2: 2},
)
ALTERNATING_BIAS = Transform(
    join=lambda tensors, _: tensors[0].view(len(tensors[0]), -1, 2).transpose(1, 2),
    split=lambda whole, _: [whole.transpose(1, 2).flatten(1)],
    dims={0: 0, 2: 1},
)
# Gate and up of all experts in two halves of the columns, `(E, H, 2F)` to `(E, 2, F, H)`.
JOINED_COLUMNS = Transform(
    join=lambda tensors, _: tensors[0].view(*tensors[0].shape[:2], 2, -1).permute(0, 2, 3, 1),
    split=lambda whole, _: [whole.permute(0, 3, 1, 2).flatten(2)],
    dims={0: 0},
)
# The halves of the columns in the other order.
SWAPPED = Transform(
    join=lambda tensors, _: tensors[0].roll(tensors[0].shape[1] // 2, 1),
    split=lambda whole, _: [whole.roll(whole.shape[1] // 2, 1)],
)
# All experts in one tensor `(E, 2F, H)`, gate first.
JOINED_EXPERTS = Transform(
    join=lambda tensors, _: tensors[0].view(len(tensors[0]), 2, -1, tensors[0].shape[2]),
    split=lambda whole, _: [whole.flatten(1, 2)],
    dims={0: 0},
)
