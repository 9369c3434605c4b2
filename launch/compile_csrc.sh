#!/usr/bin/env bash
# Compiles every .cu file of csrc/ as the build does, but without optimisation, to find errors without a GPU. Does
# nothing if nvcc is not installed, or has compiled the same files with these compilers before (~/.cache/megatron_zpp_ci).
# Arguments go to the build, which then compiles in any case: launch/compile_csrc.sh --verbose
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
(($# == 0)) || exec "$python" -m megatron_zpp.ops.build --check-device-code "$@"
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/megatron_zpp_ci
key=$({
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version || nvcc --version || true
    "${CXX:-g++}" --version
    cat launch/compile_csrc.sh megatron_zpp/ops/{build,toolchain}.py csrc/*
} 2>&1 | sha256sum | cut -c1-16)
compiled=$cache/device_code-$key
if [[ ! -e $compiled ]]; then
    mkdir -p "$cache"
    "$python" -m megatron_zpp.ops.build --check-device-code | tee "$compiled.$$"
    if grep -q ' compiles ' "$compiled.$$"; then mv "$compiled.$$" "$compiled"; else rm "$compiled.$$"; fi
else
    printf 'unchanged since: %s\n' "$(tail -n 1 "$compiled")"
fi
