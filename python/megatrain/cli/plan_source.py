"""Configuration that ``megacore plan`` plans: a TOML file, or a model of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.config import Config, config_from_values, load_config

# Not from `hf_folder`, which imports torch: a TOML file is planned without it.
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"


def load_planned(
    path: Path, settings: Sequence[tuple[str, str]], *, world_size: str | None = None
) -> Config:
    """Load a configuration for a plan.

    Args:
        path: TOML file; or a ``config.json`` or its folder, without need of weights: then the
            configuration is that of an import, which a note on the standard error stream describes.
        settings: Pairs of a key and its value, which win.
        world_size: Value of ``--world-size``.

    Raises:
        MegacoreError: As in `load_config` and `sections_from_hf`.
    """
    flags: dict[str, str] = {}
    if world_size is not None:
        settings = [*settings, ("run.nproc", world_size)]
        flags = {"run.nproc": f"--world-size={world_size}"}
    is_folder = path.is_dir() and any((path / name).is_file() for name in (_CONFIG, _ADAPTER))
    if not is_folder and path.suffix != ".json":
        return load_config(path, settings, flags=flags)
    from megatrain.hf.settings import import_values, sections_from_hf
    from megatrain.hf_folder import read_config, read_object

    hf_config = read_config(path) if is_folder else read_object(path)
    values = import_values(*sections_from_hf(hf_config))
    dtype = hf_config.get("dtype") or hf_config.get("torch_dtype")
    # As in an import: float16 would need a loss scale.
    if dtype in ("float32", "bfloat16", "float16"):
        values["train"] = {"dtype": "bfloat16" if dtype == "float16" else dtype}
    config = config_from_values(values, source=str(path), overrides=settings)
    print(
        f"note: {path} as an import would have it, with model.seq_length = "
        f"{config.model.seq_length} and train.dtype = {config.train.dtype!r}; others are set as "
        "for train, such as --model.seq_length=4096",
        file=sys.stderr,
    )
    return config
