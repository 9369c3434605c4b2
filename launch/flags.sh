#!/usr/bin/env bash
# Reads the flags that launchers pass to the program. Sourced by local.sh and slurm/job.sh.

# last_value --flag ARGUMENTS…: the value that follows the flag, the last one as in argparse; empty without the flag.
last_value() {
    local flag=$1 value='' previous='' argument
    shift
    for argument in "$@"; do
        [[ $previous != "$flag" ]] || value=$argument
        [[ $argument != "$flag="* ]] || value=${argument#*=}
        previous=$argument
    done
    echo "$value"
}

# value_of --flag ARGUMENTS…: the value that the program gets for its flag: the last one, else that in the file of
# --config.
value_of() {
    local flag=$1 value file
    shift
    value=$(last_value "$flag" "$@") file=$(last_value --config "$@")
    [[ -n $value || ! -f $file ]] || value=$(setting_of "${flag#--}" "$file")
    echo "$value"
}

# setting_of NAME FILE: the value of `NAME: VALUE`, on a line or in {braces}, of a YAML file, without its quotes and
# comment; empty if there is none, or it is null. Finds what a run writes and what people write by hand.
setting_of() {
    local key="[\"']?${1//-/[-_]}[\"']? *:"
    sed -nE "s/\r\$//
        s/^[^#]*[{,] *$key *([^,}]*[^,} ]) *([,}].*)?\$/\1/; t found
        s/^ *$key( +|\$)//; t found; d; : found
        s/^\"(.*)\" *(#.*)?\$/\1/; t print; s/^'(.*)' *(#.*)?\$/\1/; t print
        s/ +#.*//; s/ +\$//; s/^(null|Null|NULL|~)\$//; : print; p; q" "$2" 2>/dev/null || true
}

# not_resumed ARGUMENTS…: why a second start would not go on from what the first one saved; empty if it would.
not_resumed() {
    local save argument file name value
    local why="a second start would not go on from where the first one ended"
    save=$(value_of --save "$@")
    if [[ -z $save || $save != "$(value_of --load "$@")" ]]; then
        echo "needs --save DIRECTORY and a --load equal to it, as flags or in --config FILE, to resume from"
        return
    fi
    for argument in "$@"; do
        case $argument in
            --finetune | --no-load-optim | --no-save-optim | --ckpt-step | --ckpt-step=*)
                echo "${argument%%=*}: $why; omit it"
                return
                ;;
        esac
    done
    file=$(last_value --config "$@")
    [[ -f $file ]] || return 0
    for name in finetune load_optim save_optim ckpt_step; do
        value=$(setting_of "${name//_/-}" "$file")
        value=${value%,} # the end of a line in {braces}
        case $name:${value,,} in
            finetune:true | load_optim:false | save_optim:false | ckpt_step:?*)
                echo "$name: $value in --config $file: $why; remove the line"
                return
                ;;
        esac
    done
}
