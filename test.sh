#!/usr/bin/env bash
# Installs what the tests need into .venv, then checks style, types and behaviour.
#
#   ./test.sh                     ruff, mypy, then every test not marked gpu or slow
#   ./test.sh --changed [BASE]    the same, with the tests that a change since BASE (a commit; HEAD) can concern, by the last
#                                 map of lines to tests (make map); every test without a map
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

# Sets `used` to the processor seconds of all processes that this script has started and that have ended.
count() {
    times >.venv/times # which in a subshell would be that one's own
    used=$(awk 'NR == 2 {gsub(/[ms]/, " "); gsub(/,/, "."); print int($1 * 60 + $2 + $3 * 60 + $4)}' .venv/times)
}

# timed NAME COMMAND...: runs the command, prints how long it took, records a failure.
timed() {
    local name=$1 began=$SECONDS before status=0
    count
    before=$used
    shift
    printf '== %s\n' "$name"
    "$@" || status=$?
    count
    printf '== %s: %s in %d s (%d processor seconds)\n' "$name" \
        "$([[ $status == 0 ]] && echo ok || echo "failed (exit status $status)")" $((SECONDS - began)) $((used - before))
    [[ $status == 0 ]] || failed+=("$name")
}

count
setup=$used
pytest=("$python" -m pytest)
if [[ ${1:-} == --changed ]]; then
    (($# <= 2)) || { echo "test.sh: --changed takes one commit" >&2 && exit 2; }
    pytest=(env "PYTHONPATH=tests/support${PYTHONPATH:+:$PYTHONPATH}" "${pytest[@]}" -p changed --changed-since "${2:-HEAD}")
    set --
fi
if (($# == 0)); then
    timed "ruff check" "$python" -m ruff check .
    timed "ruff format --check" "$python" -m ruff format --check .
    timed "mypy" "$python" -m mypy
fi
# At most four workers, because each imports torch (about 1 GiB). A file's tests run in one worker and share fixtures.
(($#)) || set -- -n auto --maxprocesses 4 --dist loadfile
timed "pytest" "${pytest[@]}" "$@"

if ((${#failed[@]})); then
    printf 'test.sh: failed: %s\n' "$(printf '%s; ' "${failed[@]}" | sed 's/; $//')" >&2
    exit 1
fi
printf 'test.sh: all passed in %d s (%d processor seconds)\n' "$SECONDS" $((used - setup))
