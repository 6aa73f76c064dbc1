"""Record which experts tokens went to, and send them there again.

Choices are kept by optimizer step, layer, global sample and position, so a run may replay them in
another layout than the one that recorded them.

Shapes: S this rank's part of the sequence, B batch, T = S * B tokens, k choices per token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.moe.router import TokenNames


class RoutingLog:
    """Choices of routers, by name of the token.

    Example:
        >>> names = TokenNames(
        ...     step=0, sample_ids_B=torch.tensor([7, 9]), positions_S=torch.arange(2)
        ... )
        >>> log = RoutingLog()
        >>> log.record(3, names, torch.tensor([[0], [1], [2], [3]]))
        >>> second = TokenNames(step=0, sample_ids_B=torch.tensor([9]), positions_S=torch.arange(2))
        >>> log.expert_ids(3, second).flatten().tolist()
        [1, 3]
    """

    def __init__(self) -> None:
        # (step, layer, sample) -> (positions, k), int32; -1 where nothing was recorded.
        self._choices: dict[tuple[int, int, int], Tensor] = {}

    def record(self, layer: int, names: TokenNames, expert_ids: Tensor) -> None:
        """Keep the choices of one forward pass.

        Args:
            layer: Global index of the layer.
            names: The tokens.
            expert_ids: ``RoutingResult.expert_ids``, ``(T, k)``, int64.

        Raises:
            ValueError: If there are not as many choices as names.

        Sync:
            Waits for the device: the log lives on the host.
        """
        samples, positions = names.sample_ids_B.tolist(), names.positions_S.cpu()
        if expert_ids.shape[0] != len(samples) * positions.numel():
            raise ValueError(
                f"{expert_ids.shape[0]} tokens were routed, but {positions.numel()} positions of "
                f"{len(samples)} samples are named"
            )
        ids_SBK = expert_ids.to("cpu", torch.int32).unflatten(0, (-1, len(samples)))  # type: ignore[no-untyped-call]
        length = int(positions.max()) + 1 if positions.numel() else 0
        for index, sample in enumerate(samples):
            key = (names.step, layer, sample)
            known = self._choices.get(key, ids_SBK.new_empty(0, expert_ids.shape[1]))
            if known.shape[0] < length:
                grown = known.new_full((length, known.shape[1]), -1)
                grown[: known.shape[0]] = known
                known = grown
            known[positions] = ids_SBK[:, index]
            self._choices[key] = known

    def expert_ids(self, layer: int, names: TokenNames) -> Tensor:
        """The recorded choices of these tokens, for ``TopKRouter.forward(expert_ids=...)``.

        Args:
            layer: Global index of the layer.
            names: The tokens.

        Returns:
            ``(T, k)``, int64, on the device of the names.

        Raises:
            KeyError: If a token was not recorded; the message names it.

        Sync:
            Waits for the device.
        """
        positions = names.positions_S.cpu()
        columns = []
        for sample in names.sample_ids_B.tolist():
            known = self._choices.get((names.step, layer, sample))
            where = f"sample {sample} of step {names.step} in layer {layer}"
            if known is None:
                raise KeyError(f"no choices of {where} are recorded")
            if positions.numel() and int(positions.max()) >= known.shape[0]:
                raise KeyError(f"position {int(positions.max())} of {where} is not recorded")
            picked = known[positions]
            if (picked < 0).any():
                missing = int(positions[(picked < 0).any(1)][0])
                raise KeyError(f"position {missing} of {where} is not recorded")
            columns.append(picked)
        ids = torch.stack(columns, dim=1).flatten(0, 1)
        return ids.to(names.sample_ids_B.device, torch.int64)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded."""
        return not self._choices

    def save(self, path: Path) -> None:
        """Write the log to a safetensors file."""
        tensors = {f"{step}.{layer}.{sample}": t for (step, layer, sample), t in self._items()}
        save_file(tensors, path)

    @classmethod
    def load(cls, *paths: Path) -> RoutingLog:
        """Read a log, or join those of several ranks that each recorded some tokens."""
        log = cls()
        for path in paths:
            for name, choices in load_file(path).items():
                step, layer, sample = (int(part) for part in name.split("."))
                positions = (choices >= 0).all(1).nonzero().flatten()
                names = TokenNames(
                    step=step, sample_ids_B=torch.tensor([sample]), positions_S=positions
                )
                log.record(layer, names, choices[positions].long())
        return log

    def _items(self) -> list[tuple[tuple[int, int, int], Tensor]]:
        return sorted(self._choices.items(), key=lambda item: item[0])
