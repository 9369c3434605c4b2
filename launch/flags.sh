#!/usr/bin/env bash
# Reads the flags that launchers pass to the program. Sourced by local.sh and slurm/job.sh.

# value_of --flag ARGUMENTS…: the value that the program gets for its flag, which is the last one, as in argparse. Without
# one it is that in the file of --config.
value_of() {
    local flag=$1 value='' previous='' file=''
    shift
    for argument in "$@"; do
        case $previous in
            "$flag") value=$argument ;;
            --config) file=$argument ;;
        esac
        case $argument in
            "$flag="*) value=${argument#*=} ;;
            --config=*) file=${argument#*=} ;;
        esac
        previous=$argument
    done
    [[ -n $value || ! -f $file ]] || value=$(setting_of "${flag#--}" "$file")
    echo "$value"
}

# setting_of NAME FILE: the value of a line `NAME: VALUE` of a YAML file without its quotes and comment; empty if there
# is none, or it is null. Finds what a run writes and what people write by hand, but no {name: value}.
setting_of() {
    sed -nE "s/^ *${1//-/[-_]}: +//; t found; d; : found
        s/^\"(.*)\" *(#.*)?\$/\1/; t print; s/^'(.*)' *(#.*)?\$/\1/; t print
        s/ +#.*//; s/ +\$//; s/^(null|~)\$//; : print; p; q" "$2" 2>/dev/null || true
}

# resumes ARGUMENTS…: whether a second start resumes from what the first one saved.
resumes() {
    local save
    save=$(value_of --save "$@")
    [[ -n $save && $save == "$(value_of --load "$@")" ]]
}
