#!/usr/bin/env bash
# Installs what the tests need and runs all but the nightly ones, three files at a time, because many wait for processes
# that they started, even on two cores. Arguments are passed to pytest instead: launch/test.sh tests/data -k split
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_venv.sh requirements.txt tests/requirements.txt
if (($# == 0)); then
    set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder # keeps the order of tests/conftest.py
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}                   # otherwise the threads of several files slow each other down
    ! command -v g++ >/dev/null || .venv/bin/python -m megatron_zpp.ops.build # otherwise runs with time limits wait for the build
fi
unset PYTHONDONTWRITEBYTECODE # otherwise each program that a test starts compiles its modules again
exec .venv/bin/python -m pytest "$@"
