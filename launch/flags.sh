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

# not_resumed ARGUMENTS…: why a second start would not go on from what the first one saved; empty if it would.
not_resumed() {
    local save argument
    save=$(value_of --save "$@")
    if [[ -z $save || $save != "$(value_of --load "$@")" ]]; then
        echo "needs --save DIRECTORY and a --load equal to it, as flags or in --config FILE, to resume from"
        return
    fi
    for argument in "$@"; do
        case $argument in
            --finetune | --no-load-optim | --no-save-optim | --ckpt-step | --ckpt-step=*)
                echo "${argument%%=*}: a second start would not go on from where the first one ended; omit it"
                return
                ;;
        esac
    done
}
