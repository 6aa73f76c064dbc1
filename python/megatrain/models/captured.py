"""Captured parts of transformer layers, and the eager rest of these layers.

A captured part begins with the layer or with its MLP and ends at the end of a scope. Its results
are the inputs of the eager rest, all of them tensors: the residual stream, this rank's tokens, and
the fields of the dispatch plan in ``captured_fields``. Host reads of sizes follow the graph.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.moe.dispatchers import DispatchPlan
from megacore.moe.router import RoutingResult
from megacore.ops.counter_random import StepKeys
from megacore.ops.recompute import RecomputeCache, recompute
from megacore.parallel.batch import Microbatch
from megatrain.models.dropout import batch_in_use
from megatrain.models.gpt import GPTChunk
from megatrain.models.moe_block import MoEBlock
from megatrain.models.transformer import TransformerLayer

Call = Callable[..., Any]
Results = dict[str, Tensor]

_PLAN_FIELDS = tuple(DispatchPlan.__dataclass_fields__)
_ROUTING_FIELDS = tuple(RoutingResult.__dataclass_fields__)


class GraphedScope(nn.Module):
    """Captured part of one layer, as a module with tensor inputs and outputs.

    Args:
        layer: The layer.
        scopes: Scopes to capture, of ``graphs.mode``.
        rotary: Rotary tables at the positions of the tokens.
        keys: Keys of the step's random numbers.
        recomputed: Modules to recompute in the backward pass, as in ``train.recompute``.

    Attributes:
        captured_name: The layer and its captured scopes, for messages.
        calls: Replacement callable for each microbatch; empty until the capture.
    """

    def __init__(
        self,
        layer: TransformerLayer,
        scopes: Sequence[str],
        *,
        rotary: tuple[Tensor, Tensor],
        keys: StepKeys,
        recomputed: frozenset[str],
    ) -> None:
        super().__init__()
        is_moe = isinstance(layer.mlp, MoEBlock)
        own = {"attn", "moe", "moe_router", "moe_preprocess"} if is_moe else {"attn", "mlp"}
        self.scopes = frozenset(scopes) & own
        # Not registered: parameters outside of the scopes do not belong to this module.
        self._layer = (layer,)
        self._rotary = rotary
        self._keys = keys
        self._recomputed = recomputed
        self.captured_name = f"layer {layer.index} ({', '.join(sorted(self.scopes))})"
        self.calls: Mapping[int, Call] = {}
        self.inside = nn.ModuleList(_modules(layer, self.scopes))

    @property
    def layer(self) -> TransformerLayer:
        """The layer."""
        return self._layer[0]

    def sample(self, x_SBH: Tensor, batch: Microbatch) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        """Return the arguments of a call for these tensors."""
        named: dict[str, Tensor] = {}
        if self._reads_samples:
            named["sample_ids"] = batch.sample_ids
        if self._reads_factor:
            assert isinstance(batch.router_factor, Tensor)
            named["loss_factor"] = batch.router_factor
        if self._router is not None and batch.lengths is not None:
            named["lengths"] = batch.lengths
        return (x_SBH,), named

    def forward(
        self,
        x_SBH: Tensor,
        *,
        sample_ids: Tensor | None = None,
        loss_factor: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Results:
        """Compute the captured part; the results are named tensors."""
        if sample_ids is None:
            sample_ids = torch.zeros(x_SBH.shape[1], dtype=torch.int64, device=x_SBH.device)
        batch = Microbatch(
            tokens=sample_ids[:, None],
            labels=None,
            sample_ids=sample_ids,
            step=-1,  # unused: the keys depend on the step
            loss_factor=1.0 if loss_factor is None else loss_factor,
            keys=self._keys,
            lengths=lengths,
        )
        if "layer" in self._recomputed:
            cache = RecomputeCache()  # so that the second run of a router does not count twice
            return {"x": recompute(lambda x: self._run(x, batch, cache)["x"], x_SBH, cache=cache)}
        return self._run(x_SBH, batch)

    def run(
        self,
        layer: TransformerLayer,
        x_SBH: Tensor,
        batch: Microbatch,
        rotary: tuple[Tensor, Tensor],
        recomputed: frozenset[str],
    ) -> Tensor:
        """Run the whole layer: the eager beginning, the captured part, the eager rest."""
        assert batch.number is not None
        if "attn" not in self.scopes:
            x_SBH = layer.attention_block(x_SBH, rotary, batch, recomputed)
        if not x_SBH.requires_grad:
            # Captured for an input with a gradient, which one behind frozen parameters has not.
            x_SBH = x_SBH.detach().requires_grad_()
        args, named = self.sample(x_SBH, batch)
        found: Results = self.calls[batch.number](*args, **named)
        if self.scopes & {"mlp", "moe"}:
            return found["x"]
        if "moe_router" not in self.scopes:
            return layer.mlp_block(found["x"], batch, recomputed)
        return self._finish_experts(found, found.get("x", x_SBH), batch)

    def _run(
        self, x_SBH: Tensor, batch: Microbatch, cache: RecomputeCache | None = None
    ) -> Results:
        layer, recomputed = self.layer, self._recomputed
        if self.scopes >= {"attn", "mlp"} or self.scopes >= {"attn", "moe"}:
            return {"x": layer.blocks(x_SBH, self._rotary, batch, recomputed, cache=cache)}
        if "attn" in self.scopes:
            x_SBH = layer.attention_block(x_SBH, self._rotary, batch, recomputed)
        if self.scopes & {"mlp", "moe"}:
            x_SBH = layer.mlp_block(x_SBH, batch, recomputed, cache=cache)
        if "moe_router" not in self.scopes:
            return {"x": x_SBH}
        block = _moe_block(layer)
        normed_SBH = layer.mlp_norm(x_SBH)
        tokens_SBH, routing = block.route(normed_SBH, batch)
        results = {"normed": normed_SBH}
        if "attn" in self.scopes:
            results["x"] = x_SBH
        if tokens_SBH is not normed_SBH:
            results["tokens"] = tokens_SBH
        if "moe_preprocess" not in self.scopes:
            return results | _tensors(routing, _ROUTING_FIELDS)
        plan = block.moe.plan(routing)
        return results | _tensors(plan, block.moe.dispatcher.captured_fields)

    def _finish_experts(self, found: Results, x_SBH: Tensor, batch: Microbatch) -> Tensor:
        block = _moe_block(self.layer)
        if "moe_preprocess" in self.scopes:
            plan = DispatchPlan(**{name: found.get(name) for name in _PLAN_FIELDS})  # type: ignore[arg-type]
        else:
            routing = RoutingResult(**{name: found.get(name) for name in _ROUTING_FIELDS})  # type: ignore[arg-type]
            plan = block.moe.plan(routing)
        normed_SBH = found["normed"]
        tokens_SBH = found.get("tokens", normed_SBH)
        with batch_in_use(batch):
            inner_SBH = block.moe.finish(normed_SBH, tokens_SBH, plan)
        return self.layer.add_mlp(x_SBH, inner_SBH, batch)

    @property
    def _reads_samples(self) -> bool:
        return any(_draws(module) for module in self.modules()) or (
            self._router is not None and self._router.options.force_balanced
        )

    @property
    def _reads_factor(self) -> bool:
        router = self._router
        return (
            router is not None and max(router.options.aux_loss_coef, router.options.z_loss_coef) > 0
        )

    @property
    def _router(self) -> Any:
        captured = self.scopes & {"moe", "moe_router"}
        return _moe_block(self.layer).moe.router if captured else None


def random_uses(chunks: Sequence[nn.Module]) -> list[str]:
    """Return the random-number uses of all modules, as in `StepKeys`."""
    return [
        use
        for chunk in chunks
        for module in chunk.modules()
        for use in getattr(module, "random_uses", ())
    ]


def transformer_layers(chunk: GPTChunk) -> list[TransformerLayer]:
    """Return all layers of a chunk in forward order, including those for multi-token prediction."""
    further = () if chunk.predictions is None else (p.layer for p in chunk.predictions.layers)
    return [layer for layer in (*chunk.layers, *further) if isinstance(layer, TransformerLayer)]


def captured_parts(
    chunk: GPTChunk,
    scopes: Sequence[str],
    *,
    seq_length: int,
    keys: StepKeys,
    recomputed: frozenset[str],
) -> list[GraphedScope]:
    """Return the captured parts of a chunk; layers without captured scopes are skipped.

    Args:
        chunk: The model chunk.
        scopes: Scopes to capture, of ``graphs.mode``.
        seq_length: Tokens per sample of every batch.
        keys: Keys of the step's random numbers.
        recomputed: Modules to recompute in the backward pass.
    """
    parts = [
        GraphedScope(
            layer,
            scopes,
            rotary=chunk.rotary(seq_length, layer=layer.index),
            keys=keys,
            recomputed=recomputed,
        )
        for layer in transformer_layers(chunk)
    ]
    return [part for part in parts if part.scopes]


def _modules(layer: TransformerLayer, scopes: frozenset[str]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    if "attn" in scopes:
        modules += [layer.attention_norm, layer.attention, layer.attention_output_norm]
        modules += [layer.attention_dropout]
    if scopes & {"mlp", "moe"}:
        modules += [layer.mlp_norm, layer.mlp, layer.mlp_output_norm, layer.mlp_dropout]
    if "moe_router" in scopes:
        modules += [layer.mlp_norm, _moe_block(layer).moe.router]
    return modules


def _moe_block(layer: TransformerLayer) -> MoEBlock:
    assert isinstance(layer.mlp, MoEBlock)
    return layer.mlp


def _draws(module: nn.Module) -> bool:
    return bool(getattr(module, "random_uses", ()))


def _tensors(value: object, fields: Sequence[str]) -> Results:
    """Return the named fields that hold a tensor."""
    found = {name: getattr(value, name) for name in fields}
    return {name: field for name, field in found.items() if field is not None}
