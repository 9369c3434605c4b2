#!/usr/bin/env bash
# What a SLURM job does around its steps: it starts them, forwards signals, restarts a crashed run and requeues
# a stopped one. The .sbatch files source this file; docs/guide/launching.md explains their use.
#   ZPP_ENVIRONMENT  a bash file that is sourced first: modules, a virtual environment, containers. It may set
#                    srun_arguments=(…) and container=(…), which are put before the program.
#   PYTHON           the python to run [python3]
#   RANKS_PER_NODE   pretrain_gpt_torchrun.sbatch: ranks per node [GPUs per node]
#   MAX_RESTARTS     how often a crashed run is restarted inside its allocation [3]
#   MAX_REQUEUES     how often the job requeues itself [100]
# USR1 to the batch script (--signal=B:USR1@…, scancel --batch --signal=USR1): save, requeue, resume.
# TERM to it (scancel --batch --signal=TERM): save and end.

say() { echo "launch/slurm: job $SLURM_JOB_ID: $*" >&2 || true; } # the log's disk may be full
refuse() { say "$*"; exit 2; }

restarts=${MAX_RESTARTS:-3}
requeues=${MAX_REQUEUES:-100}
[[ $restarts =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "MAX_RESTARTS $restarts: must be a whole number, 0 or more"
[[ $requeues =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "MAX_REQUEUES $requeues: must be a whole number, 0 or more"

# shellcheck source=launch/flags.sh
source "$ZPP_ROOT/launch/flags.sh"
srun_arguments=() container=()
if [[ -n ${ZPP_ENVIRONMENT:-} ]]; then
    [[ -r $ZPP_ENVIRONMENT ]] || refuse "ZPP_ENVIRONMENT $ZPP_ENVIRONMENT: cannot be read on $(hostname)"
    set +eu # modules and conda rely on it
    # shellcheck source=/dev/null
    source "$ZPP_ENVIRONMENT" || refuse "ZPP_ENVIRONMENT $ZPP_ENVIRONMENT: failed with status $?"
    set -eu
fi
python=${PYTHON:-python3}
((${#container[@]} > 0)) || command -v "$python" >/dev/null ||
    refuse "PYTHON $python: not found; activate an environment in ZPP_ENVIRONMENT, or set PYTHON"
# shellcheck source=launch/secret.sh
source "$ZPP_ROOT/launch/secret.sh" # after ZPP_ENVIRONMENT, which may set one
export PYTHONPATH=$ZPP_ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE # of the process that submitted the job; they would win over srun's

# A rank that exits must not end the others, which may be closing logs. The run itself finds the rank that died;
# --wait is for ranks that have not started to watch one another yet. The other flags override defaults of the
# cluster or the user: every rank sees all GPUs of its node, and ranks are numbered node by node.
step=(srun --kill-on-bad-exit=0 --wait=120 --distribution=block --gpu-bind=none --mpi=none --export=ALL)
if [[ ${SLURM_CPUS_PER_TASK:-} ]]; then
    step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK") # srun does not inherit it
else
    step+=(--cpu-bind=none) # without it each task would be bound to one core
fi

# Starts one task of the step per rank.
train_with_srun() {
    local tasks=${SLURM_NTASKS_PER_NODE:-} gpus=${SLURM_GPUS_ON_NODE:-0}
    ((gpus == 0 || ${tasks:-0} <= gpus)) || refuse "--ntasks-per-node $tasks: must be at most the $gpus GPUs of a node"
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    step+=("${srun_arguments[@]}" "${container[@]}" "$python" "$ZPP_ROOT/pretrain_gpt.py")
    train "$@"
}

# Starts one torchrun per node, which starts the ranks of the node.
train_with_torchrun() {
    local ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    [[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] ||
        refuse "RANKS_PER_NODE ${ranks:-(not set)}: must be a whole number, or ask for GPUs with --gpus-per-node"
    local threads=$((${SLURM_CPUS_PER_TASK:-1} / ranks))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    step+=("--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${srun_arguments[@]}" "${container[@]}" "$python"
        -m megatron_zpp torchrun --nproc-per-node "$ranks" "$ZPP_ROOT/pretrain_gpt.py")
    train "$@"
}

stopped_by='' pid='' started=0 interrupted='' forwarded=''

on_signal() {
    interrupted=1
    [[ $stopped_by == TERM ]] || stopped_by=$1
    forward
}

# Forwards the first request as USR1, which srun sends to the ranks; on TERM srun would end them. Does nothing before
# `pid` is known.
forward() {
    [[ -n $pid && -z $forwarded ]] || return 0
    forwarded=1
    local young=$((started + 10 - SECONDS)) # srun drops signals for tasks that have not started
    (sleep $((young > 0 ? young : 0)); kill -USR1 "$pid") 2>/dev/null &
}

# Runs the step once, and sets `status` to its exit status, which is the highest of its tasks.
run_step() {
    "${step[@]}" "$@" &
    started=$SECONDS
    pid=$!
    [[ -z $stopped_by ]] || forward # the signal came before `pid` was known
    while :; do
        interrupted='' status=0
        wait "$pid" || status=$?
        # A status above 128 may be that of `wait`, interrupted by a trap, and not that of the step.
        if [[ -z $interrupted ]] || ((status <= 128)); then break; fi
    done
    pid=''
}

# Requeues the job, unless MAX_REQUEUES is reached or the job is already ending.
requeue() {
    local count=${SLURM_RESTART_COUNT:-0} job=$SLURM_JOB_ID
    # The first task of an array has the id of the whole array, so name the task.
    [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    if ((count >= requeues)); then
        say "requeued $count times, which is MAX_REQUEUES; submit it again to resume"
        return
    fi
    say "requeues itself: requeue $((count + 1)) of $requeues"
    local state
    for _ in {1..10}; do # a busy controller does not answer
        if state=$(squeue --noheader --jobs="$job" --format=%T); then
            [[ $state == RUNNING ]] || { say "is $state, not requeued"; return; }
            if scontrol requeue "$job"; then return; fi
        fi
        sleep 5
    done
    say "SLURM did not requeue it; submit it again to resume"
}

# Runs steps until one ends for good; docs/guide/faults.md lists the exit statuses.
train() {
    local restart what name why
    why=$(not_resumed "$@")
    [[ -z $why ]] || ((restarts == 0 && requeues == 0)) ||
        refuse "MAX_RESTARTS $restarts, MAX_REQUEUES $requeues: $why; or set both to 0"
    trap 'on_signal USR1' USR1
    trap 'on_signal TERM' TERM
    for ((restart = 1; ; restart++)); do
        status=75
        [[ $stopped_by ]] || run_step "$@"
        case $status in 0 | 2 | 3 | 130) exit "$status" ;; esac
        what="status $status"
        if ((status > 128)) && name=$(kill -l "$status" 2>/dev/null); then what=SIG$name; fi
        if ((status == 75)) || [[ $stopped_by ]]; then
            ((status == 75)) || say "a rank ended with $what instead of saving"
            [[ $stopped_by == TERM ]] || requeue # TERM is final: from a person, a time limit or a preemption
            exit "$status"
        fi
        if ((restart > restarts)); then
            say "a rank ended with $what; no restart is left"
            exit "$status"
        fi
        say "a rank ended with $what; restart $restart of $restarts"
    done
}
