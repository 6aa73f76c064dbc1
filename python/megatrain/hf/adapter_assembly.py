"""Adapters from tensors under the names of PEFT that arrive one after the other, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf.adapter_plan import AdapterPlan, adapter_of, tensors_of
from megatrain.hf.assembly import Part, TensorAssembly, check_float
from megatrain.hf.peft_names import Adapter, BaseParam, Site


@dataclass(frozen=True, eq=False)
class _Form:
    """Adapters of one parameter under one set of names.

    Attributes:
        base: The parameter and its sites.
        tensors: Sites and shapes of the tensors by name.
    """

    base: BaseParam
    tensors: dict[str, tuple[Site, tuple[int, ...]]]


class AdapterAssembly:
    """Checks tensors of adapters by name and shape, and joins them to parameters of a run.

    Only tensors of incomplete parameters are held. Experts may have one adapter each or all in one
    tensor, as in files.

    Args:
        plan: The tensors that an export of the run has.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.
    """

    def __init__(self, plan: AdapterPlan, model: ModelConfig, moe: MoEConfig) -> None:
        self._plan = plan
        self._forms: dict[str, _Form] = {}
        self._missing: dict[str, str] = {}
        self._held: dict[_Form, dict[str, Tensor]] = {}
        self._seen: set[str] = set()
        names = {base.info.name for base in plan.adapted}
        for base in (*plan.adapted, *plan.names.joined):
            if base.info.name not in names:
                continue
            form = _Form(
                base,
                {
                    name: (site, tuple(tensor.shape))
                    for site, adapter in plan.names.split(base, plan.on_meta(base))
                    for name, tensor in tensors_of(site, adapter).items()
                },
            )
            for name in form.tensors:
                self._forms.setdefault(name, form)
            self._missing.setdefault(base.info.name, next(iter(form.tensors)))
        self._saved = {saved.name: saved.theirs for saved in plan.saved}
        self._whole = TensorAssembly(
            plan.family, model, moe, only={saved.info.name for saved in plan.saved}
        )

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check a tensor before its values are there.

        Raises:
            MegacoreError: If it has no place, came before, or has another shape or no float type.
        """
        if name in self._saved:
            self._whole.check(self._saved[name], shape, dtype)
            return
        form = self._forms.get(name)
        if form is None:
            raise MegacoreError(
                f"tensor {name} is not of the adapters of this run, such as "
                f"{self._plan.specs[0].name}; the weights of their base stay as they are"
            )
        if name in self._seen or form.base.info.name not in self._missing:
            raise MegacoreError(f"tensor {name} must come once, but it came a second time")
        wanted = form.tensors[name][1]
        if shape != wanted:
            raise MegacoreError(f"tensor {name} must have shape {wanted}, got {shape}")
        check_float(name, dtype)
        self._seen.add(name)

    def take(self, name: str, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Take the values of a tensor that :meth:`check` accepted; yield what it completes.

        Raises:
            MegacoreError: If projections without adapters in this run have some.

        Sync:
            Waits for the device if the tensor completes the adapters of experts.
        """
        if name in self._saved:
            yield from self._whole.take(self._saved[name], tensor)
            return
        form = self._forms[name]
        held = self._held.setdefault(form, {})
        held[name] = tensor.detach().float()
        if held.keys() == form.tensors.keys():
            del self._held[form], self._missing[form.base.info.name]
            yield from self._joined(form, held)

    def check_complete(self) -> None:
        """Check that all adapters have come.

        Raises:
            MegacoreError: With the name of a missing tensor.
        """
        self._whole.check_complete()
        for param, absent in self._missing.items():
            for form, held in self._held.items():
                if form.base.info.name == param:
                    absent = next(name for name in form.tensors if name not in held)
            raise MegacoreError(f"there is no tensor {absent}, which the adapters need")

    def _joined(self, form: _Form, held: Mapping[str, Tensor]) -> Iterator[tuple[Part, Tensor]]:
        base, plan = form.base, self._plan
        found: dict[int, Adapter] = {}
        for site in base.sites:
            own = {name: held[name] for name, (each, _) in form.tensors.items() if each == site}
            if own:
                found[site.number] = adapter_of(site, base, *own.values())
        for name, adapter in plan.names.join(base, found, plan.rank).items():
            if adapter.a.shape[-2] != plan.rank:
                raise MegacoreError(
                    f"the B of {name} must have a block of rank {plan.rank} for each projection"
                )
            if f"{name}.lora_a" not in plan.own:
                if adapter.a.any() and adapter.b.any():
                    raise MegacoreError(
                        f"{name} has no adapter in this run (lora.targets), so the tensors of "
                        "its adapter must be zero"
                    )
                continue
            values = {"lora_a": adapter.a, "lora_b": adapter.b}
            if adapter.magnitude is not None:
                values["lora_magnitude"] = adapter.magnitude
            for factor, value in values.items():
                yield Part(name=f"{name}.{factor}", first=0, last=len(value)), value
