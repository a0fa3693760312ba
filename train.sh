#!/usr/bin/env bash
# Installs everything it needs into .venv, then fine-tunes Stable Diffusion 3 as CONFIG says. See usage below.

set -euo pipefail

caller=$(pwd -P)
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P) # also through a link
# shellcheck source=simpletune/setup.sh
source "$root/simpletune/setup.sh"

usage() {
    cat <<'EOF'
usage: ./train.sh [CONFIG | FOLDER] [key.path=value ...] [--flags]

  CONFIG            a JSON file, or the name of one in configs/, such as sd3_medium_lora_8gb
                    (default: configs/demo.json, which needs no GPU and no download of weights)
  FOLDER            a folder of pictures; writes FOLDER.json beside it, with reasons, unless it exists
  key.path=value    overrides one field of the configuration, e.g. train.steps=30
  --flags           are passed to `simpletune train`, e.g. --resume latest

The first call makes .venv and installs simpletune; later ones start at once. PYTHON=... chooses the Python,
SIMPLETUNE_TORCH_INDEX=URL the package index for torch.
EOF
}

for argument in "$@"; do
    [[ $argument == --help || $argument == -h ]] || continue
    usage
    venv=$root/.venv
    if _setup_is_current run; then # --help must not start an install
        cd "$root"
        echo
        exec "$venv/bin/python" -m simpletune train --help
    fi
    exit 0
done

config=configs/demo.json
if (($#)) && [[ -e $1 || ($1 != *=* && $1 != -*) ]]; then
    config=$1
    shift
    # Relative to the caller's folder; otherwise relative to the project, or the name of one of its configurations.
    if [[ $config != /* && $caller != "$root" ]]; then
        if [[ -e $caller/$config || ! (-e $root/$config || -f $root/configs/$config.json || -f $root/configs/more/$config.json) ]]; then
            config=$caller/$config
        fi
    fi
fi

simpletune_setup "$root" run
cd "$root"
if [[ $caller != "$root" ]]; then
    printf 'train.sh: relative paths in the config and in overrides are taken from %s\n' "$root" >&2
    export SIMPLETUNE_CALLED_FROM=$caller # printed commands go to the project's folder first
fi
exec "$root/.venv/bin/python" -m simpletune train "$config" "$@"
