#!/usr/bin/env bash
# Creates .venv in the repository's root and installs the given requirement files into it, once per content and version
# of Python. Brackets name groups of a file. Usage: launch/setup_venv.sh 'requirements.txt[run,plots]' tests/requirements.txt
# On Linux without a GPU, torch is the build for CPUs, if PyTorch's index of these answers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu

packages() { # FILE or FILE[GROUP,…]: its lines that name a package; a line "# [GROUP] …" begins a group
    local groups=
    [[ $1 != *\[*\] ]] || { groups=${1#*\[} && groups=${groups%\]}; }
    awk -v groups="$groups" '
        BEGIN { count = split(groups, names, ","); for (i in names) wanted[names[i]]; reads = groups == "" }
        /^# \[/ { group = substr($2, 2, index($2, "]") - 2); found += group in wanted; reads = groups == "" || group in wanted }
        reads && /^[^#]/
        END { exit found != count }
    ' "${1%%\[*}" || { echo "setup: $1: no such file or group" >&2 && return 1; }
}

has_gpu() { # a driver of NVIDIA's or AMD's, also under Windows
    [[ -e /dev/kfd || -e /dev/dxg ]] || compgen -G '/dev/nvidia[0-9]*' >/dev/null || command -v nvidia-smi >/dev/null
}

answers() { # INDEX: whether it has torch
    "$venv/bin/python" -m pip --isolated --retries 0 --timeout 10 index versions torch --index-url "$1" >/dev/null 2>&1
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup: $("$python" --version) is too old; install Python 3.10 or newer, or set PYTHON" >&2
    exit 1
fi
if [[ ! -x .venv/bin/pip ]]; then # what venv makes last: it may have failed or been interrupted
    echo "setup: creating .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
        echo "setup: '$python -m venv' failed; on Debian and Ubuntu install python3-venv" >&2
        exit 1
    fi
fi
venv=$(realpath .venv) # programs name the directory that they are in, which a link to it may outlive
options=(--quiet --disable-pip-version-check --no-compile)
[[ ! -t 1 ]] || options[0]=--progress-bar=on # at a terminal, show the progress of downloads
installed=()
for file in "$@"; do
    wanted=$(packages "$file")
    stamp=.venv/installed-$({ .venv/bin/python --version && echo "$wanted"; } | sha256sum | cut -c1-16)
    [[ ! -e $stamp ]] || continue
    echo "setup: installing $file (the first time takes some minutes)"
    index=()
    torch=$(grep '^torch=' <<<"$wanted" || true)
    if [[ $torch && $(uname) == Linux ]] && ! has_gpu; then
        if answers "$cpu_index"; then
            index=(--extra-index-url "$cpu_index") # pip prefers its builds, 2.x.y+cpu
            echo "setup: there is no GPU, so torch is the build for CPUs; on a machine with one remove .venv and start again"
        else
            echo "setup: there is no GPU, and $cpu_index does not answer, so torch may bring some GB for GPUs; without them:"
            echo "    .venv/bin/python -m pip install --index-url $cpu_index $torch"
        fi
    fi
    echo "$wanted" >.venv/installing.txt
    "$venv/bin/python" -m pip install "${options[@]}" ${index[@]+"${index[@]}"} -r .venv/installing.txt
    installed+=("$stamp")
done
if ((${#installed[@]} > 0)); then
    .venv/bin/python -m compileall -qq -j 0 .venv/lib || true # pip would use one process
    touch "${installed[@]}"                                   # so that only a finished installation is skipped
fi
