#!/usr/bin/env bash
# Makes .venv in the repository's root and installs the given requirement files into it, once for each
# content of those files. Usage: launch/setup_venv.sh requirements.txt [tests/requirements.txt]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup: $("$python" --version) is too old; install Python 3.10 or newer, or set PYTHON" >&2
    exit 1
fi
if [[ ! -x .venv/bin/python ]]; then
    echo "setup: making .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu install python3-venv" >&2
        exit 1
    fi
fi
quiet=--quiet
[[ ! -t 1 ]] || quiet=--progress-bar=on # a person sees what is fetched and how fast
for file in "$@"; do
    stamp=.venv/installed-$(sha256sum "$file" | cut -c1-16)
    if [[ ! -e $stamp ]]; then
        echo "setup: installing $file (the first time takes some minutes)"
        .venv/bin/python -m pip install "$quiet" --disable-pip-version-check --no-compile -r "$file"
        .venv/bin/python -m compileall -qq -j 0 .venv/lib || true # pip would take one process
        touch "$stamp" # only a finished installation is skipped the next time
    fi
done
