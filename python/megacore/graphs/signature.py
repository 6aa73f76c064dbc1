"""Signature of a step: everything that a capture depends on besides the tensors of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CaptureSignature:
    """Facts about a step that its graphs have frozen.

    Attributes:
        facts: Values by readable name, such as ``"microbatches"``.
    """

    facts: Mapping[str, Any]

    def difference(self, captured: CaptureSignature) -> str:
        """Describe the differences from the signature of a capture; empty if there are none.

        Example:
            >>> now = CaptureSignature(facts={"microbatches": 8, "dtype": "float32"})
            >>> now.difference(CaptureSignature(facts={"microbatches": 4, "dtype": "float32"}))
            'microbatches 8, not 4'
        """
        names = dict.fromkeys([*captured.facts, *self.facts])
        return ", ".join(
            f"{name} {_shown(self.facts.get(name))}, not {_shown(captured.facts.get(name))}"
            for name in names
            if self.facts.get(name) != captured.facts.get(name)
        )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
