#!/usr/bin/env bash
# Installs what the tests need into .venv, then checks style, types and behaviour.
#
#   ./test.sh                     ruff, mypy, then every test not marked gpu or slow
#   ./test.sh PYTEST_ARGUMENTS    pytest only, e.g. ./test.sh tests/docs/test_setup.py -k driver, or ./test.sh -m slow

set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P) # also through a link
# shellcheck source=simpletune/setup.sh
source "$root/simpletune/setup.sh"

simpletune_setup "$root" dev
cd "$root"
python=$root/.venv/bin/python
failed=()
# Compiled tests and modules are kept: to compile them again would take every worker and child process seconds.
unset PYTHONDONTWRITEBYTECODE

# timed NAME COMMAND...: runs the command, prints how long it took, records a failure.
timed() {
    local name=$1 began=$SECONDS status=0
    shift
    printf '== %s\n' "$name"
    "$@" || status=$?
    printf '== %s: %s in %d s\n' "$name" "$([[ $status == 0 ]] && echo ok || echo "failed (exit status $status)")" $((SECONDS - began))
    [[ $status == 0 ]] || failed+=("$name")
}

if (($# == 0)); then
    timed "ruff check" "$python" -m ruff check .
    timed "ruff format --check" "$python" -m ruff format --check .
    timed "mypy" "$python" -m mypy
fi
# At most four workers, because each imports torch (about 1 GiB). A file's tests run in one worker and share fixtures.
(($#)) || set -- -n auto --maxprocesses 4 --dist loadfile
timed "pytest" "$python" -m pytest "$@"

if ((${#failed[@]})); then
    printf 'test.sh: failed: %s\n' "$(printf '%s; ' "${failed[@]}" | sed 's/; $//')" >&2
    exit 1
fi
printf 'test.sh: all passed in %d s\n' "$SECONDS"
