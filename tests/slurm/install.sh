#!/usr/bin/env bash
# Installs what the tests of this folder need, on Debian and Ubuntu as root. Where that cannot be it says why,
# and those tests are skipped.
set -uo pipefail

if command -v slurmctld slurmd sbatch munged >/dev/null; then
    exit 0
fi
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "SLURM is not installed here, and only root can do that, with apt-get: its tests will be skipped"
    exit 0
fi
echo "installing slurm-wlm and munge"
export DEBIAN_FRONTEND=noninteractive
apt=(timeout 120 apt-get -qq -o DPkg::Lock::Timeout=60)
if ! { "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends slurm-wlm munge >/dev/null; }; then
    echo "slurm-wlm and munge cannot be installed here: SLURM's tests will be skipped"
fi
exit 0
