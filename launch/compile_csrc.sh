#!/usr/bin/env bash
# Compiles every .cu file of csrc/ as the build does, but without optimisation, to find errors without a GPU. Does
# nothing if nvcc is not installed. Arguments go to the build: launch/compile_csrc.sh --verbose
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
exec "$python" -m megatron_zpp.ops.build --check-device-code "$@"
