#!/usr/bin/env bash
# Compiles every .cu file of csrc/ for Ampere and Hopper where nvcc is there, to catch errors without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shopt -s nullglob globstar
sources=(csrc/**/*.cu)
if ((${#sources[@]} == 0)); then
    echo "csrc: no device code yet"
elif ! command -v nvcc >/dev/null; then
    echo "csrc: nvcc is not installed; device code was not compiled"
else
    for source in "${sources[@]}"; do
        echo "csrc: nvcc $source"
        nvcc -std=c++17 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
            -c "$source" -o /dev/null
    done
fi
