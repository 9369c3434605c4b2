#!/usr/bin/env bash
# Builds the pages of docs/ as a site in build/site, and fails if a link leads nowhere. Installs what it needs.
# Arguments replace `build --strict`: launch/docs.sh serve shows the site at http://127.0.0.1:8000 as pages change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup_venv.sh requirements.txt docs/requirements.txt
(($# > 0)) || set -- build --strict
export NO_MKDOCS_2_WARNING=1 # a notice about later versions; docs/requirements.txt pins these
exec .venv/bin/python -m mkdocs "$@"
