#!/usr/bin/env python3
"""Print ``docs/families.md``, made from the table of model families.

Usage: ``scripts/families_docs.py > docs/families.md``
"""

from __future__ import annotations

from megatrain.hf.families import FAMILIES
from megatrain.hf.family import Family

HEAD = """\
# Model families

The {count} values of `model_type` that [`import-hf` and `export-hf`](huggingface.md) take. For
each, a tiny random model has the logits of `transformers` to 1e-5 and gives back the same files;
trained from the `config.toml` that the import writes, it has the losses of `transformers` in the
layouts of the last column (`tests/dist/test_families.py`). `kimi_k2` is tested as a renamed
`deepseek_v3`; `bailing_moe_v2`, which `transformers` lacks, against a renamed `glm4_moe`.

| `model_type` | models | beside Llama's blocks | layouts |
| --- | --- | --- | --- |
"""


def layouts(family: Family) -> str:
    """Return the axes of the layouts that the family is tested in."""
    has_experts = any("moe.num_experts" in key.ours for key in family.keys)
    if family.model_type == "bailing_moe_v2":
        return "one process"
    return "tp, sp, cp, pp" + (", ep, etp" if has_experts else "")


def main() -> None:
    """Print the page."""
    print(HEAD.format(count=len(FAMILIES)), end="")
    for kind, family in sorted(FAMILIES.items()):
        print(f"| `{kind}` | {family.people} | {family.special} | {layouts(family)} |")


if __name__ == "__main__":
    main()
