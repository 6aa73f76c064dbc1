"""Names, shapes and settings of the adapters of a run in the format of PEFT, and their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.param_info import ParamInfo
from megatrain.config import Config, ResolvedConfig
from megatrain.config.lora import ADAPTER_NAMES
from megatrain.hf.export_hf import HFTensors
from megatrain.hf.import_hf import HEAD
from megatrain.hf.merged_weights import PartSource, RunSource, read_adapters
from megatrain.hf.peft_config import alpha_of, endings
from megatrain.hf.peft_names import PREFIX, Adapter, BaseParam, PeftNames, Site
from megatrain.hf.rows import Transform, rows_of
from megatrain.hf_folder import TensorSpec, is_model_folder
from megatrain.models.adapter_infos import describe_adapters
from megatrain.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Tensor of a module that is trained whole.

    Attributes:
        name: Full name in the file.
        theirs: Name in files of whole models.
        info: Its parameter.
        transform: Map between the parameter and its tensors.
        number: Index among these.
    """

    name: str
    theirs: str
    info: ParamInfo
    transform: Transform
    number: int


class AdapterPlan:
    """Tensors and ``adapter_config.json`` of a run with adapters, for files and for a stream alike.

    Args:
        config: The configuration of the run.
        own: Names of all parameters of the run, without those of its base.
        family: ``model_type`` of the base.
        dtype: Number format of the tensors.

    Attributes:
        own: As the argument.
        family: As the argument.
        rank: Rank of the adapters.
        specs: All tensors: those of adapters in the order of the layers, then modules that are
            trained whole.
        names: Sites of the base.
        adapted: Parameters with adapters.
        saved: The tensors of modules that are trained whole.
        notes: Differences from the settings of the run, one sentence each.

    Raises:
        MegacoreError: If PEFT has no form for the adapters.
    """

    def __init__(
        self,
        config: Config | ResolvedConfig,
        own: Collection[str],
        family: str,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.specs: list[TensorSpec] = []
        self.notes: list[str] = []
        self._config, self._lora, self.own = config, config.lora, set(own)
        self.rank, self.family = config.lora.rank or 1, family
        self._dtype, self._shape = dtype, GPTShape.from_config(config.model)
        self._hf = HFTensors(family, config.model, config.moe, dtype=dtype)
        self.names = PeftNames(family, self._hf.infos, config.model, config.moe)
        self._modules: set[str] = set()
        self._parameters: set[str] = set()
        self._is_turned = False
        # Names of adapters with a rank other than `lora.rank`.
        self._ranks: dict[int, set[str]] = {}
        self.adapted = self._find_adapted()
        self._plan_adapters()
        self._saved_modules: list[str] = []
        self.saved = self._plan_saved()

    def specs_of(self, base: BaseParam) -> list[TensorSpec]:
        """Return the tensors of the adapters of a parameter, in one of its forms."""
        return [
            TensorSpec(name=name, dtype=self._dtype, shape=tuple(tensor.shape))
            for site, adapter in self.names.split(base, self.on_meta(base))
            for name, tensor in tensors_of(site, adapter).items()
        ]

    def tensors(
        self, run: RunSource, base: Callable[[], PartSource] | None = None
    ) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        """Yield the tensors of `specs` in order, while memory holds the adapters of one parameter.

        Args:
            run: Parameters of the run. If it returns ``None``, so are the tensors.
            base: Returns the parameters of the base, for saved modules with parameters that are
                not trained. Default: ``run`` has them, too.
        """
        specs = iter(self.specs)
        # Of experts whose adapters are all without effect, nothing is read.
        like = run.read_param(min(name for name in self.own if name.endswith(".lora_a")))
        for each in self.adapted:
            adapters = read_adapters(run, each.info)
            if adapters is None or like is None:
                yield from ((next(specs), None) for _ in self.specs_of(each))
                continue
            adapters = self._with_zeros(each, adapters, like.device)
            for site, adapter in self.names.split(each, adapters):
                for tensor in tensors_of(site, adapter).values():
                    yield next(specs), tensor.to(self._dtype)
        for saved in self.saved:
            name = saved.info.name
            source = run if name in self.own or base is None else base()
            whole = source.read_param(name)
            if whole is not None:
                parts = saved.transform.split(whole, self._shape)
                whole = parts[saved.number].to(self._dtype).contiguous()
            yield next(specs), whole

    def settings(self, origin: str | None) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``.

        Args:
            origin: ``base_model_name_or_path``.
        """
        lora, model = self._lora, self._config.model
        assert lora.rank is not None
        copies = tuple(f"model.layers.{layer}." for layer in model.mtp_layers)
        every = {
            self.names.loaded(spec.name)
            for spec in self._hf.specs
            if not spec.name.startswith(copies)
        }
        every |= {site.parameter for base in self.names.params for site in base.sites}
        modules = {name.removesuffix(".weight") for name in every}
        ranks = {
            name: rank
            for rank, names in sorted(self._ranks.items())
            for name in endings(names, every | modules)
        }
        return {
            "alpha_pattern": {name: alpha_of(lora, rank) for name, rank in ranks.items()},
            "base_model_name_or_path": origin,
            "bias": "none",
            "ensure_weight_tying": model.tie_embeddings and bool(self._saved_modules),
            "fan_in_fan_out": self._is_turned,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": alpha_of(lora, lora.rank),
            "lora_dropout": 0.0 if self._parameters else lora.dropout,
            "modules_to_save": self._saved_modules or None,
            "peft_type": "LORA",
            "r": lora.rank,
            "rank_pattern": ranks,
            "target_modules": endings(self._modules, modules),
            "target_parameters": endings(self._parameters, every) or None,
            "task_type": "CAUSAL_LM",
            "use_dora": lora.dora,
            "use_rslora": lora.rs,
        }

    def _find_adapted(self) -> list[BaseParam]:
        params = self.names.params
        names = {
            base.info.name
            for base in params
            if any(f"{each.name}.lora_a" in self.own for each in base.projections)
        }
        if any(base.info.expert and base.info.name in names for base in params):
            # PEFT drops or refuses files with some projections of experts only.
            names |= {base.info.name for base in params if base.info.expert}
        return [base for base in params if base.info.name in names]

    def _plan_adapters(self) -> None:
        for base in self.adapted:
            self.specs += self.specs_of(base)
            for site, adapter in self.names.split(base, self.on_meta(base)):
                self._add(site, adapter.a.shape[-2])
        if self._parameters and self._lora.dora:
            raise MegacoreError(
                f"PEFT has no DoRA for {min(self._parameters)}, a parameter in a model with "
                "experts; write merged weights with --merge"
            )
        if self._parameters and self._lora.dropout:
            self.notes.append(
                "lora_dropout is 0, not lora.dropout = "
                f"{self._lora.dropout}: PEFT has no dropout for parameters such as "
                f"{min(self._parameters)}"
            )

    def _add(self, site: Site, rank: int) -> None:
        self._is_turned |= site.inputs_first and not site.is_joined
        name = site.parameter
        if self.names.is_parameter(site):
            self._parameters.add(name)
            if site.expert is not None and name.endswith("gate_up_proj"):
                rank *= 2  # PEFT joins gate and up
        else:
            name = name.removesuffix(".weight")
            self._modules.add(name)
        if rank != self._lora.rank:
            self._ranks.setdefault(rank, set()).add(name)

    def _plan_saved(self) -> list[SavedTensor]:
        rows = {
            info.name: next(rows_of(info.name, self.names.table, self._config.moe.num_experts))
            for info in self._hf.infos
        }
        of_tensor = {
            self.names.loaded(name): SavedTensor(
                name=f"{PREFIX}{self.names.loaded(name)}",
                theirs=name,
                info=info,
                transform=rows[info.name][0].transform,
                number=number,
            )
            for info in self._hf.infos
            for number, name in enumerate(rows[info.name][1])
        }
        trained = {info.name for info in self._hf.infos if self._saves(info)}
        modules = sorted(
            {
                name.rpartition(".")[0]
                for name, each in of_tensor.items()
                if each.info.name in trained
            }
        )
        adapted = {base.info.name for base in self.adapted}
        found: list[SavedTensor] = []
        for module in modules:
            for name, saved in of_tensor.items():
                if not name.startswith(f"{module}."):
                    continue
                if saved.info.expert or saved.info.name in adapted:
                    info = saved.info
                    why = "it holds routed experts" if info.expert else "it has adapters too"
                    raise MegacoreError(
                        f"PEFT cannot save {module} ({info.name}) whole, since {why}; write merged "
                        "weights with --merge"
                    )
                found.append(saved)
            first = rows["embedding"][1][0]
            if self._config.model.tie_embeddings and f"{module}.weight" == first:
                # PEFT looks for both.
                found.append(replace(of_tensor[first], name=f"{PREFIX}{HEAD}", theirs=HEAD))
            short = module.rpartition(".")[2]
            ends = sum(name.rpartition(".")[0].endswith(short) for name in of_tensor)
            self._saved_modules.append(short if ends == 1 else module)
        for each in found:
            whole = torch.empty(each.info.full_shape, device="meta")
            shape = each.transform.split(whole, self._shape)[each.number].shape
            self.specs.append(TensorSpec(name=each.name, dtype=self._dtype, shape=tuple(shape)))
        return found

    def _saves(self, info: ParamInfo) -> bool:
        return info.name in self.own and not info.name.endswith(".expert_bias")

    def on_meta(self, base: BaseParam) -> dict[str, Adapter]:
        """Return adapters of a parameter without values."""
        infos = describe_adapters(base.info, self._lora)
        found = {}
        for projection in base.projections:
            named = {
                factor: torch.empty(infos[f"{projection.name}.{factor}"].full_shape, device="meta")
                for factor in ADAPTER_NAMES
                if f"{projection.name}.{factor}" in infos
            }
            if named:
                found[projection.name] = Adapter(
                    a=named["lora_a"], b=named["lora_b"], magnitude=named.get("lora_magnitude")
                )
        return self._with_zeros(base, found, torch.device("meta"))

    def _with_zeros(
        self, base: BaseParam, adapters: dict[str, Adapter], device: torch.device
    ) -> dict[str, Adapter]:
        """Add adapters without effect to projections of experts that have none."""
        if not base.info.expert:
            return adapters
        experts, inputs = base.info.full_shape[0], base.info.full_shape[-1]
        zeros = {
            each.name: Adapter(
                a=torch.zeros(experts, self.rank, inputs, device=device),
                b=torch.zeros(experts, each.rows, self.rank, device=device),
            )
            for each in base.projections
        }
        return {**zeros, **adapters}


def tensors_of(site: Site, adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors of one site by their full names."""
    a, b, module = adapter.a, adapter.b, f"{PREFIX}{site.module}"
    if site.is_exchanged:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if site.is_joined:
        # Rows of A by expert, then rank; columns of B by rank, then expert.
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    found = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    if adapter.magnitude is not None:
        # PEFT saves it without the ending, which `transformers` needs to find it.
        found[f"{module}.lora_magnitude_vector.weight"] = adapter.magnitude
    return found


def adapter_of(
    site: Site, base: BaseParam, a: Tensor, b: Tensor, magnitude: Tensor | None = None
) -> Adapter:
    """Invert `tensors_of`; the tensors are in its order."""
    if site.is_joined:
        experts = base.info.full_shape[0]
        a = a.view(experts, -1, a.shape[-1])
        b = b.view(len(b), -1, experts).permute(2, 0, 1)
    if site.is_exchanged:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return Adapter(a=a, b=b, magnitude=magnitude)


def origin_of(base: str | Path, original: Mapping[str, Any] | None) -> str | None:
    """Return ``base_model_name_or_path``: a Hugging Face folder, else the name that it had."""
    if is_model_folder(Path(base)):
        return str(base)
    return (original or {}).get("_name_or_path")
