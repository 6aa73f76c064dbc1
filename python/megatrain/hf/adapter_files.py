"""Tensors of ``adapter_model.safetensors``: their places in a base, checks and values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.hf import HFWeights
from megatrain.hf.adapter_plan import adapter_of
from megatrain.hf.import_hf import HEAD, HFFolder, describe_params
from megatrain.hf.peft_config import WEIGHTS_NAME, PeftConfig
from megatrain.hf.peft_names import PREFIX, Adapter, BaseParam, PeftNames, Site
from megatrain.hf.rows import rows_of
from megatrain.hf_folder import TensorFiles
from megatrain.models.adapter_infos import Projection

_FACTOR = re.compile(r"(.*)\.(lora_[AB]|lora_magnitude_vector)(?:\.weight)?")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Tensors of one site in the file.

    Attributes:
        base: Its parameter, in this form.
        site: The site.
        tensors: Full names by ``"lora_A"``, ``"lora_B"`` and ``"lora_magnitude_vector"``.
    """

    base: BaseParam
    site: Site
    tensors: dict[str, str]


class AdapterFiles:
    """Adapters of a file by our names.

    Args:
        folder: Folder of the adapter.
        found: Its base.
        peft: Its configuration.

    Attributes:
        names: Sites of the base.
        infos: Descriptions of the base's parameters by name.
        scales: Factor on each projection's product of B and A; filled by `adapters`.

    Raises:
        MegacoreError: If a tensor has no place, or another shape than the base has.
    """

    def __init__(self, folder: Path, found: HFFolder, peft: PeftConfig) -> None:
        self._files, self._found, self._peft = _open_tensors(folder), found, peft
        self.infos = {info.name: info for info in describe_params(found.model, found.moe)}
        self._family = str(found.config["model_type"])
        self.names = PeftNames(self._family, self.infos.values(), found.model, found.moe)
        self.scales: dict[str, float] = {}
        self._of_tensor = {
            alias: info.name
            for info in self.infos.values()
            for _, names in rows_of(info.name, self.names.table, found.moe.num_experts)
            for name in names
            for alias in (name, self.names.loaded(name))
        }
        if found.model.tie_embeddings:
            self._of_tensor[HEAD] = "embedding"
        self._saved: dict[str, str] = {}
        self._sites = self._placed()
        self._check_shapes()
        self._check_experts()
        self._check_selection()

    def adapters(self) -> dict[str, Adapter]:
        """Read the adapters of all projections, without those that are zero in both factors."""
        read: dict[str, Adapter] = {}
        by_param: dict[tuple[str, bool], list[_Found]] = {}
        for found in self._sites.values():
            key = found.base.info.name, found.site.is_joined
            by_param.setdefault(key, []).append(found)
        for each in by_param.values():
            base = each[0].base
            tensors = {found.site.number: self._read(found) for found in each}
            scales = {self._scale(found) for found in each}
            if len(scales) > 1:
                # Folded here; the rest of the parameter has one factor.
                one = max(scales)
                for found in each:
                    factor = self._scale(found) / one
                    old = tensors[found.site.number]
                    tensors[found.site.number] = replace(old, b=old.b * factor)
                scales = {one}
            joined = self.names.join(base, tensors, self._peft.rank)
            for name, adapter in joined.items():
                if adapter.a.any() or adapter.b.any():
                    read[name] = adapter
                    self.scales[name] = next(iter(scales))
        if not read:
            raise MegacoreError(f"{WEIGHTS_NAME} has no adapters")
        return read

    def saved(self) -> dict[str, Tensor]:
        """Read the parameters of modules that are saved whole, with the rest of the base."""
        if self._found.model.tie_embeddings and HEAD in self._saved:
            self._check_tied(self._saved.pop(HEAD))
        names = {self._of_tensor[theirs] for theirs in self._saved}
        return {
            name: value
            for name, value in self._overlaid(names)
            if not name.endswith(".expert_bias")
        }

    def num_params(self) -> int:
        """Count the elements of the file."""
        names = self._files.keys()
        return sum(math.prod(self._files.shape(name)) for name in names)

    def _check_tied(self, head: str) -> None:
        saved = (full for name, full in self._saved.items() if self._of_tensor[name] == "embedding")
        embedding = next(saved, None)
        if embedding is None or not torch.equal(self._files[embedding], self._files[head]):
            raise MegacoreError(
                f"{WEIGHTS_NAME} has {HEAD}, which is not the embedding that the base ties it to; "
                "train the adapter with ensure_weight_tying, or with a base without "
                "tie_word_embeddings"
            )

    def buffers(self) -> dict[str, Tensor]:
        """Read the biases of experts, which checkpoints of runs with adapters have."""
        return dict(self._overlaid({name for name in self.infos if name.endswith(".expert_bias")}))

    def _overlaid(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        if names:
            own = {theirs: self._files[full] for theirs, full in self._saved.items()}
            tensors = _Overlaid(own, self._found.files, self.names)
            found = self._found
            weights = HFWeights(tensors, found.config, found.model, found.moe)
            yield from ((name, weights[name]) for name in sorted(names))

    # ---- places of tensors ----

    def _placed(self) -> dict[str, _Found]:
        """Return the sites of the file by module; fills the tensors of saved modules.

        Raises:
            MegacoreError: If a tensor has no place; one message has all.
        """
        sites = {
            name: (base, site)
            for base in (*self.names.params, *self.names.joined)
            for site in base.sites
            for name in (site.module, *self._aliases(site))
        }
        found: dict[str, _Found] = {}
        refused = []
        for full in sorted(self._files.keys()):
            name = full.removeprefix(PREFIX)
            match = _FACTOR.fullmatch(name)
            module = self._outer(match[1]) if match else ""
            if match and module in sites:
                base, site = sites[module]
                each = found.setdefault(site.module, _Found(base=base, site=site, tensors={}))
                each.tensors[match[2]] = full
            elif name in self._of_tensor and full != name:
                self._saved[name] = full
            else:
                refused.append(f"{full} ({self._reason(full, name)})")
        if refused:
            more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise MegacoreError(
                f"{WEIGHTS_NAME} has tensors without a place in a {self._family} model: "
                f"{', '.join(refused[:3])}{more}"
            )
        return found

    def _aliases(self, site: Site) -> list[str]:
        plain = site.expert is None and not site.is_joined
        return [site.parameter.removesuffix(".weight")] if plain else []

    def _outer(self, module: str) -> str:
        """Return the name that a module of experts has if all their parameters have adapters."""
        inner = f"{module}.base_layer"
        if not module.endswith(".experts") or f"{PREFIX}{inner}.lora_A.weight" in self._files:
            return module
        down = next((each for each in self.names.joined if each.sites[0].module == module), None)
        inputs = self._files.shape(f"{PREFIX}{module}.lora_A.weight")[-1]
        rows = self._files.shape(f"{PREFIX}{module}.lora_B.weight")[0]
        if down is None:
            return inner
        if down.sites[0].is_exchanged:
            rows, inputs = inputs, rows
        return module if down.info.full_shape[-2:] == (rows, inputs) else inner

    def _reason(self, full: str, name: str) -> str:
        if full == name:
            return f"the name does not start with {PREFIX}"
        module = re.split(r"\.(?:lora_|base_layer|token_adapter)", name)[0]
        place = self._of_tensor.get(f"{module}.weight") or self._of_tensor.get(module)
        if place in ("embedding", "head"):
            return (
                f"adapters of {module} are not supported; merge them with PEFT, or train that "
                "module whole with modules_to_save"
            )
        if place is not None and ".lora_" in name:
            return f"there are no adapters of {place}"
        return "the base has no such module"

    def _check_shapes(self) -> None:
        shapes: dict[tuple[str, bool], list[tuple[int, ...]]] = {}
        for found in self._sites.values():
            base, site, names = found.base, found.site, found.tensors
            missing = sorted({"lora_A", "lora_B"} - names.keys())
            has_norm = "lora_magnitude_vector" in names
            if missing or has_norm != self._peft.dora:
                lacking = missing[0] if missing else "lora_magnitude_vector"
                verb = "has" if not missing and has_norm else "has no"
                why = "" if missing else f", but use_dora is {str(self._peft.dora).lower()}"
                raise MegacoreError(f"{WEIGHTS_NAME} {verb} {lacking} of {site.module}{why}")
            key = base.info.name, site.is_joined
            if key not in shapes:
                shapes[key] = self.names.shapes(base)
            *_, outputs, inputs = shapes[key][site.number]
            if site.is_exchanged:
                outputs, inputs = inputs, outputs
            experts = base.info.full_shape[0] if site.is_joined else 1
            rank = self._rank(found)
            wanted = {
                "lora_A": (rank * experts, inputs),
                "lora_B": (outputs, rank * experts),
                "lora_magnitude_vector": (outputs,),
            }
            for factor, full in names.items():
                shape = self._files.shape(full)
                if shape != wanted[factor]:
                    raise MegacoreError(
                        f"tensor {full} must have shape {wanted[factor]} for rank {rank} and this "
                        f"base, got {shape}"
                    )

    def _check_selection(self) -> None:
        """Check that ``adapter_config.json`` selects the modules of the file, and no others."""
        for found in self._sites.values():
            if not self._selects(found.site):
                raise MegacoreError(
                    f"{WEIGHTS_NAME} has an adapter of {found.site.module}, which "
                    "target_modules and target_parameters in adapter_config.json do not select, so "
                    "PEFT would not use it; add it there, or remove it from the file"
                )
        if self._peft.modules is None and not self._peft.parameters:
            return  # those that PEFT chooses
        present = {part.name for found in self._sites.values() for part in self._parts(found)}
        for base in self.names.params:
            for site in base.sites:
                absent = [base.projections[at].name for at in site.parts]
                if self._selects(site) and not present.issuperset(absent):
                    raise MegacoreError(
                        f"{WEIGHTS_NAME} has no adapter of {site.module}, which "
                        "adapter_config.json selects; save the adapter again"
                    )

    def _check_experts(self) -> None:
        """Check that all experts of a layer have adapters in one form, or none has."""
        for base in self.names.params:
            mine = [each for each in self._sites.values() if each.base.info.name == base.info.name]
            if len({each.site.is_joined for each in mine}) > 1:
                raise MegacoreError(
                    f"{WEIGHTS_NAME} has adapters both of {mine[0].site.module} and of "
                    f"{mine[-1].site.module}, which are the same; keep one form"
                )
            parts = {each.site.parts for each in mine if each.site.expert is not None}
            present = {each.site.module for each in mine}
            for site in base.sites:
                if site.parts in parts and site.module not in present:
                    raise MegacoreError(
                        f"{WEIGHTS_NAME} has no adapter of {site.module}, but those of other "
                        "experts; all experts of a layer must have one"
                    )

    def _parts(self, found: _Found) -> Iterable[Projection]:
        return (found.base.projections[at] for at in found.site.parts)

    def _selects(self, site: Site) -> bool:
        peft = self._peft
        return peft.selects_parameter(site.parameter) or (
            not site.is_joined
            and any(peft.selects_module(name) for name in (site.module, *self._aliases(site)))
        )

    # ---- values ----

    def _key(self, found: _Found) -> str:
        """Return the name that PEFT compares with patterns of ranks."""
        site = found.site
        if site.is_joined:
            return site.parameter
        return site.module if site.expert is not None else self._aliases(site)[0]

    def _rank(self, found: _Found) -> int:
        return self._peft.rank_of(self._key(found))

    def _scale(self, found: _Found) -> float:
        return self._peft.scale_of(self._key(found))

    def _read(self, found: _Found) -> Adapter:
        a, b = (self._files[found.tensors[name]].float() for name in ("lora_A", "lora_B"))
        norm = found.tensors.get("lora_magnitude_vector")
        magnitude = None if norm is None else self._files[norm].float()
        return adapter_of(found.site, found.base, a, b, magnitude)


class _Overlaid:
    """Tensors of a base, some of which are replaced; `Tensors` by their names in the base."""

    def __init__(self, own: Mapping[str, Tensor], base: TensorFiles, names: PeftNames) -> None:
        self._own, self._base, self._names = own, base, names

    def __getitem__(self, name: str) -> Tensor:
        for each in (name, self._names.loaded(name)):
            if each in self._own:
                return self._own[each]
        return self._base[name]

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def keys(self) -> Iterable[str]:
        return self._base.keys()


def _open_tensors(folder: Path) -> TensorFiles:
    if not (folder / WEIGHTS_NAME).is_file():
        pickled = " (adapter_model.bin is a pickled file, which is not read; save it again)"
        has_pickled = (folder / "adapter_model.bin").is_file()
        raise MegacoreError(f"{folder} has no {WEIGHTS_NAME}{pickled if has_pickled else ''}")
    return TensorFiles(folder, only=WEIGHTS_NAME)
