"""Compare every kernel with torch and time both, on the shapes of two runs.

    python scripts/gpu_qualify.py [--device cuda] [--out FOLDER]

A row per operation: the fault of its kernel, and both times in microseconds. The exit code is 1 if
a kernel has a fault. On a GPU the shapes are those of Llama 3.1 8B and, with experts, of
DeepSeek-V3 with eight of them here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from megacore.qualification import Sizes, find_verdict, operation_names

SIZES = {
    "llama-8b": Sizes(tokens=8192, width=4096, mlp=14336, head_dim=128, groups=8, q_per_kv=4),
    "deepseek-v3": Sizes(
        **{"tokens": 4096, "width": 7168, "mlp": 2048, "head_dim": 128, "groups": 16},
        **{"q_per_kv": 1, "experts": 256, "choices": 8, "local_experts": 8},
    ),
}


def main() -> int:
    """Print the rows; 0 if no kernel has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for qualification.json")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows, faults = [], {}
    with tempfile.TemporaryDirectory() as folder:  # nothing that was found before counts
        for run, sizes in SIZES.items():
            verdict = find_verdict(device, sizes=sizes, dtype=torch.bfloat16, folder=Path(folder))
            faults |= verdict.faults
            for name in operation_names(device.type):
                ours, other = verdict.times.get(name, (0.0, 0.0))
                row = {"run": run, "operation": name, "fault": faults.get(name)}
                if other > 0.0:
                    row |= {"us": ours * 1e6, "us_torch": other * 1e6}
                rows.append(row)
                print("@json " + json.dumps({"event": "row", **row}), flush=True)
                shown = "" if other == 0.0 else f"{ours * 1e6:10.1f} us, torch {other * 1e6:10.1f}"
                print(f"{run:12} {name:26} {faults.get(name) or 'ours':6} {shown}", flush=True)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "qualification.json").write_text(json.dumps(rows) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
