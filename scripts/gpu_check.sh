#!/usr/bin/env bash
# Installs megacore on a machine with an NVIDIA GPU and torch, without a network, runs the GPU tests and the GPU
# benchmarks by value per second, and writes OUT/<device>-<date>.json, .txt and .jsonl, which grow as it goes: a run that
# is cut off leaves what it had. The .jsonl has a line per test and per row of a benchmark, with clocks and power.
#
#   scripts/gpu_check.sh [--phases build,tests,benchmarks,again] [--sanitize] [--again FILE.json] [--budget-s 520] [OUT]
#
#   OUT defaults to benchmarks/results
#   --sanitize runs small cases of all kernels under compute-sanitizer too (memcheck, racecheck), where it is installed
#   --again FILE.json, for a second call: failed tests alone first, then files and benchmarks that were left out
#   --phases build,curves, for a third: losses in bf16 of graphs against eager and against the CPU
#   --fake-device walks through all steps where there is no GPU
#   WHEELS=... a folder of wheels (default: wheels/, which `make gpu-bundle` fills): megacore's is taken if it imports,
#   else the sources are compiled; requirements that are missing are installed from it
#   CUTLASS_ROOT=... holds include/cutlass and include/cute of CUTLASS 4.2.0 (default: cutlass/ of the bundle)
#   COMMIT=... names the commit where the sources lie outside a git checkout
#
# After a crash, a hang or a CUDA fault the rest of a file goes on in a new process, and the device is probed; if it does
# not answer, the run ends. A build without grouped products for the device is a failure.
#
# Needs in the running Python (PYTHON, default python3) torch with CUDA and, to compile, nvcc.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
