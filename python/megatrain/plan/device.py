"""Calibrations: the constants of a kind of device, read from TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError
from megacore.suggest import closest_matches

FOLDER = Path(__file__).with_name("devices")
_COMMON = FOLDER / "common.toml"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Constants of a device and its links; ``devices/common.toml`` describes each.

    Attributes:
        name: Name of the device.
        origin: ``literature`` or ``measured``.
        stack: Software that the constants hold for.
    """

    name: str
    origin: str
    stack: str
    # [peak]: FLOP/s, bytes/s, bytes.
    peak_fp32: float
    peak_bf16: float
    peak_fp8: float
    peak_hbm: float
    peak_memory_gib: float
    peak_clock: float
    peak_at_once: int
    # [gemm]: fractions of peak, in long runs under the power limit.
    gemm_fp32: float
    gemm_bf16: float
    gemm_fp8: float
    gemm_fp8_blk: float
    gemm_half: float
    gemm_cast_bytes: float
    gemm_launch_us: float
    # [grouped]
    grouped_efficiency: float
    grouped_half: float
    grouped_half_fused: float
    # [attention]
    attention_forward: float
    attention_fp32: float
    attention_backward: float
    attention_half: float
    attention_unfused: float
    attention_flash2: float
    attention_window: float
    # [memory_bound]
    memory_bound_efficiency: float
    memory_bound_layer: float
    memory_bound_layer_fp32: float
    memory_bound_loss: float
    memory_bound_loss_blocks: float
    memory_bound_permute: float
    memory_bound_optimizer: float
    # [host]: seconds
    host_layer_ms: float
    host_moe_alltoall_ms: float
    host_moe_hybridep_ms: float
    host_moe_graphs_ms: float
    host_step_ms: float
    host_waits: float
    # [link]
    link_domain: int
    link_nvlink: float
    link_nic: float
    link_nvlink_efficiency: float
    link_nic_efficiency: float
    link_nvlink_us: float
    link_nic_us: float
    link_alltoall_nvlink: float
    link_alltoall_nic: float
    # [exposed]: shares
    exposed_tp: float
    exposed_tp_overlapped: float
    exposed_ep_overlapped: float
    exposed_cp: float
    exposed_dp: float
    exposed_pp: float
    exposed_fsdp: float
    contention_share: float
    # [memory]
    memory_context_gib: float
    memory_comm_gib: float
    memory_fragmentation: float
    memory_workspace: float
    # [interval]: 80% of runs lie within
    interval_time: float
    interval_memory: float
    sources: tuple[str, ...] = field(default=(), compare=False)

    def peak(self, precision: str) -> float:
        """Return the sustained FLOP/s of large matrix products in a precision."""
        return self.peak_clock * self._at_full_clock(precision)

    def peak_flops(self, precision: str) -> float:
        """Return the FLOP/s of matrix products in a precision as in the data sheet (dense)."""
        if precision == "fp32":
            return self.peak_fp32
        return self.peak_fp8 if "fp8" in precision else self.peak_bf16

    def _at_full_clock(self, precision: str) -> float:
        if precision == "fp32":
            return self.peak_fp32 * self.gemm_fp32
        if precision == "fp8-blk":
            return self.peak_fp8 * self.gemm_fp8_blk
        if "fp8" in precision:
            return self.peak_fp8 * self.gemm_fp8
        return self.peak_bf16 * self.gemm_bf16


def known_devices() -> list[str]:
    """Return the names of the shipped calibrations."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path != _COMMON)


def load_device(name: str, changes: Mapping[str, float] | None = None) -> Device:
    """Load a calibration by the name of a device, or from a file.

    Args:
        name: ``h100``, or a path that ends in ``.toml``.
        changes: Constants to replace, by name, as ``{"link_domain": 4}``.

    Raises:
        ConfigError: If the name is unknown, or the file cannot be read or lacks a constant.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name.lower()}.toml"
    if not name.endswith(".toml") and name.lower() not in known_devices():
        near = closest_matches(name.lower(), known_devices(), count=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"device must be one of {', '.join(known_devices())}, or a calibration file "
            f'NAME.toml, got "{name}"{hint}'
        )
    own = _flat(path)
    base = _flat(FOLDER / f"{own['base']}.toml") if own.get("base") in known_devices() else {}
    values = {**_flat(_COMMON), **base, **own, **(changes or {})}
    names = {each.name for each in fields(Device)}
    if unknown := sorted(set(values) - names - {"fitted", "base"}):
        raise ConfigError(f"{path}: constant {unknown[0]} is unknown; leave it out")
    if missing := sorted(names - set(values) - {"sources"}):
        raise ConfigError(f"{path}: constant {missing[0]} is missing; add it")
    for key in ("fitted", "base"):
        values.pop(key, None)
    values["sources"] = tuple(values.get("sources", ()))
    for key, value in values.items():
        if key not in ("name", "origin", "stack", "sources") and not _is_number(value):
            raise ConfigError(f"{path}: {key} must be a number of at least 0, got {value!r}")
    return Device(**values)


def match_device(name: str) -> str | None:
    """Return the calibration of a GPU by the name that its driver gives it.

    Example:
        >>> match_device("NVIDIA H100 80GB HBM3"), match_device("Tesla T4")
        ('h100', None)
    """
    words = name.lower().replace("-", " ").split()
    if "a100" in words and "40gb" in name.lower():
        return "a100-40"
    return next((known for known in known_devices() if known in words), None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _flat(path: Path) -> dict[str, Any]:
    """Read a file as one dictionary with names ``section_key``."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such calibration file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable calibration file ({error})") from error
    values: dict[str, Any] = {}
    for section, content in document.items():
        if section == "id":
            values |= content
        elif isinstance(content, dict):
            values |= {f"{section}_{key}": value for key, value in content.items()}
        else:
            raise ConfigError(f"{path}: {section} must be a section, got {content!r}")
    return values
