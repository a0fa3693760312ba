#!/usr/bin/env bash
# Renews simpletune in this folder: the code, then the packages of .venv. See usage below, and docs/how-to/update.md.
#
# Exit codes: 2  nothing was changed: local changes, no network, something runs, or FOLDER is no copy
#             else those of simpletune/setup.sh, after the code is renewed: the next call of any script tries again

set -euo pipefail

usage() {
    cat <<'EOF'
usage: ./update.sh [FOLDER] [--force]

  without FOLDER    takes the newest commit: git pull --ff-only
  FOLDER            takes the code of a newer copy, such as an unpacked zip file; for a folder that is no checkout of git
  --force           even while a run or a page uses this code

Runs, pictures, the cache and your own configurations stay as they are.
EOF
}

# stop PROBLEM REMEDY...: nothing has been changed yet.
stop() {
    printf 'update: %s\n' "$1" >&2
    shift
    printf '        %s\n' "$@" >&2
    exit 2
}

# Stops if a process uses this code: Python imports modules, and pages read templates, long after their start.
refuse_while_in_use() {
    local file name words found=()
    for file in "$root"/runs/.*.lock; do
        name=${file##*/.}
        [[ ! -f $file ]] || flock -n -s "$file" true || found+=("the run ${name%.lock} (process $(<"$file"))")
    done
    for file in /proc/[0-9]*/cmdline; do
        { mapfile -d '' words <"$file"; } 2>/dev/null || continue # it has ended
        [[ ${words[0]:-} != "$root/.venv/bin/"* || ! " ${words[*]:1:3} " =~ simpletune" "([a-z]+)" " ]] ||
            found+=("simpletune ${BASH_REMATCH[1]} (process $(basename "$(dirname "$file")"))")
    done
    ((${#found[@]} == 0)) || stop "in use: $(printf '%s; ' "${found[@]}" | sed 's/; $//'). A process keeps the code that it has loaded, and would mix it with the new." \
        "Wait for its end, or stop it with Ctrl-C: a run saves first and continues by --resume auto, also with the new code." \
        "Nothing was changed. --force updates nevertheless."
}

pull() {
    local changed upstream said
    command -v git >/dev/null || stop "git was not found." "Install it: sudo apt install git"
    changed=$(git status --porcelain --untracked-files=no | cut -c4-)
    [[ -z $changed ]] || stop "changed since the last commit, and an update could overwrite it:" "${changed//$'\n'/$'\n        '}" \
        "Put your changes aside: git stash     (take them back afterwards: git stash pop)" "or undo them: git restore ."
    upstream=$(git rev-parse --abbrev-ref '@{upstream}' 2>/dev/null) ||
        stop "the branch $(git rev-parse --abbrev-ref HEAD) follows no other, so that nobody knows where updates come from." \
            "Go to the one that does: git switch main"
    said=$(git fetch --quiet 2>&1) || stop "$(git remote get-url "${upstream%%/*}") could not be reached: ${said##*$'\n'}" \
        "Check the network or proxy and run it again. Nothing was changed."
    said=$(git merge --quiet --ff-only "$upstream" 2>&1) || stop "this folder cannot take $upstream as it is:" \
        "${said//$'\n'/$'\n        '}" "Commits of your own: git rebase $upstream. Files in the way: move them. Nothing was changed."
}

# Takes over the code of folder $1, which is copied whole before anything is replaced: a file may be held or unreadable.
take_over() {
    local new=$root/.update.new file said
    [[ -f $1/simpletune/setup.sh && -f $1/pyproject.toml ]] ||
        stop "$1 is no copy of simpletune: simpletune/setup.sh or pyproject.toml is missing." "Unpack the zip file, and name the folder in which README.md lies."
    rm -rf "$new"
    mkdir "$new"
    said=$(tar -C "$1" "${NOT_CODE[@]/#/--exclude=./}" -cf "$new/tar" . 2>&1 && tar -C "$new" -xf "$new/tar" 2>&1) || {
        rm -rf "$new"
        stop "$1 could not be copied: ${said##*$'\n'}" "A virus scanner or another program may hold a file, or the disk is full. Wait, and run it again. Nothing was changed."
    }
    rm "$new/tar"
    for file in "$new"/configs/*.json "$new"/configs/more/*.json; do
        file=${file#"$new/"}
        [[ ! -f $file ]] || cmp -s "$file" "$new/$file" || cp "$file" "$file.old" # it may have been edited
        [[ $file != configs/more/* || ! -f configs/${file##*/} ]] || mv "configs/${file##*/}" "configs/${file##*/}.old" # was there before
    done
    rm -rf simpletune # or modules that are gone would stay
    cp -R "$new/." .
    rm -rf "$new"
}
NOT_CODE=(.git .venv .venv.lock .cache data runs profiles)

version() { if [[ -x .venv/bin/python ]]; then .venv/bin/python -m simpletune --version 2>/dev/null || true; fi; }

# A function, because bash would go on reading this file after it was replaced.
main() {
    local root folder='' force='' argument before commit extra=run
    for argument in "$@"; do
        case $argument in
            --force) force=yes ;;
            --help | -h) usage && exit ;;
            -*) stop "unknown argument $argument." "See ./update.sh --help" ;;
            *) folder=$(cd "$argument" 2>/dev/null && pwd -P) || stop "$argument is not a folder." "Unpack the zip file, and name the folder in which README.md lies." ;;
        esac
    done
    root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
    cd "$root"
    [[ -n $force ]] || refuse_while_in_use
    before=$(mktemp)
    # shellcheck disable=SC2064 # now, while the variable is known
    trap "rm -f '$before'" EXIT
    cp CHANGELOG.md "$before"
    version | sed 's/^/before: /'
    if [[ -e .git ]]; then
        [[ -z $folder ]] || stop "this folder is a checkout of git, and FOLDER is for others." "Run ./update.sh alone."
        commit=$(git rev-parse HEAD)
        pull
        [[ $commit != "$(git rev-parse HEAD)" ]] || { echo "update: nothing new; $(git log -1 --format='%h of %cs') is the newest." && exit; }
    else
        [[ -n $folder ]] || stop "this folder is no checkout of git, so that it cannot fetch what is new." \
            "Download and unpack a new zip file, then: ./update.sh FOLDER" "or clone once, and move runs/ and data/ there."
        take_over "$folder"
    fi
    echo "update: the code is renewed. What is new, from CHANGELOG.md:"
    { diff "$before" CHANGELOG.md || (($? == 1)); } | awk '/^> - / {
        sub(/^> - /, "")
        if (++count <= 15) print "  - " (match($0, /[.:;]( |$)/) ? substr($0, 1, RSTART - 1) : $0 " ...")
    } END { if (count > 15) print "  and " count - 15 " more" }'
    if [[ -e .venv ]]; then
        # shellcheck source=simpletune/setup.sh
        source simpletune/setup.sh # the new one
        [[ ! -e .venv/.simpletune-installed-dev ]] || extra=dev
        [[ ! -e .git ]] || rm -f .venv/.simpletune-installed-* # the version is the commit's, and is written by an install
        simpletune_setup "$root" "$extra"
        version | sed 's/^/after: /'
    fi
    echo "update: done. Runs of older versions are read and continued: ./train.sh CONFIG --resume auto"
    exit
}

main "$@"
