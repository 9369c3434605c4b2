#!/usr/bin/env bash
# Runs the tests that need a GPU, with the Python that has torch (PYTHON, default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

exec "${PYTHON:-python3}" -m pytest tests/gpu "$@"
