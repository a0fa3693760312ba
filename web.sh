#!/usr/bin/env bash
# Opens the page to start, watch and judge runs; installs everything it needs into .venv first.
#
#   ./web.sh [--flags]    flags go to `simpletune web`, e.g. --root ~/pictures, --port 8200

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=simpletune/setup.sh
source "$root/simpletune/setup.sh"

simpletune_setup "$root" run
cd "$root"
exec "$root/.venv/bin/python" -m simpletune web "$@"
