"""Rules between ``[graphs]`` and other settings, and the captured parts of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from megatrain.config.base import nearest_multiples
from megatrain.config.resolved import ResolvedConfig
from megatrain.config.sections import Config

Shown = Callable[[str], str]

# Scopes that together capture a whole layer, by kind of layer.
_WHOLE = {"dense": {"attn", "mlp"}, "moe": {"attn", "moe"}}


def graph_scopes(config: Config) -> tuple[str, ...]:
    """Return the captured parts of layers: those named, or for ``partial`` all without host sync.

    Example:
        >>> graph_scopes(Config(graphs={"mode": "partial"}))
        ('attn', 'mlp')
    """
    if not config.graphs.is_partial:
        return ()
    if config.graphs.scopes:
        return tuple(config.graphs.scopes)
    kinds = _layer_kinds(config)
    scopes = [] if config.data.document_mask else ["attn"]
    scopes += ["mlp"] if "dense" in kinds else []
    if "moe" in kinds:
        scopes.append("moe_router")
        scopes += [] if config.has_clones else ["moe_preprocess"]
    return tuple(scopes)


def graph_problems(config: ResolvedConfig, shown: Shown) -> Iterator[str]:
    """Yield one sentence per violated rule.

    Args:
        config: Configuration with all derived settings.
        shown: Formats a setting, given by its key, with its value and place.
    """
    graphs, backend = config.graphs, config.graphs.backend
    if graphs.mode == "off":
        return
    if backend in ("cuda", "transformer_engine") and config.run.backend == "gloo":
        yield (
            f"{shown('graphs.backend')} needs a GPU, but {shown('run.backend')} computes on "
            "the CPU; use emulated there"
        )
    for key in ("record_routing", "replay_routing"):
        if getattr(config.debug, key) is not None:
            yield (
                f"{shown(f'debug.{key}')} needs the host in every layer with experts, which "
                f'{shown("graphs.mode")} leaves out; set graphs.mode = "off", or leave {key} out'
            )
    if graphs.mode == "full_step" and config.optimizer.factory is not None:
        yield (
            f"{shown('graphs.mode')} records the optimizer, but that of "
            f'{shown("optimizer.factory")} reads numbers on the host; use graphs.mode = "full"'
        )
    if backend == "transformer_engine" and graphs.is_full:
        yield (
            f"{shown('graphs.backend')} captures modules, and no whole steps as "
            f'{shown("graphs.mode")} asks for; set graphs.backend = "cuda", or graphs.mode = '
            '"partial"'
        )
    if config.data.document_mask and (graphs.is_full or "attn" in graph_scopes(config)):
        yield (
            f"{shown('graphs.mode')} captures attention, but {shown('data.document_mask')} gives "
            'it other lengths in every step; set graphs.mode = "partial" without attn in '
            "graphs.scopes, or document_mask = false"
        )
    if graphs.is_partial:
        yield from _scope_problems(config, shown)
        yield from _recompute_problems(config, shown)
    else:
        yield from _full_problems(config, shown)


def default_transport(config: Config) -> Literal["auto", "collective", "peer"]:
    """Return ``moe.static_transport``, or ``"peer"`` for ``"auto"`` if graphs capture clones.

    Collectives send clones by a plan that the host reads, so a group whose members cannot reach
    each other's memory, for example on several hosts, must be an error before the first step.
    """
    graphs, moe, transport = config.graphs, config.moe, config.moe.static_transport
    captures_plans = graphs.is_full or "moe" in graph_scopes(config)
    is_open = transport == "auto" and moe.dispatcher == "static"
    if graphs.mode != "off" and captures_plans and is_open and config.has_clones:
        return "peer"
    return transport


def _layer_kinds(config: Config) -> set[str]:
    is_moe = config.moe.is_moe_layer
    return {"moe" if is_moe(index) else "dense" for index in range(config.model.num_layers)}


def _plans_on_device(config: Config) -> bool:
    """Return whether the host reads nothing of the clone plan."""
    return config.moe.dispatcher == "static" and config.moe.static_transport != "collective"


def _clone_problems(config: Config, shown: Shown, where: str) -> Iterator[str]:
    """Yield a conflict with clones that the host sends, where the dispatch is captured."""
    if config.has_clones and not _plans_on_device(config):
        yield (
            f"{where} captures where tokens go, but {shown('moe.echo.num_spare_slots')} lets the "
            'host send clones; set moe.dispatcher = "static" without moe.static_transport = '
            '"collective", capture attn, mlp, moe_router at most, or set num_spare_slots = 0'
        )


def _scope_problems(config: ResolvedConfig, shown: Shown) -> Iterator[str]:
    kinds, scopes = _layer_kinds(config), graph_scopes(config)
    where = shown("graphs.scopes")
    if "mlp" in scopes and "dense" not in kinds:
        yield f"{where} names mlp, but every layer has experts instead of an MLP; leave it out"
    if config.model.parallel_blocks and not ("attn" in scopes and {"mlp", "moe"} & {*scopes}):
        yield (
            f"{where} must name attn and mlp, or attn and moe, with model.parallel_blocks, whose "
            "results are added at once"
        )
    experts = [scope for scope in scopes if scope.startswith("moe")]
    if experts and "moe" not in kinds:
        yield (
            f"{where} names {experts[0]}, but the model has no experts (moe.num_experts = 0); "
            "leave it out"
        )
    elif experts:
        if "moe_preprocess" in experts and config.has_clones:
            yield (
                f"{where} names moe_preprocess, but clones ({shown('moe.echo.num_spare_slots')}) "
                "go by more of the plan than what it leaves behind; name moe instead, or leave it "
                "out"
            )
        if "moe" in experts:
            yield from _clone_problems(config, shown, where)
            yield from _kernel_problems(config, shown, where)
    if "moe" in scopes and "moe" in kinds and config.moe.dispatcher != "static":
        yield (
            f"{where} names moe, but {shown('moe.dispatcher')} asks the device how many tokens go "
            'where, which a graph cannot; set moe.dispatcher = "static", or capture '
            "moe_router and moe_preprocess"
        )


def _kernel_problems(config: ResolvedConfig, shown: Shown, where: str) -> Iterator[str]:
    """Yield reasons why experts have no grouped kernel on a GPU, where they are captured.

    Without the kernel, row counts are copied to the host, which a graph cannot contain.
    """
    if config.run.backend != "nccl" or config.moe.num_experts == 0:
        return
    if config.train.dtype == "float32":
        yield (
            f"{where} captures the experts, which needs a grouped kernel, and there is none for "
            f'{shown("train.dtype")}; set train.dtype = "bfloat16", or capture other scopes'
        )
    width = config.moe.ffn_hidden_size // config.parallel.etp
    sizes = {"model.hidden_size": config.model.hidden_size, "moe.ffn_hidden_size / etp": width}
    for name, size in sizes.items():
        if size % 8:
            yield (
                f"{name} must be a multiple of 8 where {where} captures the experts, got {size}; "
                f"nearest: {nearest_multiples(size, 8)}"
            )


def _recompute_problems(config: ResolvedConfig, shown: Shown) -> Iterator[str]:
    """Yield conflicts with recomputed parts, which must be captured whole or not at all."""
    scopes, recomputed = set(graph_scopes(config)), config.train.recomputed
    where = shown("graphs.mode")
    if recomputed and config.train.recompute_keep > 0:
        yield (
            f"{shown('train.recompute_keep')} treats microbatches differently, but microbatches "
            "share captured graphs; set recompute_keep = 0"
        )
    if "layer" in recomputed:
        for kind in sorted(_layer_kinds(config)):
            if not _WHOLE[kind] <= scopes:
                yield (
                    f"{where} captures a part of layers, but {shown('train.recompute')} runs whole "
                    f"layers again; capture {', '.join(sorted(_WHOLE[kind]))}, or recompute parts "
                    "(selective)"
                )
    if "moe" in recomputed and "moe_router" in scopes:
        yield (
            f"{where} captures a part of MoE layers, but {shown('train.recompute')} runs "
            "them again whole; capture moe, or leave moe out of one of the two"
        )


def _full_problems(config: ResolvedConfig, shown: Shown) -> Iterator[str]:
    if config.debug.check_messages and config.parallel.pp > 1:
        yield (
            f"{shown('graphs.mode')} records the whole step, but "
            f"{shown('debug.check_messages')} lets the host check every message; leave one out, "
            'or set graphs.mode = "partial"'
        )
    if config.moe.num_experts > 0:
        yield from _clone_problems(config, shown, shown("graphs.mode"))
        yield from _kernel_problems(config, shown, shown("graphs.mode"))
    if config.moe.num_experts > 0 and config.moe.dispatcher != "static":
        yield (
            f"{shown('graphs.mode')} records the whole step, but {shown('moe.dispatcher')} asks "
            'the device how many tokens go where; set moe.dispatcher = "static", or graphs.mode = '
            '"partial"'
        )
