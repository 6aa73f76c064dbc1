#!/usr/bin/env bash
# Install what compiles the CUDA kernels, in an image of manylinux_2_28.
set -euo pipefail
dnf install -y dnf-plugins-core
dnf config-manager --add-repo https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
dnf install -y cuda-nvcc-13-0 cuda-cudart-devel-13-0 cuda-cccl-13-0
