"""Print registers, spills and shared memory of every CUDA kernel, as the assembler reports them.

    cmake --preset cuda && python scripts/kernel_table.py > benchmarks/results/kernels.txt

Compiles each file of CUDA code once more, with the options of build/cuda; needs no GPU. The last
line has the highest spills of each architecture and the number of warnings, which standard error
shows.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def report(command: dict[str, str]) -> str:
    """Compile a file and return the assembler's report."""
    words = shlex.split(command["command"])
    with tempfile.TemporaryDirectory() as folder:
        words[words.index("-o") + 1] = f"{folder}/kernel.o"
        done = subprocess.run(
            [*words, "-Xptxas=-v"], cwd=command["directory"], capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stderr


def readable(name: str) -> str:
    """Return a kernel's name; those of CUTLASS fill a page each."""
    if "cutlass" in name:
        return "CUTLASS grouped GEMM"
    long = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout
    long = long.strip().replace("(anonymous namespace)::", "")
    depth = 0
    for place, letter in enumerate(long):  # without the arguments, which follow the template's
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            long = long[:place]
            break
    return re.sub(r"\((?:\w|::)+\)|\b(?:megacore|cuda|detail)::", "", long.removeprefix("void "))


def main() -> None:
    """Print the table."""
    path = ROOT / "build" / "cuda" / "compile_commands.json"
    if not path.exists():
        raise SystemExit("build/cuda is not configured; run cmake --preset cuda")
    commands = [each for each in json.loads(path.read_text()) if each["file"].endswith(".cu")]
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    print(f"{len(commands)} files, nvcc {re.search(r'V([0-9.]+)', version)[1]}")
    print("registers per thread; bytes of stack frame, spills (stores + loads) and shared memory")
    print(f"{'reg':>4} {'stack':>6} {'spill':>6} {'shared':>7}  arch   kernel")
    highest: dict[str, int] = {}
    warnings: list[str] = []
    for command in sorted(commands, key=lambda each: each["file"]):
        print(f"{Path(command['file']).name}", file=sys.stderr)
        rows = []
        text = report(command)
        warnings += [line for line in text.splitlines() if "warning" in line.lower()]
        for found in REPORT.finditer(text):
            shared = re.search(r"(\d+) bytes smem", found["rest"])
            spills = int(found["stores"]) + int(found["loads"])
            arch = found["arch"].removeprefix("sm_")
            highest[arch] = max(spills, highest.get(arch, 0))
            rows.append(
                f"{found['registers']:>4} {found['stack']:>6} {spills:>6} "
                f"{shared[1] if shared else 0:>7}  {arch:5}  "
                f"{readable(found['name'])}"
            )
        print(f"\n{Path(command['file']).name}")
        for row, count in sorted(Counter(rows).items(), key=lambda each: (each[0][26:], each[0])):
            print(row + (f" ({count} kernels)" if count > 1 else ""), flush=True)
    print(*warnings, sep="\n", file=sys.stderr)
    spills = ", ".join(f"{count} on {arch}" for arch, count in sorted(highest.items()))
    print(f"\nhighest spills: {spills}; {len(warnings)} warnings")


if __name__ == "__main__":
    main()
