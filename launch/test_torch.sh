#!/usr/bin/env bash
# Tests the last commit with another torch, in a clone with an environment of its own (several GB) that is then removed.
# Arguments after the version go to launch/test.sh: launch/test_torch.sh 2.14.1 tests/model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: launch/test_torch.sh VERSION [ARGUMENTS OF launch/test.sh]}
clone=$(mktemp -d)
trap 'rm -rf "$clone"' EXIT
git clone --quiet . "$clone"
sed -i "s/^torch==.*/torch==$version/" "$clone/requirements.txt"
sed -i 's/^triton>=[0-9.]*/triton/' "$clone/tests/requirements.txt" # each torch needs its own
"$clone/launch/test.sh" "${@:2}"
