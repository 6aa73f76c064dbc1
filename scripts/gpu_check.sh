#!/usr/bin/env bash
# Builds megacore on a machine with an NVIDIA GPU, nvcc and torch, without a network, runs the GPU tests and the GPU
# benchmarks, and writes OUT/gpu_check.json and OUT/gpu_check.txt.
#
#   scripts/gpu_check.sh [OUT]        OUT defaults to benchmarks/results/gpu
#   COMMIT=... names the commit where the sources lie outside a git checkout
#   CUTLASS_ROOT=... a folder that holds include/cutlass and include/cute of CUTLASS 4.2.0; without it, the build looks in
#   its own folder and then asks the package index, and without either it leaves the grouped products out
#
# Needs in the running Python: torch with CUDA, scikit-build-core, pybind11, numpy, pydantic, rich, safetensors, tomli-w,
# pytest, hypothesis. Missing ones are taken from WHEELS (a folder of wheels) when it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-python3}
if [ -n "${CUTLASS_ROOT:-}" ]; then  # relative to here; the build runs elsewhere
  CUTLASS_ROOT=$(cd "$CUTLASS_ROOT" && pwd) || exit 1
  export CUTLASS_ROOT
fi
mkdir -p "$out"
log="$out/gpu_check.txt"
: >"$log"

say() { echo "== $*" | tee -a "$log"; }

if [ -n "${WHEELS:-}" ]; then
  say "installing missing requirements from wheels"
  "$python" -m pip install --quiet --no-index --find-links "$WHEELS" scikit-build-core pybind11 ninja cmake \
    numpy pydantic rich safetensors tomli-w pytest hypothesis 2>&1 | tee -a "$log"
fi

say "build"
"$python" -m pip install --quiet --no-index --no-deps --no-build-isolation \
  --config-settings=cmake.define.MEGACORE_CUDA=ON . 2>&1 | tee -a "$log"
build=${PIPESTATUS[0]}

say "tests"
tests=1
[ "$build" = 0 ] && { "$python" -m pytest -q -m gpu tests/gpu 2>&1 | tee -a "$log"; tests=${PIPESTATUS[0]}; }

bench=0
if [ "$build" = 0 ]; then
  for file in benchmarks/bench_gpu_*.py; do
    [ -e "$file" ] || continue
    say "$file"
    options=()
    grep -q -- '"--out"' "$file" && options=(--out "$out")  # its numbers as JSON
    "$python" "$file" "${options[@]}" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" = 0 ] || bench=1
  done
fi

"$python" - "$out/gpu_check.json" "$build" "$tests" "$bench" <<'PY'
import datetime, json, os, pathlib, subprocess, sys
import torch

path, *codes = sys.argv[1:]
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
gpu = torch.cuda.is_available()
record = {
    "date": datetime.date.today().isoformat(),
    "commit": os.environ.get("COMMIT") or commit or "unknown",
    "device": torch.cuda.get_device_name() if gpu else "none",
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": sys.version.split()[0],
    **dict(zip(("build", "tests", "benchmarks"), ("ok" if c == "0" else "failed" for c in codes))),
}
pathlib.Path(path).write_text(json.dumps(record, indent=2) + "\n")
print(json.dumps(record))
PY
[ "$build$tests$bench" = 000 ]
