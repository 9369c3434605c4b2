#!/usr/bin/env bash
# Creates .venv in the repository's root and installs the given requirement files into it, once per content of
# each file and version of Python. Usage: launch/setup_venv.sh requirements.txt [tests/requirements.txt]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup: $("$python" --version) is too old; install Python 3.10 or newer, or set PYTHON" >&2
    exit 1
fi
if [[ ! -x .venv/bin/python ]]; then
    echo "setup: creating .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu install python3-venv" >&2
        exit 1
    fi
fi
venv=$(realpath .venv) # programs name the directory that they are in, which a link to it may outlive
quiet=--quiet
[[ ! -t 1 ]] || quiet=--progress-bar=on # at a terminal, show the progress of downloads
installed=()
for file in "$@"; do
    stamp=.venv/installed-$({ .venv/bin/python --version && cat "$file"; } | sha256sum | cut -c1-16)
    if [[ ! -e $stamp ]]; then
        echo "setup: installing $file (the first time takes some minutes)"
        "$venv/bin/python" -m pip install "$quiet" --disable-pip-version-check --no-compile -r "$file"
        installed+=("$stamp")
    fi
done
if ((${#installed[@]} > 0)); then
    .venv/bin/python -m compileall -qq -j 0 .venv/lib || true # pip would use one process
    touch "${installed[@]}"                                   # so that only a finished installation is skipped
fi
