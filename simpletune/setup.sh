#!/usr/bin/env bash
# Makes .venv and installs simpletune into it, once. Sourced by train.sh and test.sh, which then call
#
#     simpletune_setup ROOT run|dev
#
# "run" installs what training needs; "dev" adds what the tests need, and also satisfies "run". Later calls return at
# once: a stamp in .venv records what it was made from, and pip runs again only if that has changed.
#
# Environment: PYTHON                  the Python to make .venv with (default: the newest found, 3.13 to 3.11)
#              SIMPLETUNE_TORCH_INDEX  URL of the package index for torch (default: pip's own settings; where there is no
#                                      nvidia-smi, a torch without CUDA from there, else from PyTorch's CPU index)
# Exit codes:  3  this machine lacks something (Python, venv, NVIDIA driver), or .venv would have to be emptied and may hold
#                 somebody's files; nothing was installed, and nothing deleted
#              4  the install failed; its log is .venv/install.log

set -euo pipefail

_SIMPLETUNE_MIN_DRIVER=580 # CUDA 13, for which the package index's torch wheels are built from 2.11 on
_SIMPLETUNE_CPU_INDEX=https://download.pytorch.org/whl/cpu
_SETUP_LINE_SECONDS=20 # between lines about an install without a terminal
# What pip says of a full disk, and of an index that it cannot reach or read to the end.
_SETUP_DISK_FULL='No space left|Disk quota exceeded'
_SETUP_NO_INDEX='ConnectionError|Temporary failure in name resolution|Network is unreachable|timed out|Max retries|SSLError|ProxyError'
_SETUP_NO_INDEX+='|Connection broken|incomplete-download|HTTP error'

_setup_say() { printf 'setup: %s\n' "$*" >&2; }

# _setup_stop CODE LINE...: prints the problem, then what to do about it, one line each, and exits.
_setup_stop() {
    local code=$1
    shift
    printf 'setup: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '       %s\n' "$@" >&2
    exit "$code"
}

# Sets `python` and `python_version` to the first Python that is new enough and can make virtual environments.
_setup_find_python() {
    local probe='
import sys
try:
    import venv, ensurepip
    usable = "venv"
except ImportError:
    usable = "no-venv"
print("%d.%d.%d %s" % (sys.version_info[:3] + (usable,)))'
    local candidates=(python3.13 python3.12 python3.11 python3 python)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON") # an explicit choice is used or refused, never replaced
    local candidate answer version major minor too_old='' without_venv=''
    for candidate in "${candidates[@]}"; do
        answer=$("$candidate" -c "$probe" 2>/dev/null) || continue # absent, or a version manager's empty shim
        version=${answer% *}
        IFS=. read -r major minor _ <<<"$version"
        if ((major < 3 || (major == 3 && minor < 11))); then
            too_old=${too_old:-"$candidate is $version"}
        elif [[ $answer == *no-venv ]]; then
            without_venv=${without_venv:-"$candidate $major.$minor"}
        else
            python=$candidate python_version=$version
            return
        fi
    done
    if [[ -n $without_venv ]]; then
        _setup_stop 3 "Python ${without_venv#* } (${without_venv% *}) cannot make a virtual environment: its venv or ensurepip module is missing." \
            "Install it: sudo apt install python${without_venv#* }-venv" \
            "or name another Python: PYTHON=/path/to/python3 $0"
    fi
    local found="none of ${candidates[*]} was found or runs"
    [[ -z $too_old ]] || found=$too_old
    _setup_stop 3 "simpletune needs Python 3.11 or newer; $found." \
        "Install one: sudo apt install python3.11 python3.11-venv (Debian, Ubuntu)" \
        "         or: pyenv install 3.11" \
        "         or: uv python install 3.11" \
        "then name it if it is not on PATH: PYTHON=/path/to/python3.11 $0"
}

# Stops when the torch that pip would fetch cannot run on this machine's NVIDIA driver. $1: the chosen torch index, or ''.
_setup_check_driver() {
    command -v nvidia-smi >/dev/null || return 0
    local answer driver
    if ! answer=$(timeout 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1); then
        _setup_say "nvidia-smi is installed but fails (${answer%%$'\n'*}). Continuing: until it works, only the CPU can be used."
        return 0
    fi
    driver=${answer%%$'\n'*}
    if [[ ! ${driver%%.*} =~ ^[0-9]+$ ]]; then
        _setup_say "nvidia-smi reports no driver version (${driver:-empty answer}). Continuing: until it does, only the CPU can be used."
        return 0
    fi
    if [[ -n $1 ]] || ((${driver%%.*} >= _SIMPLETUNE_MIN_DRIVER)); then return 0; fi
    _setup_stop 3 "NVIDIA driver $driver is too old for the torch that pip would install: torch 2.11 and newer is built for CUDA 13 and needs driver $_SIMPLETUNE_MIN_DRIVER or newer." \
        "Update the driver (Ubuntu: sudo apt install nvidia-driver-$_SIMPLETUNE_MIN_DRIVER, then reboot)," \
        "or use a torch built for CUDA 12 (driver 525 or newer): its index URL, ending in cu126 or cu128, is on PyTorch's" \
        "\"Get Started\" page: SIMPLETUNE_TORCH_INDEX=URL $0"
}

# Warns if Triton cannot compile int8 products and speed.compile on a card; training works without. Reads `venv`.
_setup_check_compiler() {
    command -v nvidia-smi >/dev/null || return 0
    local compilers=(gcc clang cc) lacks='' include version
    [[ -z ${CC:-} ]] || compilers=("$CC")
    command -v "${compilers[@]}" >/dev/null || lacks="a C compiler" # one is enough
    include=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])' 2>/dev/null) || return 0
    [[ -f $include/Python.h ]] || lacks=${lacks:+$lacks and }Python.h
    [[ -n $lacks ]] || return 0
    version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 0
    _setup_say "$lacks not found: precision.products=int8 will multiply with dequantised weights, and speed.compile will" \
        "not work. To change that: sudo apt install gcc python$version-dev"
}

# Prints what an up-to-date .venv was made from; fails when its Python is gone. Reads `root` and `venv`.
_setup_fingerprint() {
    local python_version pyproject
    python_version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    pyproject=$(sha256sum <"$root/pyproject.toml") || return 1
    printf 'python %s\npyproject %s\nroot %s\n' "$python_version" "${pyproject%% *}" "$root"
}

# True when nothing needs to be done for extra $1. Reads `root` and `venv`.
_setup_is_current() {
    local stamp file
    [[ ! -e $venv/.simpletune-installing ]] || return 1
    stamp=$(_setup_fingerprint) || return 1
    [[ -z ${SIMPLETUNE_TORCH_INDEX:-} || $SIMPLETUNE_TORCH_INDEX == "$(_setup_recorded_index)" ]] || return 1
    [[ ! -e $venv/.simpletune-torch-cpu ]] || ! command -v nvidia-smi >/dev/null || return 1 # a card came
    for file in "$venv/.simpletune-installed-dev" "$venv/.simpletune-installed-$1"; do
        [[ -f $file && $(<"$file") == "$stamp" ]] && return 0
    done
    return 1
}

_setup_recorded_index() { cat "$venv/.simpletune-torch-index" 2>/dev/null || true; }

# True if what folder $1 holds can be made again: it is a virtual environment, or one that set-up began.
_setup_is_environment() {
    [[ ! -f $1/pyvenv.cfg ]] || return 0
    # Installing into an environment of another kind (conda, a copied Python) leaves the files below in it, too.
    [[ ! -e $1/.simpletune-keep ]] || return 1
    [[ -e $1/.simpletune-installing || -e $1/.simpletune-installed-run || -e $1/.simpletune-installed-dev ]]
}

# Marks folder $1 as being installed into: until the marker goes, it counts as half-made.
_setup_mark() {
    { { _setup_is_environment "$1" || : >>"$1/.simpletune-keep"; } && : >>"$1/.simpletune-installing"; } 2>/dev/null ||
        _setup_cannot_write "$1"
}

_setup_cannot_write() { _setup_stop 3 "$1 cannot be written." "Make it writable, or copy the project to a folder that is."; }

# Empties folder $1, or makes it, and marks it; the caller has called _setup_check_disposable before.
_setup_empty() {
    # The mark comes first, so that after a kill the rest is known to be an environment's.
    { mkdir -p "$1" && : >>"$1/.simpletune-installing"; } 2>/dev/null || _setup_cannot_write "$1"
    find -P "$1" -mindepth 1 ! -name .simpletune-installing -delete
}

# Stops unless $1 is absent, an empty folder or an environment, and no link: nothing else is ever emptied or replaced.
# $2: why it cannot be used as it is.
_setup_check_disposable() {
    local defect=$2 reason first remedy path
    printf -v path '%q' "$1"
    remedy="Move it away: mv -i $path $path.old, then run the same command again."
    if [[ -L $1 ]]; then
        [[ -e $1 ]] || defect="its target is gone"
        reason="it is a link, and set-up deletes nothing through a link."
        remedy="Remove the link, which leaves its target as it is: rm $path, then run the same command again."
    elif [[ ! -e $1 ]]; then
        return 0
    elif [[ ! -d $1 ]]; then
        reason="it is not a folder."
    elif _setup_is_environment "$1"; then
        return 0
    elif first=$(find "$1" -mindepth 1 -print -quit 2>/dev/null) && [[ -z $first ]]; then # a folder that cannot be read is not empty
        return 0
    else
        reason="set-up did not make it, and without pyvenv.cfg it may hold somebody's files."
    fi
    local lines=("$1 cannot be used ($defect) and is not emptied: $reason" "$remedy")
    [[ ! -e $1/.simpletune-installing || ! -x $1/bin/python ]] ||
        lines+=("Or, if you have checked that all its packages are whole, keep it: rm $path/.simpletune-installing")
    _setup_stop 3 "${lines[@]}"
}

# Prints why the existing .venv cannot be used; prints nothing if it can. Reads `root` and `venv`.
_setup_venv_defect() {
    local file version
    if [[ -e $venv/.simpletune-installing ]]; then
        echo "an earlier set-up stopped halfway"
    elif [[ ! -e $venv/bin/python && ! -L $venv/bin/python ]]; then
        echo "it has no Python"
    elif ! version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "its Python is gone"
    elif [[ ! -d $venv/lib/python$version ]]; then
        echo "its Python has become $version"
    elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "it has no working pip"
    else
        for file in "$venv"/.simpletune-installed-*; do
            [[ ! -f $file ]] || grep -qxF "root $root" "$file" || { echo "it was moved, copied or linked here" && return; }
        done
    fi
}

# Runs pip, whose output goes to the log. Of an install, shows how far it is; pip's exit status is the function's.
_setup_pip() {
    local status=0 watcher='' bytes=()
    if [[ $1 == install && " $* " != *" --dry-run "* ]]; then
        ! _setup_pip_counts || bytes=(--progress-bar raw)
        _setup_watch & # in the background, so that Ctrl-C and kill reach pip
        watcher=$!
    fi
    PIP_USER=0 "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" "${bytes[@]}" >>"$log" 2>&1 || status=$?
    if [[ -n $watcher ]]; then
        kill "$watcher" 2>/dev/null && wait "$watcher" 2>/dev/null || true
        [[ ! -t 2 ]] || printf '\r\033[K' >&2
    fi
    return "$status"
}

# True if the pip of `venv` prints the bytes of a download (--progress-bar raw), as from 24.1 on.
_setup_pip_counts() {
    local found=("$venv"/lib/python*/site-packages/pip-*.dist-info) major minor
    IFS=. read -r major minor _ <<<"${found[0]##*/pip-}"
    [[ $major =~ ^[0-9]+$ && $minor =~ ^[0-9]+$ ]] || return 1
    ((major > 24 || (major == 24 && minor >= 1)))
}

# Shows what pip does until it is killed: a bar in a terminal, else a line now and then. Reads `log`, `began`, `expected`.
_setup_watch() {
    local line second=0
    [[ -z ${lock:-} ]] || exec {lock}>&- # the lock is not this process's
    while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do # a killed watcher leaves a sleep, for a second
        second=$((second + 1))
        [[ -t 2 ]] || ((second % _SETUP_LINE_SECONDS == 0)) || continue
        # shellcheck disable=SC2086 # two words, or none
        line=$(_setup_progress $((SECONDS - ${began:-SECONDS})) ${expected:-}) || continue
        if [[ -t 2 ]]; then
            printf '\r\033[K%.*s' $((${COLUMNS:-80} - 1)) "setup: $line" >&2
        else
            _setup_say "${line#*] }"
        fi
    done
}

# _setup_progress SECONDS [PACKAGES MEGABYTES]: prints, by pip's log, how far the install of about so much is. pip says
# nothing while it unpacks: what lies there is counted. Reads `log` and `venv`.
_setup_progress() {
    local unpacked=("$venv"/lib/python*/site-packages/*.dist-info)
    awk -v seconds="$1" -v packages="${2:-0}" -v total="${3:-0}" -v unpacked="${#unpacked[@]}" '
        function megabytes(text, part) { # of "(526.6 MB)"
            if (!match(text, /\([0-9.]+ [kMG]?B\)/)) return 0
            split(substr(text, RSTART + 1, RLENGTH - 2), part, " ")
            return part[1] * (part[2] == "GB" ? 1000 : part[2] == "MB" ? 1 : part[2] == "kB" ? 0.001 : 0.000001)
        }
        function clock(whole) { return whole < 60 ? whole " s" : int(whole / 60) " min " whole % 60 " s" }
        /^Progress [0-9]+ of [0-9]+$/ { got = $2 / 1000000; next }
        { done += size; size = got = finished = 0 } # any other line says that the last package is here
        /^ *(Downloading|Using cached|Processing) .*(\.whl|\.tar\.gz|\.zip)/ && !/\.metadata/ {
            count++
            name = $0
            sub(/^ *(Downloading|Using cached|Processing) /, "", name)
            sub(/ .*/, "", name)
            sub(/.*\//, "", name)
            match(name, /-[0-9]/)
            name = RSTART ? substr(name, 1, RSTART - 1) : name
            if ($1 == "Downloading") size = megabytes($0)
        }
        /^Installing collected packages:/ { installing = NF - 3 }
        /^Successfully installed/ { installing = 0; finished = 1 }
        END {
            now = done + (got < size ? got : size)
            share = installing ? unpacked / (installing + 1) : total ? now / total : finished # 1: pip itself
            bar = ""
            for (n = 1; n <= 8; n++) bar = bar (n <= 8 * share || finished ? "#" : "-")
            text = "[" bar "] "
            if (installing || finished) {
                part = unpacked <= installing ? unpacked " of " installing : installing
                print text (finished ? "finishing" : "unpacking " part (installing == 1 ? " package" : " packages")) ", " \
                    clock(seconds) " so far"
                exit
            }
            text = text int(now) (total > now ? " of about " total : "") " MB, "
            text = text count + 0 (packages > count ? " of " packages : "") (count == 1 && packages <= 1 ? " package, " : " packages, ")
            # Without the bytes of what is being fetched (an old pip) the pace is unknown.
            known = now > 20 && total > now && packages > count && seconds && (got || !size)
            text = text (known ? clock(int((total - now) / now * seconds)) " left" : clock(seconds))
            print text (size ? ": " name : "")
        }' "$log"
}

# Finds a torch without CUDA, several GB less, for a machine without a card: sets `chosen` to it, or installs it from
# PyTorch's CPU index. Does nothing where a torch that fits is installed. Reads `torch`, `venv` and `log`.
_setup_torch_without_cuda() {
    local wanted=$torch report=$venv/.simpletune-torch.json answer probe='
import json, sys
from pip._vendor.packaging.requirements import Requirement
for found in json.load(open(sys.argv[1]))["install"]:
    needs = map(Requirement, found["metadata"].get("requires_dist", ()))
    needs = (each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""}))
    print(found["metadata"]["version"], *{"cuda" for name in needs if name.startswith(("nvidia-", "cuda-"))})'
    # Where the index does not serve metadata apart, pip starts to download the package: the limit (MiB) stops it.
    while (ulimit -f $((16 * 1024)) && _setup_pip install --dry-run --no-deps --quiet --report "$report" "$wanted"); do
        answer=$("$venv/bin/python" -c "$probe" "$report" 2>>"$log") || break
        case $answer in
            '') return 0 ;; # installed
            *' cuda') wanted+=",!=${answer% cuda}" ;;
            *) chosen="torch==$answer" && : >"$venv/.simpletune-torch-cpu" && return 0 ;;
        esac
    done
    _setup_say "without nvidia-smi: torch without CUDA comes from $_SIMPLETUNE_CPU_INDEX, because pip's index shows none."
    if _setup_pip install --retries 1 --index-url "$_SIMPLETUNE_CPU_INDEX" "$torch"; then
        : >"$venv/.simpletune-torch-cpu"
    else
        _setup_say "that index has none or cannot be reached: torch comes with CUDA, which this machine cannot use. .venv will take" \
            "about 6 GB. To choose another index, press Ctrl-C and set SIMPLETUNE_TORCH_INDEX."
    fi
}

# Shows the end of the log, the likely cause and the remedy; exits with 4. $1: what was being done, $2: its exit status.
_setup_install_failed() {
    local cause="See the lines above; then run the same command again."
    if grep -qE "$_SETUP_DISK_FULL" "$log"; then
        cause="The disk is full ($(df -hP "$venv" | awk 'NR == 2 {print $4}') free in $root; pip also needs room in ${TMPDIR:-/tmp}). Free some, or set TMPDIR, and run it again."
    elif grep -qE "$_SETUP_NO_INDEX" "$log"; then
        cause="The package index could not be reached. Check the network or proxy and run it again."
    elif grep -qF 'from versions: none' "$log"; then # pip says no more than this for an index that refuses, too
        cause="The package index could not be reached, or has nothing for Python ${python_version:-of .venv}. Check the network or proxy and run it again."
    elif grep -qE 'No matching distribution|ResolutionImpossible' "$log"; then
        cause="The package index has no fitting version for Python ${python_version:-of .venv}. Try another: rm -r .venv, then PYTHON=python3.11 $0"
    fi
    grep -v '^Progress [0-9]' "$log" | tail -n 15 | sed 's/^/       | /' >&2
    # pip killed by a signal may leave a half-unpacked package, which a later pip takes for complete: keep the marker.
    # Without a Python nothing else says that the folder may be emptied: keep it then, too.
    (($2 >= 128)) || [[ ! -x $venv/bin/python ]] || rm -f "$venv/.simpletune-installing"
    _setup_stop 4 "$1 failed (exit status $2). The whole log: $log" "$cause"
}

# Prints how many packages, and how many megabytes of downloads, an empty environment with extra $1 needs, about. $2: the
# chosen torch index, or ''. Counted for Linux and Python 3.11 on 29 November 2026; a bar needs no more.
_setup_expected() {
    if [[ -z $2 ]] && ! command -v nvidia-smi >/dev/null; then # a torch without CUDA
        [[ $1 == run ]] && echo 85 450 || echo 156 800
    else
        [[ $1 == run ]] && echo 106 3270 || echo 176 3420
    fi
}

# Makes or repairs .venv and installs the project with extra $1. Reads `root` and `venv`; the caller holds the lock.
_setup_install() {
    local extra=$1 began=$SECONDS log=$venv/install.log target=. what=training index torch chosen='' older='' status expected=''
    local defect='' made='' python='' python_version=''
    [[ $extra == run ]] || target=".[$extra]" what="training and the tests"
    index=${SIMPLETUNE_TORCH_INDEX:-$(_setup_recorded_index)}
    [[ ! -e $venv ]] || defect=$(_setup_venv_defect)
    [[ -e $venv && -z $defect ]] || _setup_check_disposable "$venv" "$defect"
    _setup_check_driver "$index"
    if [[ ! -e $venv || -n $defect ]]; then
        _setup_find_python
        made="making .venv with Python $python_version, "
        [[ -z $defect ]] || made="remaking .venv ($defect) with Python $python_version, "
    fi
    _setup_say "${made}installing simpletune and the packages for $what${index:+, torch from SIMPLETUNE_TORCH_INDEX}. This takes minutes. Log: $log"
    if [[ -z $made ]]; then
        _setup_mark "$venv"
    else
        _setup_empty "$venv"
        "$python" -m venv "$venv" >"$log" 2>&1 ||
            _setup_install_failed "$python -m venv (if it lacks a module: sudo apt install python${python_version%.*}-venv)" $?
    fi
    rm -f "$log" "$venv"/.simpletune-installed-*
    # Older ones download a package to learn what it needs, and do not say how much of a download is here.
    _setup_pip install --retries 1 "pip>=24.1" || true
    [[ -z $made ]] || expected=$(_setup_expected "$extra" "$index")
    torch=$(sed -nE 's/^ *"(torch[<>=][^"]*)".*/\1/p' "$root/pyproject.toml")
    if [[ -n $index ]]; then
        # A torch from elsewhere would count as "already satisfied".
        [[ $index == "$(_setup_recorded_index)" ]] || _setup_pip uninstall -y torch || true
        _setup_pip install --index-url "$index" "$torch" || _setup_install_failed "Installing $torch from SIMPLETUNE_TORCH_INDEX" $?
        printf '%s\n' "$index" >"$venv/.simpletune-torch-index"
        rm -f "$venv/.simpletune-torch-cpu"
    elif ! command -v nvidia-smi >/dev/null; then
        _setup_torch_without_cuda
    elif [[ -e $venv/.simpletune-torch-cpu ]]; then
        _setup_pip uninstall -y torch || true
        rm -f "$venv/.simpletune-torch-cpu"
    fi
    status=0
    # Triton 3.9 ends each program without a card with 27 lines of what it leaks; torch for CUDA names the Triton that it needs.
    [[ $extra != dev || ! -e $venv/.simpletune-torch-cpu ]] || older="triton<3.9; platform_system == 'Linux'"
    (cd "$root" && _setup_pip install -e "$target" ${chosen:+"$chosen"} ${older:+"$older"}) || status=$?
    ((status == 0)) || _setup_install_failed "Installing simpletune" "$status"
    _setup_fingerprint >"$venv/.simpletune-installed-$extra.new"
    mv "$venv/.simpletune-installed-$extra.new" "$venv/.simpletune-installed-$extra"
    rm -f "$venv/.simpletune-installing"
    _setup_say "done in $((SECONDS - began)) s; .venv takes $(du -sm "$venv/" | cut -f1) MB."
    _setup_check_compiler
}

# simpletune_setup ROOT run|dev: makes ROOT/.venv fit for training (run) or for the tests (dev), or exits with a remedy.
simpletune_setup() {
    local root extra=$2 venv lock='' lock_file
    root=$(cd "$1" && pwd -P)
    venv=$root/.venv
    _setup_is_current "$extra" && return
    if command -v flock >/dev/null; then
        lock_file=$root/.venv.lock
        [[ ! -e $lock_file || -f $lock_file ]] || # to open a pipe would wait forever
            _setup_stop 3 "$lock_file is not a file; set-up locks it." "Move it away, then run the same command again."
        : 2>/dev/null >>"$lock_file" ||
            _setup_stop 3 "$lock_file cannot be written; set-up locks it and makes .venv beside it." \
                "Make $root writable, or copy it to a folder that is."
        exec {lock}>>"$lock_file" # ">" would cut off the target of a link
        flock -n "$lock" || { _setup_say "waiting for another set-up of $root" && flock "$lock"; } ||
            _setup_say "cannot lock here; continuing without a lock"
    fi
    _setup_is_current "$extra" || _setup_install "$extra" # another call may have done it while this one waited
    [[ -z $lock ]] || exec {lock}>&-
}
