"""Export of the adapters of a run in the format of PEFT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.param_info import ParamInfo
from megatrain.checkpoint import StoredWeights
from megatrain.config import Config, config_from_values
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf import HFTensors, config_to_hf
from megatrain.hf.export_checkpoint import check_free, open_stored
from megatrain.hf.import_hf import HEAD
from megatrain.hf.kept_files import KeptFiles
from megatrain.hf.merged_weights import open_base, read_adapters
from megatrain.hf.peft_config import (
    WEIGHTS_NAME,
    alpha_of,
    endings,
    vllm_warnings,
)
from megatrain.hf.peft_names import PREFIX, Adapter, BaseParam, PeftNames, Site
from megatrain.hf.rows import rows_of
from megatrain.hf_folder import ADAPTER_NAME, TensorSpec, is_model_folder, write_file, write_json
from megatrain.models.build import torch_dtype
from megatrain.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class ExportedAdapter:
    """Result of an export.

    Attributes:
        checkpoint: The checkpoint that was read.
        config: Content of ``adapter_config.json``.
        num_params: Parameters of the adapters, and of modules that are saved whole.
        notes: Differences from the settings of the run, one sentence each.
        warnings: What other programs refuse, one sentence each.
    """

    checkpoint: Path
    config: dict[str, Any]
    num_params: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def export_adapter(
    path: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    step: int | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> ExportedAdapter:
    """Write the adapters of a checkpoint of any layout in the format of PEFT, in this process.

    Writes ``adapter_model.safetensors`` and ``adapter_config.json``. Memory: the adapters, and the
    modules that are trained whole.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        out: Output folder; must be new or empty.
        base: ``base_model_name_or_path``. Default: the folder that the run started from.
        dtype: Number format. Default: ``"float32"``.
        step: The checkpoint's step. Default: the latest.
        family: ``model_type`` of the base. Default: that of the import, else the first that has
            the model's shape.
        averaged: Write the moving average (``optimizer.ema_decay``).

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or has no moving average.
        MegacoreError: If the run has no adapters, PEFT has no form for them, or ``out`` is not
            empty or not writable.
    """
    out = check_free(out)
    stored = open_stored(path, step=step, averaged=averaged)
    config = config_from_values(stored.config, source=str(stored.folder))
    if not config.lora.is_on:
        raise MegacoreError(
            f"{stored.folder} is not of a run with adapters (lora.rank is not set); leave "
            "--adapter out"
        )
    kept = KeptFiles.of(config.data.tokenizer, stored.folder)
    original = kept.original or config_to_hf(config.model, config.moe, family=family)
    with stored, torch.no_grad():
        content = _Content(stored, config, family or original["model_type"])
        content.add_adapters()
        content.add_saved()
        stored.verify()
    folder = Path(stored.state.base["path"])
    origin = base or (str(folder) if is_model_folder(folder) else original.get("_name_or_path"))
    settings = content.settings(origin)
    if origin is None:
        content.notes.append(
            "base_model_name_or_path is empty, since the run started from a checkpoint; name the "
            "base with --base"
        )
    tensors = dict(sorted(content.tensors.items()))
    written = torch_dtype(dtype or "float32")
    specs = [
        TensorSpec(name=name, dtype=written, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    try:
        with filled_folder(out):
            write_file(out / WEIGHTS_NAME, specs, ([tensor] for tensor in tensors.values()))
            write_json(out / ADAPTER_NAME, settings)
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ExportedAdapter(
        checkpoint=stored.folder,
        config=settings,
        num_params=sum(math.prod(spec.shape) for spec in specs),
        notes=tuple(content.notes),
        warnings=vllm_warnings(settings),
    )


class _Content:
    """Tensors of the file, and the modules and parameters that they belong to.

    Attributes:
        tensors: Tensors by name.
        notes: As in `ExportedAdapter`.
    """

    def __init__(self, stored: StoredWeights, config: Config, family: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.notes: list[str] = []
        self._stored, self._config, self._lora = stored, config, config.lora
        self._own = set(stored.names())
        self._hf = HFTensors(family, config.model, config.moe, dtype=torch.float32)
        self._names = PeftNames(family, self._hf.infos, config.model, config.moe)
        self._modules: set[str] = set()
        self._parameters: set[str] = set()
        self._saved: list[str] = []
        self._is_turned = False
        # Names of adapters with a rank other than `lora.rank`.
        self._ranks: dict[int, set[str]] = {}

    def add_adapters(self) -> None:
        """Add the adapters of all projections.

        Raises:
            MegacoreError: If PEFT has no form for them.
        """
        params = self._names.params
        found = [read_adapters(self._stored, base.info) for base in params]
        has_experts = any(
            base.info.expert and each for base, each in zip(params, found, strict=True)
        )
        for base, adapters in zip(params, found, strict=True):
            if base.info.expert and has_experts:
                # PEFT drops or refuses files with some projections of experts only.
                adapters = {**_zeros(base, self._lora.rank or 1), **adapters}
            if adapters:
                for site, adapter in self._names.split(base, adapters):
                    self._add(site, adapter)
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

    def _add(self, site: Site, adapter: Adapter) -> None:
        a, b, module = adapter.a, adapter.b, f"{PREFIX}{site.module}"
        rank = a.shape[-2]
        if site.is_joined:
            # Rows of A by expert, then rank; columns of B by rank, then expert.
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        self.tensors[f"{module}.lora_A.weight"] = a
        self.tensors[f"{module}.lora_B.weight"] = b
        if adapter.magnitude is not None:
            # PEFT saves it without the ending, which `transformers` needs to find it.
            self.tensors[f"{module}.lora_magnitude_vector.weight"] = adapter.magnitude
        self._is_turned |= site.inputs_first and not site.is_joined
        name = site.parameter
        if self._names.is_parameter(site):
            self._parameters.add(name)
            if site.expert is not None and name.endswith("gate_up_proj"):
                rank *= 2  # PEFT joins gate and up
        else:
            name = name.removesuffix(".weight")
            self._modules.add(name)
        if rank != self._lora.rank:
            self._ranks.setdefault(rank, set()).add(name)

    def add_saved(self) -> None:
        """Add the modules that are trained whole.

        Raises:
            MegacoreError: If a module has adapters too, or joined experts.
        """
        shape = GPTShape.from_config(self._config.model)
        rows = {
            info.name: next(rows_of(info.name, self._names.table, self._config.moe.num_experts))
            for info in self._hf.infos
        }
        of_tensor = {
            self._names.loaded(name): (info, number)
            for info in self._hf.infos
            for number, name in enumerate(rows[info.name][1])
        }
        adapted = {base.info.name for base in self._names.params if self._adapts(base)}
        modules = sorted(
            {name.rpartition(".")[0] for name, (info, _) in of_tensor.items() if self._saves(info)}
        )
        embedding = rows["embedding"][1]
        base = open_base(self._stored) if modules else self._stored
        for module in modules:
            for name, (info, number) in of_tensor.items():
                if not name.startswith(f"{module}."):
                    continue
                if info.expert or info.name in adapted:
                    raise MegacoreError(
                        f"PEFT cannot save {module} whole, since it has {info.name}; write merged "
                        "weights with --merge"
                    )
                source = self._stored if info.name in self._own else base
                whole = source.read_param(info.name)
                self.tensors[f"{PREFIX}{name}"] = (
                    rows[info.name][0].transform.split(whole, shape)[number].contiguous()
                )
            if self._config.model.tie_embeddings and f"{module}.weight" in embedding:
                # PEFT looks for both.
                self.tensors[f"{PREFIX}{HEAD}"] = self.tensors[f"{PREFIX}{module}.weight"]
            short = module.rpartition(".")[2]
            ends = sum(name.rpartition(".")[0].endswith(short) for name in of_tensor)
            self._saved.append(short if ends == 1 else module)

    def _adapts(self, base: BaseParam) -> bool:
        return any(f"{each.name}.lora_a" in self._own for each in base.projections)

    def _saves(self, info: ParamInfo) -> bool:
        return info.name in self._own and not info.name.endswith(".expert_bias")

    def settings(self, origin: str | None) -> dict[str, Any]:
        """Return the content of ``adapter_config.json``."""
        lora, model = self._lora, self._config.model
        assert lora.rank is not None
        copies = tuple(f"model.layers.{layer}." for layer in model.mtp_layers)
        every = {
            self._names.loaded(spec.name)
            for spec in self._hf.specs
            if not spec.name.startswith(copies)
        }
        every |= {site.parameter for base in self._names.params for site in base.sites}
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
            "ensure_weight_tying": model.tie_embeddings and bool(self._saved),
            "fan_in_fan_out": self._is_turned,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": alpha_of(lora, lora.rank),
            "lora_dropout": 0.0 if self._parameters else lora.dropout,
            "modules_to_save": self._saved or None,
            "peft_type": "LORA",
            "r": lora.rank,
            "rank_pattern": ranks,
            "target_modules": endings(self._modules, modules),
            "target_parameters": endings(self._parameters, every) or None,
            "task_type": "CAUSAL_LM",
            "use_dora": lora.dora,
            "use_rslora": lora.rs,
        }


def _zeros(base: BaseParam, rank: int) -> dict[str, Adapter]:
    """Return adapters without effect."""
    experts, inputs = base.info.full_shape[0], base.info.full_shape[-1]
    return {
        each.name: Adapter(
            a=torch.zeros(experts, rank, inputs), b=torch.zeros(experts, each.rows, rank)
        )
        for each in base.projections
    }
