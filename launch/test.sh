#!/usr/bin/env bash
# Sets up what the tests need and runs them. Arguments go to pytest: launch/test.sh tests/data -k split
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_venv.sh requirements.txt tests/requirements.txt
exec .venv/bin/python -m pytest "$@"
