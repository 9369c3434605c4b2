#!/usr/bin/env bash
# Sets up what the tests need and runs them: all of them, two files at a time, as many of them wait for processes
# that they have started. Arguments go to pytest instead: launch/test.sh tests/data -k split
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_venv.sh requirements.txt tests/requirements.txt
if (($# == 0)); then
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder # but in the order of tests/conftest.py
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}                   # or threads of two files wait for each other
    ! command -v g++ >/dev/null || .venv/bin/python -m megatron_zpp.ops.build # or runs with time limits wait for it
fi
exec .venv/bin/python -m pytest "$@"
