"""Stages of a model of the user's own, built by the function of ``model.factory``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from megacore.errors import ConfigError
from megacore.parallel.batch import Microbatch
from megacore.parallel.param_info import Matrices, ParamInfo
from megacore.parallel.params import shard
from megatrain.config import MoEConfig, ResolvedConfig
from megatrain.config.user_objects import call_object, import_object
from megatrain.models.init import name_seed
from megatrain.models.layers import ModelContext
from megatrain.models.loss import FirstLossCheck, Loss, LossContext
from megatrain.models.stage import Stage

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class StageContext(ModelContext):
    """Construction context of a stage of one's own: also the context of all megacore layers.

    Attributes:
        is_first: Whether the stage starts the model, so its input is ``None``.
        is_last: Whether the stage ends the model, so its output is the loss or goes to
            ``train.loss``.
        tied_weight: The embedding of an earlier stage on this rank, for a tied `Head`.
    """

    is_first: bool
    is_last: bool
    tied_weight: nn.Parameter | None = None

    def parameter(self, info: ParamInfo, full: Tensor) -> nn.Parameter:
        """Make and register a parameter from its full value; a rank keeps its shard.

        Args:
            info: Name, full shape and split dimensions.
            full: The whole initial value, the same on every rank.
        """
        tp = self.groups.etp if info.expert else self.groups.tp
        local = shard(
            full.to(self.params.device),
            info,
            tp_position=tp.position if info.tp_dim is not None else 0,
            tp_size=tp.size if info.tp_dim is not None else 1,
            ep_position=self.groups.ep.position if info.ep_dim is not None else 0,
            ep_size=self.groups.ep.size if info.ep_dim is not None else 1,
        )
        return self.params.remember(info, local)

    def replicated(
        self, name: str, make: Callable[[], M], *, partial_grads: bool | None = None
    ) -> M:
        """Make a module of torch that every tp rank holds whole, and register its parameters.

        Initial values depend on ``train.seed`` and the name, not on the layout. Matrices have
        weight decay, vectors do not. Weights of ``nn.Linear`` are matrices for Muon.

        Args:
            name: Global name, the prefix of the parameters' names.
            make: Makes the module.
            partial_grads: Whether each tp rank sees only a part of its inputs, so that gradients
                are summed over tp. Default: with sequence parallelism, as is right between
                tensor-parallel regions; inside of a region it is always true.
        """
        device = self.params.device
        on_meta = torch.device("meta") if device.type == "meta" else nullcontext()
        with torch.random.fork_rng(devices=[]), on_meta:
            torch.manual_seed(name_seed(self.params.seed, name))
            module = make()
        module.to(device=device, dtype=self.params.dtype)
        partial = self.region.sequence_parallel if partial_grads is None else partial_grads
        linear = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
        for key, param in module.named_parameters():
            is_matrix = any(param is weight for weight in linear)
            info = ParamInfo(
                name=f"{name}.{key}",
                full_shape=tuple(param.shape),
                tp_dim=None,
                sequence_parallel=partial,
                weight_decay=param.dim() > 1,
                matrices=Matrices() if is_matrix else None,
            )
            self.params.made.append((info, param))
        return module


class ModelFactory(Protocol):
    """Function of ``model.factory``."""

    def __call__(self, config: ResolvedConfig, layers: range, context: StageContext) -> nn.Module:
        """Build one pipeline stage.

        Args:
            config: The resolved configuration.
            layers: Global numbers of the layers of this stage, possibly none.
            context: Process groups, and makers of parameters.

        Returns:
            A module whose ``forward(hidden, batch)`` takes the output of the stage before
            (``None`` on the first stage) and the microbatch. It returns ``(S[/tp], B, H)`` for the
            next stage; on the last stage the scalar mean loss of this cp rank's tokens, or
            anything that ``train.loss`` takes.
        """


class OwnStage(Stage):
    """Adapter of a stage of one's own: checks its parameters, its experts and its outputs.

    Args:
        config: A resolved configuration with ``model.factory``.
        layers: Global numbers of the layers of the stage.
        context: Construction context.

    Raises:
        ConfigError: If the factory fails, or its module does not fit.
    """

    def __init__(self, config: ResolvedConfig, layers: range, context: StageContext) -> None:
        super().__init__(context)
        self.layers = layers
        self._is_last = context.is_last
        self._shown = f'model.factory = "{config.model.factory}"'
        self._loss = loss_of(config.train.loss)
        shown = self._shown if self._loss is None else f'train.loss = "{config.train.loss}"'
        self._check_loss = FirstLossCheck(shown, context.region.group)
        self._loss_context = LossContext.of(context.region, context.shape)
        self._dtype, self._hidden = context.params.dtype, context.shape.hidden
        factory: ModelFactory = import_object(config.model.factory or "", setting="model.factory")
        module = call_object(factory, config, layers, context, shown=self._shown)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self._shown} must return a torch.nn.Module, got {type(module).__name__}"
            )
        self.module = module
        self._check_registered()
        self._check_experts(config.moe)

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding weight of this stage that others share, or ``None``."""
        return next((p for info, p in self.param_infos() if info.shared == "embedding"), None)

    def forward(
        self, hidden: Tensor | None, batch: Microbatch, *, keep_activations: bool = False
    ) -> Tensor:
        """Run the stage, see `ModelFactory`; nothing is recomputed."""
        del keep_activations
        output = self.module(hidden, batch)
        if not self._is_last:
            self._check_output(output, batch)
            return output  # type: ignore[no-any-return]
        if self._loss is not None:
            return self._check_loss(self._loss(output, batch, self._loss_context)).float()
        advice = "; return the mean loss, or set train.loss"
        return self._check_loss(output, advice=advice).float()

    def _check_output(self, output: object, batch: Microbatch) -> None:
        samples, sequence = batch.shape
        length = sequence // (self.region.cp.size * self.region.num_slices)
        shape = (length, samples, self._hidden)
        fits = isinstance(output, Tensor) and tuple(output.shape) == shape
        if not fits or output.dtype != self._dtype:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{self._shown}: the stage of layers {self.layers.start} to {self.layers.stop - 1} "
                f"must return (sequence, batch, model.hidden_size) = {shape} {self._dtype} for the "
                f"next stage, got {_text(output)}"
            )

    def _check_registered(self) -> None:
        """Check that parameters and buffers of the module are known by global names."""
        known = {id(param): info for info, param in self.param_infos()}
        found = dict(self.module.named_parameters())
        for name, param in found.items():
            if id(param) not in known:
                raise ConfigError(
                    f"{self._shown}: the parameter {name} is not registered, so ranks could not "
                    "share it; make it with context.parameter or context.replicated, or with a "
                    "layer of megatrain.api"
                )
        held = {id(param) for param in found.values()}
        for info, param in self.param_infos():
            if id(param) not in held:
                raise ConfigError(
                    f"{self._shown}: the parameter {info.name} was made but is not part of the "
                    "returned module; assign it to an attribute"
                )
        held |= {id(value) for _, value in self.buffer_infos()}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and id(value) not in held:
                raise ConfigError(
                    f"{self._shown}: the buffer {name} would not be in checkpoints; register it "
                    "with persistent=False, or make it a parameter"
                )

    def _check_experts(self, moe: MoEConfig) -> None:
        wanted = [layer for layer in self.layers if moe.is_moe_layer(layer)]
        found = sorted(self.moe_layers())
        if found != wanted:
            raise ConfigError(
                f"{self._shown}: [moe] gives experts to the layers {wanted} of {self.layers.start} "
                f"to {self.layers.stop - 1}, but the module has them in {found}; build MoEBlock "
                "where context.moe.is_moe_layer(layer)"
            )


def loss_of(name: str | None) -> Loss | None:
    """Import the function of ``train.loss``; ``None`` if there is none.

    Raises:
        ConfigError: If it cannot be imported.
    """
    if name is None:
        return None
    loss: Loss = import_object(name, setting="train.loss")
    return loss


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    return f"a {type(value).__name__}"
