#!/usr/bin/env bash
# Builds megacore on a machine with an NVIDIA GPU, nvcc and torch, without a network, runs the GPU tests and the GPU
# benchmarks, and writes OUT/<device>-<date>.json and .txt, which grow step by step: a run that is cut off leaves what it
# had. Every step has a time limit of its own, all together 520 seconds.
#
#   scripts/gpu_check.sh [--sanitize] [--phases build,tests,benchmarks] [--budget-s 520] [--build-s 300] [OUT]
#
#   OUT defaults to benchmarks/results
#   --sanitize runs small cases of all kernels under compute-sanitizer too (memcheck, racecheck), where it is installed
#   COMMIT=... names the commit where the sources lie outside a git checkout
#   CUTLASS_ROOT=... a folder that holds include/cutlass and include/cute of CUTLASS 4.2.0; without it, the build looks in
#   its own folder and then asks the package index, and without either it leaves the grouped products out
#   WHEELS=... a folder of wheels; requirements that are missing are installed from it
#
# Needs in the running Python (PYTHON, default python3): torch with CUDA, scikit-build-core, pybind11, numpy, pydantic,
# rich, safetensors, tomli-w, pytest, hypothesis.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
