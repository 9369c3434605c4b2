#!/usr/bin/env bash
# Makes the secret with which the ranks of a job sign their messages, another one for each job, unless one is set.
# Sourced by local.sh, emulate_nodes.sh and slurm/job.sh, whose processes inherit it.

# `read`, because `bash -x` would show what is assigned
[[ -v MEGATRON_ZPP_SECRET ]] || read -r MEGATRON_ZPP_SECRET < <(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; echo)
export MEGATRON_ZPP_SECRET
