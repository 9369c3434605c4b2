#!/usr/bin/env bash
# Starts one program on this machine, with a process per GPU, or per CPU core on a machine without GPUs.
# Usage: launch/local.sh [-n PROCESSES] [--max-restarts N] pretrain_gpt.py FLAGS…, or -m MODULE FLAGS…
# When a process fails, the others are ended, and its exit status becomes this script's. With --max-restarts all
# are then restarted, to resume from the newest checkpoint, unless a restart could not help.
# SIGINT, SIGTERM and SIGUSR1 are forwarded to the processes, which save and stop; a second signal ends them at once.
# They get SIGTERM when the terminal is closed, which is SIGHUP, and where util-linux is installed, when this script is
# killed.
set -euo pipefail
# shellcheck source=launch/flags.sh
source "$(dirname "${BASH_SOURCE[0]}")/flags.sh"
# shellcheck source=launch/ports.sh
source "$(dirname "${BASH_SOURCE[0]}")/ports.sh"
# shellcheck source=launch/secret.sh
source "$(dirname "${BASH_SOURCE[0]}")/secret.sh"
set -m # each process gets its own group, so Ctrl-C reaches it through this script only

usage() {
    echo "usage: launch/local.sh [-n PROCESSES] [--max-restarts N] PROGRAM.py FLAGS…" >&2
    exit 2
}
say() { echo "launch/local.sh: $*" >&2 || true; } # the log's disk may be full
refuse() { say "$*"; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
processes=
restarts=0
while (($# > 0)); do
    case $1 in
        -n | --max-restarts)
            (($# > 1)) || usage
            if [[ $1 == -n ]]; then processes=$2; else restarts=$2; fi
            shift 2
            ;;
        -m) break ;; # python's own: -m MODULE in place of PROGRAM.py
        -*) usage ;;
        *) break ;;
    esac
done
(($# > 0)) || usage
command -v "$python" >/dev/null || refuse "PYTHON $python: not found; activate an environment, or set PYTHON"
if [[ -z $processes ]]; then
    processes=$("$python" -c 'import os, sys
sys.path.insert(0, sys.argv[1])
from megatron_zpp.config.command_line import check_packages
check_packages("launch/local.sh", "torch") # or a line that says how to activate the environment
import torch
print(torch.cuda.device_count() or len(os.sched_getaffinity(0)))' "$root")
fi
[[ $processes =~ ^[1-9][0-9]{0,3}$ ]] || refuse "-n $processes: must be a whole number of processes, from 1 to 9999"
[[ $restarts =~ ^(0|[1-9][0-9]*)$ ]] || refuse "--max-restarts $restarts: must be a whole number, 0 or more"

if ((restarts > 0)) && why=$(not_resumed "$@") && [[ $why ]]; then
    refuse "--max-restarts $restarts: $why"
fi
[[ $1 == -m || -e $1 ]] || refuse "$1: no such file"

export WORLD_SIZE=$processes LOCAL_WORLD_SIZE=$processes MASTER_ADDR=127.0.0.1
port=${MASTER_PORT:-}
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

with_parent=(setpriv --pdeathsig TERM)
"${with_parent[@]}" true 2>/dev/null || with_parent=()

pids=()
signalled=
starting=
send() { ((${#pids[@]} == 0)) || kill -"$1" "${pids[@]}" 2>/dev/null || true; }
for name in INT TERM USR1 HUP; do
    sent=${name/HUP/TERM}
    # shellcheck disable=SC2064 # expands now, to this name
    trap "signalled=$sent; [[ \$starting ]] || send $sent" "$name"
done

exec {nothing}<> <(:)
pause() { read -rt 0.1 -u "$nothing" || true; } # sleep would be a job, and get Ctrl-C instead of this script

# Starts the processes. A signal that comes before the first of them ends this script, with the status of a process that
# was interrupted, or stopped to be resumed; one that comes while they are started is forwarded to all.
start() {
    pids=() starting=1
    MASTER_PORT=${port:-$(free_port "$python")} || [[ $signalled ]]
    export MASTER_PORT
    [[ $signalled != INT ]] || exit 130
    [[ -z $signalled ]] || exit 75
    local rank
    for ((rank = 0; rank < processes; rank++)); do # without stdin: a prompt at the terminal would stop them for good
        RANK=$rank LOCAL_RANK=$rank ${with_parent[@]+"${with_parent[@]}"} "$python" "$@" </dev/null &
        pids+=($!)
    done
    starting=
    [[ -z $signalled ]] || send "$signalled"
}

# Waits until all processes have ended well, or one has failed; sets `rank` and `status` to those of the failed one.
# Status 3 and 75 mean that all ranks ended the run together, after a save. When a process is killed, the others end
# within milliseconds: of those that have ended, the killed one is the failed one.
wait_for_all() {
    local left=("${!pids[@]}") still ended failed=0
    status=0
    while ((${#left[@]} > 0)); do
        pause # wait -n would miss a process that ended since the last call
        still=()
        for index in "${left[@]}"; do
            if kill -0 "${pids[index]}" 2>/dev/null; then
                still+=("$index")
                continue
            fi
            ended=0
            wait "${pids[index]}" 2>/dev/null || ended=$?
            if ((ended != 0)) && { ((failed == 0)) || ((ended > 128 && status <= 128)); }; then
                rank=$index status=$ended
            fi
            [[ $ended =~ ^(0|3|75)$ ]] || ((failed > 0)) || failed=1
        done
        if ((failed > 0)); then
            ((failed == 1 && status <= 128)) || return 0
            failed=2 # once more: the killed one may have been looked at just before
        fi
        left=("${still[@]}")
    done
}

# Ends the remaining processes of a failed run, which cannot save because a rank is missing.
stop() {
    send TERM
    local deadline=$((SECONDS + 10)) pid
    for pid in "${pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do pause; done
    done
    send KILL
    for pid in "${pids[@]}"; do wait "$pid" || true; done
}

for ((restart = 1; ; restart++)); do
    start "$@"
    wait_for_all 2>/dev/null # hides bash's messages about killed jobs, here and below
    ((status != 0)) || exit 0
    if [[ $status =~ ^(3|75)$ ]]; then exit "$status"; fi
    stop 2>/dev/null
    if [[ $signalled || $status =~ ^(2|130)$ ]]; then exit "$status"; fi
    what="status $status"
    if ((status > 128)) && name=$(kill -l "$status" 2>/dev/null); then what=SIG$name; fi
    if ((restart > restarts)); then
        ((restarts == 0)) || say "rank $rank ended with $what; no restart is left"
        exit "$status"
    fi
    say "rank $rank ended with $what; restart $restart of $restarts"
done
