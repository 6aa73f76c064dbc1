"""Adapters of PEFT: names and shapes of their tensors, and the map to ours.

A *site* is a Hugging Face tensor of a linear map, or of such maps of all experts, that may have an
adapter: ``A`` of shape ``(R, I)`` and ``B`` of shape ``(O, R)`` for a matrix ``(O, I)``. Sites have
the rows of the family's weight table, so B is reordered as the weights are, by the same transform.
Shapes: O outputs, I inputs, R rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.param_info import ParamInfo
from megatrain.config import LoraConfig, ModelConfig, MoEConfig
from megatrain.hf.families import FAMILIES
from megatrain.hf.rows import Row, Transform, local_name, rows_of
from megatrain.models.adapter_infos import Projection, projections_of
from megatrain.models.param_infos import GPTInfos
from megatrain.models.shape import GPTShape

PREFIX = "base_model.model."
# Code of the publisher, in which every expert is a module of its own.
_SEPARATE_EXPERTS = ("bailing_moe_v2", "kimi_k2")
# Matrices of experts with inputs first that PEFT takes for ones with outputs first, which exchanges
# the factors.
_EXCHANGED = ("llama4_text",)
_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Names in files and in the modules of `transformers` 5 where they differ.
_MIXTRAL = {".block_sparse_moe.": ".mlp."}
_GRANITE = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
}
_LOADED = {
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "ernie4_5_moe": {".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    "hy_v3": {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.e_score_correction_bias",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    },
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Adapter of one projection, in float32; experts are the first dimension.

    Attributes:
        a: ``([E,] R, I)``.
        b: ``([E,] O, R)``, rows in the order of the parameter.
        magnitude: Norms of the rows, ``(O,)``, of DoRA.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Hugging Face tensor that may have an adapter.

    Attributes:
        number: Its index among the tensors of its parameter.
        module: Name in files of adapters, before ``.lora_A.weight``.
        parameter: Its parameter in `transformers` 5, which may hold several sites.
        parts: Indices of our projections in it.
        expert: Index of its expert; ``None`` for all experts, or for none.
        is_joined: Whether it has the matrices of all experts.
        inputs_first: Whether its matrices are ``(I, O)``.
        is_exchanged: Whether A in files is the transpose of B, and B that of A.
    """

    number: int
    module: str
    parameter: str
    parts: tuple[int, ...]
    expert: int | None
    is_joined: bool
    inputs_first: bool
    is_exchanged: bool

    def turned(self, matrices: Tensor) -> Tensor:
        """Exchange the dimensions of matrices from ``(O, I)`` to those of the tensor, or back."""
        return matrices.transpose(-2, -1) if self.inputs_first else matrices


@dataclass(frozen=True, kw_only=True)
class BaseParam:
    """Parameter of a frozen model whose projections may have adapters.

    Attributes:
        info: Its description.
        projections: Its projections, in the order of rows.
        sites: Its tensors.
        transform: Map between it and its tensors.
    """

    info: ParamInfo
    projections: tuple[Projection, ...]
    sites: tuple[Site, ...]
    transform: Transform


def projection_rows(
    whole: Tensor, info: ParamInfo, projections: Sequence[Projection] | None = None
) -> list[Tensor]:
    """Return views of the rows of each projection of a parameter.

    Args:
        whole: The parameter, contiguous, with any last dimension C.
        info: Its description.
        projections: Its projections that ``whole`` has. Default: all.

    Returns:
        For each projection ``([E,] groups, rows / groups, C)``.
    """
    projections = projections_of(info) if projections is None else projections
    groups, lead = projections[0].groups, whole.shape[:1] if info.expert else ()
    rows = whole.view(*lead, groups, -1, whole.shape[-1])
    return list(rows.split_with_sizes([each.rows // groups for each in projections], dim=-2))


class PeftNames:
    """Sites of a model.

    Args:
        family: The ``model_type``.
        infos: All parameters of the model.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.

    Attributes:
        table: The family's table.
        params: The parameters whose projections may have adapters.
        joined: Those of experts with the tensors of `transformers` 5, which have all experts.
    """

    def __init__(
        self, family: str, infos: Iterable[ParamInfo], model: ModelConfig, moe: MoEConfig
    ) -> None:
        self._family = family
        self.table = FAMILIES[family].table
        self._shape = GPTShape.from_config(model)
        self._num_experts = moe.num_experts
        self._places: dict[Any, list[_Place]] = {}
        described = GPTInfos.of(model, moe, lora=LoraConfig(rank=1))
        taken = {name for layer in range(model.num_layers) for name in described.layer(layer)}
        rows = [
            (info, [self._base(info, *row) for row in self._rows(info)])
            for info in infos
            if f"{projections_of(info)[0].name}.lora_a" in taken
        ]
        self.params = [forms[0] for _, forms in rows]
        self.joined = [
            form for info, forms in rows if info.expert for form in forms if form.sites[0].is_joined
        ]

    def loaded(self, name: str) -> str:
        """Return the name of a tensor's parameter in `transformers` 5; joined experts apart."""
        for old, new in _LOADED.get(self._family, {}).items():
            name = name.replace(old, new)
        return name

    def is_parameter(self, site: Site) -> bool:
        """Check whether PEFT must be given a parameter instead of a module.

        PEFT takes modules of models with experts whose names are those of the projections of
        experts in older files for these, and leaves MLPs of dense layers and shared experts out.
        """
        if not self._num_experts or self._family in _SEPARATE_EXPERTS:
            return False
        module = site.parameter.removesuffix(".weight").rpartition(".")[2]
        return site.is_joined or site.expert is not None or module in _NAMES_OF_EXPERTS

    def split(
        self, base: BaseParam, adapters: Mapping[str, Adapter]
    ) -> Iterator[tuple[Site, Adapter]]:
        """Yield the adapters of the sites of a parameter.

        A site of several projections gets the A of all of them, one after another, and a B with
        their blocks.

        Args:
            base: The parameter.
            adapters: Adapters by projection; sites without one are left out.
        """
        given = [adapters.get(each.name) for each in base.projections]
        device = next(each.a.device for each in adapters.values())
        ends = list(accumulate(0 if each is None else each.a.shape[-2] for each in given))
        columns = [range(*pair) for pair in pairwise((0, *ends))]
        wide = torch.zeros(*base.info.full_shape[:-1], ends[-1], device=device)
        norms = torch.zeros(*base.info.full_shape[:-1], 1, device=device)
        places = projection_rows(wide, base.info), projection_rows(norms, base.info)
        for each, own, rows, norm in zip(given, columns, *places, strict=True):
            if each is not None:
                target = rows[..., own.start : own.stop]
                target.copy_(each.b.view(target.shape))
                if each.magnitude is not None:
                    norm.copy_(each.magnitude.view(norm.shape))
        parts = base.transform.split(wide, self._shape)
        lengths = base.transform.split(norms, self._shape)
        for site in base.sites:
            mine = [(given[part], columns[part]) for part in site.parts]
            theirs = [(each, column) for each, column in mine if each is not None]
            if theirs:
                has_norm = any(each.magnitude is not None for each, _ in theirs)
                columns_of = [at for _, at in theirs]
                yield (
                    site,
                    Adapter(
                        a=torch.cat([_of_expert(each.a, site) for each, _ in theirs], dim=-2),
                        b=site.turned(parts[site.number])[..., list(chain(*columns_of))],
                        magnitude=lengths[site.number].flatten() if has_norm else None,
                    ),
                )

    def join(
        self, base: BaseParam, tensors: Mapping[int, Adapter], rank: int
    ) -> dict[str, Adapter]:
        """Invert `split`.

        Args:
            base: The parameter.
            tensors: Adapters by the number of their site; others have none.
            rank: Rank of one projection. A site of several projections whose rank is a multiple
                has blocks of projections if its B has the zeros of blocks; else each of its
                projections gets the whole A.

        Returns:
            Adapters by projection.
        """
        widest = max(each.b.shape[-1] for each in tensors.values())
        rows = self._rows_of(base, {at: each.b for at, each in tensors.items()}, widest)
        vectors = {
            at: each.magnitude.view(-1, 1)
            for at, each in tensors.items()
            if each.magnitude is not None
        }
        norms = [each.flatten() for each in self._rows_of(base, vectors, 1)] if vectors else None
        found: dict[int, tuple[dict[int | None, Tensor], dict[int | None, Tensor]]] = {}
        for site in base.sites:
            if site.number not in tensors:
                continue
            each = tensors[site.number]
            own = [_of_expert(rows[part], site)[..., : each.b.shape[-1]] for part in site.parts]
            for index, columns in _blocks(own, rank):
                a, b = found.setdefault(site.parts[index], ({}, {}))
                a[site.expert], b[site.expert] = each.a[..., columns, :], own[index][..., columns]
        return {
            base.projections[part].name: Adapter(
                a=_stacked(a, -2),
                b=_stacked(b, -1),
                magnitude=None if norms is None else norms[part],
            )
            for part, (a, b) in sorted(found.items())
        }

    def shapes(self, base: BaseParam) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors of a parameter, as ``([E,] O, I)``."""
        whole = torch.empty(base.info.full_shape, device="meta")
        parts = base.transform.split(whole, self._shape)
        return [
            tuple(site.turned(part).shape) for site, part in zip(base.sites, parts, strict=True)
        ]

    def _rows_of(self, base: BaseParam, parts: Mapping[int, Tensor], width: int) -> list[Tensor]:
        """Join matrices ``(O, C)`` of sites, padded to a width, to rows of projections."""
        whole = torch.empty(*base.info.full_shape[:-1], width, device="meta")
        device = next((part.device for part in parts.values()), None)
        joined = [
            torch.zeros(part.shape, device=device)
            for part in base.transform.split(whole, self._shape)
        ]
        for number, part in parts.items():
            base.sites[number].turned(joined[number])[..., : part.shape[-1]].copy_(part)
        rows = base.transform.join(joined, self._shape).contiguous()
        return [each.flatten(-3, -2) for each in projection_rows(rows, base.info)]

    def _rows(self, info: ParamInfo) -> Iterator[tuple[Row, list[str]]]:
        return rows_of(info.name, self.table, self._num_experts)

    def _base(self, info: ParamInfo, row: Row, names: list[str]) -> BaseParam:
        key = local_name(info.name)[1], info.full_shape, row.theirs
        if key not in self._places:
            self._places[key] = _places(info, row.transform, self._shape)
        sites = tuple(
            self._site(info, name, number, place)
            for number, (name, place) in enumerate(zip(names, self._places[key], strict=True))
        )
        return BaseParam(
            info=info, projections=projections_of(info), sites=sites, transform=row.transform
        )

    def _site(self, info: ParamInfo, name: str, number: int, place: _Place) -> Site:
        module, parameter = name.removesuffix(".weight"), self.loaded(name)
        if place.is_joined:
            # Modules are nested: the last parameter has the outer one.
            module, _, last = parameter.rpartition(".")
            module += "" if last == "down_proj" else ".base_layer"
        elif place.expert is not None and self._family not in _SEPARATE_EXPERTS:
            last = "gate_up_proj" if info.name.endswith(".fc1") else "down_proj"
            parameter = f"{parameter.partition('.experts.')[0]}.experts.{last}"
        return Site(
            number=number,
            module=module,
            parameter=parameter,
            is_exchanged=place.is_joined and self._family in _EXCHANGED,
            **asdict(place),
        )


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The fields of `Site` that layers share."""

    parts: tuple[int, ...]
    expert: int | None
    is_joined: bool
    inputs_first: bool


def _places(info: ParamInfo, transform: Transform, shape: GPTShape) -> list[_Place]:
    """Find the projections and experts of each tensor by labels of rows."""
    count = len(projections_of(info))
    labels = torch.zeros(*info.full_shape[:-1], 1, dtype=torch.int32)
    for number, rows in enumerate(projection_rows(labels, info)):
        rows.fill_(number)
        if info.expert:
            rows += count * torch.arange(len(rows), dtype=torch.int32).view(-1, 1, 1, 1)
    wider = torch.empty(*info.full_shape[:-1], 2, device="meta")
    places = []
    both = transform.split(labels, shape), transform.split(wider, shape)
    for part, wide in zip(*both, strict=True):
        found = sorted(set(part.flatten().tolist()))
        is_joined = info.expert and part.dim() > 2
        places.append(
            _Place(
                parts=tuple(sorted({label % count for label in found})),
                expert=found[0] // count if info.expert and not is_joined else None,
                is_joined=is_joined,
                inputs_first=part.shape[-1] == wide.shape[-1],
            )
        )
    return places


def _of_expert(values: Tensor, site: Site) -> Tensor:
    return values if site.expert is None else values[site.expert]


def _blocks(rows: list[Tensor], rank: int) -> list[tuple[int, slice]]:
    """Return the columns of B that projections have; ``rows`` are the parts of B of each."""
    count, width = len(rows), rows[0].shape[-1]
    blocks = [slice(first, first + rank) for first in range(0, width, rank)]
    if count > 1 and width % rank == 0 and len(blocks) <= count:
        used = [[bool(each[..., block].any()) for each in rows] for block in blocks]
        owners = list(range(count))
        if len(blocks) < count:
            owners = [row.index(True) if any(row) else 0 for row in used]
        is_own = all(
            not any(is_used for at, is_used in enumerate(row) if at != owner)
            and (any(row) or len(blocks) == count)
            for owner, row in zip(owners, used, strict=True)
        )
        if is_own and sorted(set(owners)) == owners:
            return list(zip(owners, blocks, strict=True))
    return [(index, slice(None)) for index in range(count)]


def _stacked(placed: Mapping[int | None, Tensor], dim: int) -> Tensor:
    """Stack the factors of experts, padded to the largest rank, or return the only one."""
    if None in placed:
        return placed[None]
    parts = [placed[expert] for expert in sorted(placed, key=lambda expert: expert or 0)]
    widest = max(part.shape[dim] for part in parts)
    return torch.stack([widened(part, dim, widest) for part in parts])


def widened(factor: Tensor, dim: int, size: int) -> Tensor:
    """Pad a factor with zeros to a larger rank."""
    shape = list(factor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat((factor, factor.new_zeros(shape)), dim)
