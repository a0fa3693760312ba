#!/usr/bin/env bash
# Installs everything it needs into .venv, then opens the pages to start, watch and judge runs.
#
#   ./web.sh [--flags]    flags are passed to `simpletune web`, e.g. --root ~/pictures, --port 8200

set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P) # also through a link
# shellcheck source=simpletune/setup.sh
source "$root/simpletune/setup.sh"

simpletune_setup "$root" run
cd "$root"
exec "$root/.venv/bin/python" -m simpletune web "$@"
