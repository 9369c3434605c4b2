#!/usr/bin/env bash
# Starts one program on this machine, a process for each GPU, or for each CPU core where there is no GPU.
# Usage: launch/local.sh [-n PROCESSES] pretrain_gpt.py FLAGS…
# The first process that fails ends the others, and its exit status is this script's.
set -euo pipefail

usage() { echo "usage: launch/local.sh [-n PROCESSES] PROGRAM.py FLAGS…" >&2; exit 2; }

python=${PYTHON:-python3}
processes=
while getopts n: flag; do
    case $flag in
        n) processes=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
(($# > 0)) || usage
if [[ -z $processes ]]; then
    processes=$("$python" -c 'import os, torch
print(torch.cuda.device_count() or len(os.sched_getaffinity(0)))')
fi
if [[ ! $processes =~ ^[1-9][0-9]*$ ]]; then
    echo "launch/local.sh: -n $processes: must be a whole number of processes, 1 or more" >&2
    exit 2
fi

export WORLD_SIZE=$processes LOCAL_WORLD_SIZE=$processes MASTER_ADDR=127.0.0.1
if [[ -z ${MASTER_PORT:-} ]]; then
    MASTER_PORT=$("$python" -c 'import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    print(free.getsockname()[1])')
    export MASTER_PORT
fi
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

pids=()
stop() { ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true; }
trap 'stop; wait; exit 130' INT
trap 'stop; wait; exit 143' TERM
for ((rank = 0; rank < processes; rank++)); do
    RANK=$rank LOCAL_RANK=$rank "$python" "$@" &
    pids+=($!)
done
for _ in "${pids[@]}"; do
    status=0
    wait -n || status=$?
    if ((status != 0)); then
        stop
        wait
        exit "$status"
    fi
done
