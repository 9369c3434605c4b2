#!/usr/bin/env bash
# Reads the flags that launchers pass to the program. Sourced by local.sh and slurm/job.sh.

# value_of --flag ARGUMENTS…: the value that the program gets for its flag, which is the last one, as in argparse.
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

# resumes ARGUMENTS…: whether a second start resumes from what the first one saved.
resumes() {
    local save
    save=$(value_of --save "$@")
    [[ -n $save && $save == "$(value_of --load "$@")" ]]
}
