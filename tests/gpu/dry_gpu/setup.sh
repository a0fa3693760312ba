#!/usr/bin/env bash
# Makes .venv-cuda: torch's CUDA build and everything else that the tests need. Does nothing where it is complete.
#
#   tests/gpu/dry_gpu/setup.sh
#
# Environment: DRY_VENV                where it lies (default: .venv-cuda at the project's root)
#              PYTHON                  the Python to make it with (default: the newest found, 3.13 to 3.11)
#              DRY_TORCH               version of torch (default: 2.13.0; the stub knows 2.14.1 and 2.15.0, too)
#              SIMPLETUNE_TORCH_INDEX  URL of the package index for torch (default: pip's own settings)
# Exit codes as those of simpletune/setup.sh: 3, the machine lacks something, or the folder would have to be emptied and may
# hold somebody's files; 4, the install failed. And two that say why: 5, a disk is too small; 6, the index cannot be reached,
# or has no such packages.

set -euo pipefail

TORCH=${DRY_TORCH:-2.13.0}
ROOM_GIB=10    # the environment takes 5.7 GiB; pip unpacks wheels beside it
WHEELS_GIB=3   # of which torch's are 2.6; TMPDIR holds them until all are unpacked

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd "$here/../../.." && pwd -P)
# shellcheck source=../../simpletune/setup.sh
source "$root/simpletune/setup.sh"

venv=${DRY_VENV:-$root/.venv-cuda}
[[ $venv == /* ]] || venv=$PWD/$venv
while [[ $venv == ?*/ || $venv == ?*/. ]]; do # "link/" and "link/." would not be seen to be links
    venv=${venv%.}
    venv=${venv%/}
done
log=$venv/install.log
unfinished=$venv/.simpletune-installing

# Prints what the environment lacks, a line each.
lacking() { "$venv/bin/python" "$here/lacking.py" "$root/pyproject.toml" 2>&1; }

# room FOLDER GIB WHY REMEDY: stops where less is free.
room() {
    local free_gib
    free_gib=$(($(df -Pk "$1" | awk 'NR == 2 {print $4}') / 1024 / 1024))
    ((free_gib >= $2)) || _setup_stop 5 "$1 needs $2 GiB $3; $free_gib GiB are free." "$4"
}

# install WHAT PIP_ARGUMENT...
install() {
    local what=$1 status=0 code=4 end
    shift
    (cd "$root" && _setup_pip install "$@") || status=$?
    ((status == 0)) && return
    ((status >= 128)) || rm -f "$unfinished" # only a killed pip leaves half-unpacked packages
    end=$(tail -n 15 "$log") # above it may stand what pip tried again with success
    if grep -qE "$_SETUP_DISK_FULL" <<<"$end"; then
        code=5
    elif grep -qE "$_SETUP_NO_INDEX|No matching distribution" <<<"$end"; then
        code=6
    fi
    sed 's/^/       | /' <<<"$end" >&2
    _setup_stop $code "Installing $what into $venv failed (exit status $status). The whole log: $log" \
        "Check the network and the disk, then run the same command again."
}

if [[ -x $venv/bin/python && ! -e $unfinished ]] && lacking >/dev/null; then
    exit 0
fi

defect=''
if [[ -e $unfinished ]]; then # pip takes a half-unpacked package for whole
    defect="an earlier set-up stopped halfway"
elif [[ ! -x $venv/bin/python ]]; then
    defect="it has no Python that runs"
fi
[[ -z $defect ]] || _setup_check_disposable "$venv" "$defect"
mkdir -p "$venv"
room "$venv" $ROOM_GIB "while it is made (torch's CUDA build alone takes over 4)" \
    "Free some, or put it on another disk: DRY_VENV=/path/to/venv make dry"
[[ ! -d ${TMPDIR:-/tmp} ]] || room "${TMPDIR:-/tmp}" $WHEELS_GIB "for the wheels that pip downloads" \
    "Free some, or put them on another disk: TMPDIR=/path make dry"
if [[ -z $defect ]]; then
    _setup_mark "$venv"
else
    _setup_find_python
    _setup_empty "$venv"
    _setup_say "making $venv with Python $python_version and torch's CUDA build. This takes minutes. Log: $log"
    "$python" -m venv "$venv" >"$log" 2>&1 || _setup_stop 4 "$python -m venv $venv failed. The whole log: $log"
fi
began=$SECONDS
# "===" takes this very version: an index may offer 2.13.0+cpu, which counts as newer.
install "torch $TORCH" ${SIMPLETUNE_TORCH_INDEX:+--index-url "$SIMPLETUNE_TORCH_INDEX"} "torch===$TORCH"
install "simpletune and the packages of its tests" -e '.[dev]'
rm -f "$unfinished"
if ! missing=$(lacking); then
    code=4
    [[ ! $missing =~ ^torch\ [^[:space:]]+\ is\ not\ a\ CUDA\ build$ ]] || code=6
    _setup_stop $code "$venv is not complete:" "$missing" \
        "Name an index with torch's CUDA builds: SIMPLETUNE_TORCH_INDEX=URL make dry"
fi
_setup_say "done in $((SECONDS - began)) s; $venv takes $(du -sm "$venv/" | cut -f1) MB."
