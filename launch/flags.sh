#!/usr/bin/env bash
# What the launchers read of the flags that they pass on. Sourced by local.sh and slurm/job.sh.

# value_of --flag ARGUMENTS…: the value that the program gets for its flag, the last one as argparse does.
value_of() {
    local flag=$1 value='' previous=''
    shift
    for argument in "$@"; do
        [[ $previous != "$flag" ]] || value=$argument
        [[ $argument != "$flag="* ]] || value=${argument#*=}
        previous=$argument
    done
    echo "$value"
}

# goes_on ARGUMENTS…: whether a second start resumes from what the first one saved.
goes_on() {
    local save
    save=$(value_of --save "$@")
    [[ -n $save && $save == "$(value_of --load "$@")" ]]
}
