#!/usr/bin/env bash
# Runs the tests that need a GPU, with the Python that has torch (PYTHON, default python3): every kernel, stage and format
# once, four tests at a time. launch/test_gpu.sh -m gpu_long runs the others, one by one, and any arguments are passed to
# pytest: launch/test_gpu.sh -k attention
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($#)) || set -- -m gpu_core --durations 20 --numprocesses 4 --dist worksteal
exec "${PYTHON:-python3}" -m pytest tests/gpu tests/ops "$@"
