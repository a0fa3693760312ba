#!/usr/bin/env bash
# What simpletune.bat does in Linux (WSL 2): copies simpletune to a disk of Linux, starts its pages there, and opens them
# in the browser of Windows.
#
# Environment: SIMPLETUNE_PICTURES  the folder that was dropped on simpletune.bat, as Windows names it; may be empty

set -euo pipefail

address=http://127.0.0.1:8100
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
root=$here
pictures=()

say() { printf 'simpletune: %s\n' "$*"; }

stop() {
    say "$1" >&2
    printf '            %s\n' "${@:2}" >&2
    exit 2
}

answers() { (exec 3<>/dev/tcp/127.0.0.1/8100) 2>/dev/null; }

open() {
    say "the pages are at $address"
    ! command -v explorer.exe >/dev/null || explorer.exe "$address" || true # which exits with 1 when it has opened it
}

if [[ -n ${SIMPLETUNE_PICTURES:-} ]]; then
    dropped=${SIMPLETUNE_PICTURES//\"/}
    folder=$(wslpath -a -u "$dropped" 2>/dev/null) ||
        stop "Linux does not see $dropped." "Copy the folder to a disk of this computer, such as C:, and drop that on simpletune.bat."
    [[ -d $folder ]] || stop "$dropped is not a folder." "Drop the folder that holds the pictures on simpletune.bat."
    pictures=(--root "$folder")
fi

if answers; then
    ((${#pictures[@]} == 0)) || stop "the pages, or another program, are open at $address, without $dropped." \
        "Close their window, then drop the folder again."
    open
    exit
fi

# On a disk of Windows, Python takes minutes to start, and a virus scanner may hold a file that is to be replaced.
if [[ $(stat -f -c %T "$here") == v9fs ]]; then
    root=$HOME/simpletune
    if [[ ! -e $root ]]; then
        say "copying simpletune from $here to $root, because Linux reads disks of Windows slowly."
        rm -rf "$root.new"
        mkdir "$root.new"
        (tar -C "$here" --exclude=./.venv --exclude=./runs --exclude=./data --exclude=./.cache -cf - . |
            tar -C "$root.new" -xf -) || stop "$here could not be copied: see the line above." \
            "A virus scanner or another program may hold a file, or the disk is full. Wait, and double click simpletune.bat again."
        chmod +x "$root.new"/*.sh
        mv "$root.new" "$root"
    elif [[ ! -f $root/update.sh ]]; then
        stop "$root exists and is no simpletune." "Move it away in Linux: mv ~/simpletune ~/simpletune.old"
    elif [[ ! -e $root/.git ]] && ! cmp -s "$here/CHANGELOG.md" "$root/CHANGELOG.md"; then
        "$root/update.sh" "$here" || say "going on with the version in $root."
    fi
fi

if ! python3 -c 'import venv, ensurepip' 2>/dev/null && command -v apt-get >/dev/null; then # Ubuntu comes without
    say "Python's venv is missing in Linux. To install it, Linux asks for the password that you chose for it."
    sudo apt-get update -qq && sudo apt-get install -y -qq python3-venv
fi

# Beside the pages, whose process has this one's number: the first start installs for minutes.
(
    while sleep 0.5 && readlink -q /proc/$$/exe >/dev/null; do # which fails once it has ended, reaped or not
        ! answers || { open && break; }
    done
) &
cd "$root"
exec ./web.sh "${pictures[@]}"
