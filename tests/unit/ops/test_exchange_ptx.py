"""Compiled exchange kernels: independent 16-byte loads in flight, and none that bypass caches.

A link between GPUs answers after a microsecond or more, so a kernel that waits for each load before
it issues the next one moves a tenth of what it could. The compiler decides this: a load does not
move above a store that may alias it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IN_FLIGHT = 4
KERNELS = {
    "clone_exchange": ("push_kernel", "collect_kernel"),
    "peer_rows": (
        "start_push_kernel",
        "finish_push_kernel",
        "start_pull_kernel",
        "finish_pull_kernel",
    ),
}
WIDE_LOAD = re.compile(r"^ld(\.\w+)*\.v4\.[bfu]32\b")


def compiled(file: str, folder: Path) -> dict[str, list[str]]:
    """Instructions of every kernel of a file, by mangled name."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc: it reads what the kernels compile to")
    target = folder / f"{file}.ptx"
    subprocess.run(
        [
            *(nvcc, "-std=c++20", "-O3", "-ptx", "-gencode=arch=compute_90a,code=compute_90a"),
            *(f"-I{ROOT / 'cuda' / 'include'}", f"-I{ROOT / 'cpp' / 'include'}"),
            *("-o", str(target), str(ROOT / "cuda" / "kernels" / f"{file}.cu")),
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    kernels = {}
    for part in target.read_text().split(".entry ")[1:]:
        lines = [line.strip() for line in part.splitlines()]
        kernels[part.partition("(")[0]] = lines
    return kernels


def most_loads_in_a_row(lines: list[str]) -> int:
    """The largest number of 16-byte loads without a store between them."""
    most = now = 0
    for line in lines:
        if WIDE_LOAD.match(line):
            now += 1
            most = max(most, now)
        elif line.startswith("st."):
            now = 0
    return most


def test_a_store_ends_a_row_of_loads() -> None:
    load, store = "ld.global.v4.u32 \t{%r1, %r2, %r3, %r4}, [%rd1];", "st.global.v4.u32 \t[%rd2], {"
    assert most_loads_in_a_row([load, store, load, "add.f32 ", load, store]) == 2
    assert most_loads_in_a_row(["ld.global.u32 \t%r1, [%rd1];"] * 4) == 0


@pytest.mark.parametrize("file", KERNELS)
def test_exchanges_issue_four_wide_loads_before_they_use_the_first(
    file: str, tmp_path: Path
) -> None:
    kernels = compiled(file, tmp_path)
    for name in KERNELS[file]:
        variants = {key: lines for key, lines in kernels.items() if f"{len(name)}{name}" in key}
        # Rows of packs of 16 bytes: eight 16-bit numbers, or four of 32 bits.
        packed = [k for k in variants if file == "clone_exchange" or re.search(r"Li[48]E", k)]
        assert packed, f"{file}.ptx has no {name} for packs: {list(kernels)}"
        for key in packed:
            assert most_loads_in_a_row(variants[key]) >= IN_FLIGHT, key
    for key, lines in kernels.items():
        past_caches = [line for line in lines if re.match(r"ld(\.\w+)*\.cv\b", line)]
        wide_volatile = [line for line in lines if re.match(r"ld\.volatile(\.\w+)*\.v4", line)]
        assert past_caches + wide_volatile == [], key
