#!/usr/bin/env bash
# Install the wheel for a Python in a new environment and train with it.
# usage: scripts/packaging/test_wheel.sh FOLDER_OF_WHEELS [PYTHON]
# With WITHOUT_TORCH=1, only what needs no torch is installed and run.
set -euo pipefail
folder=$1 python=${2:-python3}
place=$(mktemp -d)
trap '/bin/rm -rf "$place"' EXIT
"$python" -m venv "$place/env"
tag=$("$python" -c 'import sys; print(f"cp{sys.version_info.major}{sys.version_info.minor}")')
wheel=$(ls "$folder"/megacore-*-"$tag"-*.whl)
ls -l "$wheel"
pip=("$place/env/bin/pip" --disable-pip-version-check install --quiet --only-binary=:all:)
if [ "${WITHOUT_TORCH:-0}" = 1 ]; then
  "${pip[@]}" --no-deps "$wheel"
  "${pip[@]}" "numpy>=1.26" "pydantic>=2.11" "rich>=13.7" "tomli-w>=1.0" "safetensors>=0.5"
else
  export PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
  "${pip[@]}" "$wheel"
fi
export PATH="$place/env/bin"  # neither a compiler nor another megacore
examples=$PWD/examples
cd "$place"
megacore --version
megacore ranks --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4
megacore schedule zb_v --pp 4 --microbatches 8
megacore plan "$examples/demo.toml" --gpus 8 --device h100
[ "${WITHOUT_TORCH:-0}" = 1 ] || megacore train "$examples/demo.toml" --nproc 2 --parallel.ep=1 --train.steps=3
