"""``simpletune import`` of command files: what each shell joins, replaces and passes over."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from simpletune.apps.cli.main import main
from simpletune.commands.importers import translation
from simpletune.commands.importers.command_lines import TOOK, read_command
from simpletune.commands.importers.importing import import_file
from simpletune.commands.importers.shells import COMPUTED
from simpletune.system.options import Json, UserError

SH = """#!/usr/bin/env bash
set -euo pipefail
source venv/bin/activate
cd "$(dirname "$0")" || exit 1
echo "python train_network.py > no" > log.txt
# python train_network.py --no
BASE="${1:-runwayml/stable-diffusion-v1-5}"
OUT=out; RANK=16 ALPHA=8
EXTRA="--seed 3
  --clip_skip=2"
HF_HOME=/tmp pip install -r requirements.txt && echo done
ARGS=(
  --network_dim "$RANK"   # the rank
  --output_name "my run"
)
ARGS+=(--network_alpha=$ALPHA)
if [ -z "$TOKEN" ]; then ARGS+=(--no_metadata); else ARGS+=(--with_token); fi
if [[ $RANK -ge 32 && $OUT == out ]]; then
  ARGS+=(--lowram)
elif [[ "$OUT" != "" ]]
then
  ARGS+=(--highvram)
fi
[[ $RANK == 16 ]] && ARGS+=(--xformers)
[[ $RANK == 17 ]] && ARGS+=(--sdpa)
cat > c.toml <<TOML
python train_text_to_image.py --no
TOML
python -c "import torch; print('train.py')"
python prepare_metadata.py --in x | tee log
CUDA_VISIBLE_DEVICES=0 accelerate launch --num_cpu_threads_per_process 1 "sd scripts/train_network.py" \\
  --pretrained_model_name_or_path="$BASE" --train_data_dir='a $b' \\
  --output_dir=$OUT $EXTRA --network_module=networks.lora "${ARGS[@]}" --comment ${NONE:-'none'} 2>&1 | tee log.txt
"""
SH_OPTIONS = {
    "script": "train_network.py", "pretrained_model_name_or_path": "runwayml/stable-diffusion-v1-5",
    "train_data_dir": "a $b", "output_dir": "out", "seed": "3", "clip_skip": "2", "network_module": "networks.lora",
    "network_dim": "16", "output_name": "my run", "network_alpha": "8", "no_metadata": True, "highvram": True,
    "xformers": True, "comment": "'none'",
}  # fmt: skip
BAT = r"""@echo off
rem accelerate launch train_network.py --no
:: python train_network.py
setlocal enabledelayedexpansion
cd /d "%~dp0"
call venv\Scripts\activate.bat & echo active
echo NOT set MODEL=C:\wrong.safetensors
set MODEL=C:\My Models\xl.safetensors
set "DATA=%~dp0img"
set RANK=32
set EXTRA=
if "%RANK%"=="32" set EXTRA=--seed=3 --network_alpha 16
if /i not "%EXTRA%" == "" echo given
if not defined BATCH (
  set BATCH=2
) else (
  set BATCH=4
)
if %RANK% GTR 64 (set RANK=64) else if %RANK% equ 32 set LOSS=huber
python -c "print('train.py')" >nul 2>&1
if errorlevel 1 (
  echo (fail^)
  exit /b 1
)
"%~dp0venv\Scripts\accelerate.exe" launch --num_processes=1 ^
  sd-scripts\sdxl_train_network.py ^
  --pretrained_model_name_or_path="%MODEL%" --train_data_dir=%data% --output_dir=C:\ai\out\ ^
  --train_batch_size=%BATCH% --loss_type %LOSS% --note "50%%" ^
  --network_module=networks.lora --network_dim=!RANK! %EXTRA% >> log.txt 2>&1 && echo done
cmd /k
"""
BAT_OPTIONS = {
    "script": "sdxl_train_network.py", "pretrained_model_name_or_path": r"C:\My Models\xl.safetensors",
    "train_data_dir": r".\img", "output_dir": "C:\\ai\\out\\", "train_batch_size": "2", "loss_type": "huber",
    "note": "50%", "network_module": "networks.lora", "network_dim": "32", "seed": "3", "network_alpha": "16",
}  # fmt: skip
PS1 = r"""<# accelerate launch train_network.py #>
param([string]$Model = "C:\m\xl.safetensors", [int]$Rank = 16, [switch]$Fast)
# python train_network.py
$root = $PSScriptRoot
$data = Join-Path $root "img"
$Env:HF_HOME = "huggingface"
$lowram = 0; $multi = "0"
$ext = [System.Collections.ArrayList]::new()
$more = @(
  "--network_dim=$Rank",
  "--network_alpha", 8
  '--output_name=it''s'
)
$more += "--seed=3"
$more += @("--clip_skip", "2")
if ($lowram) { [void]$ext.Add("--lowram") }
elseif ($RANK -eq 16 -and -not $Fast) {
  [void]$ext.Add("--comment=" + $rank)
}
else {
  $more += "--wrong"
}
if ($multi) { $null = $ext.Add("--highvram") }
.\venv\Scripts\activate
Write-Host "python train_network.py"
python prepare_metadata.py | Out-Null
$text = @"
python train_network.py --no
"@
try {
  & "$root\venv\accelerate.exe" launch `
    .\sd-scripts\sdxl_train_network.py `
    --pretrained_model_name_or_path="$Model" --resolution="1024,1024" `
    --train_data_dir="$data" --output_dir=$($root)\out `
    --network_module=networks.lora @more $ext 2>&1 | Tee-Object -FilePath log
} finally { Pop-Location }
"""
PS1_OPTIONS = {
    "script": "sdxl_train_network.py", "pretrained_model_name_or_path": r"C:\m\xl.safetensors",
    "resolution": "1024,1024", "train_data_dir": r".\img", "output_dir": r".\out", "network_module": "networks.lora",
    "network_dim": "16", "network_alpha": "8", "output_name": "it's", "seed": "3", "clip_skip": "2",
    "comment": "16", "highvram": True,
}  # fmt: skip


def options(text: str, suffix: str) -> Json:
    found = read_command(text, suffix)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("suffix", "text", "expected"), [(".sh", SH, SH_OPTIONS), (".bat", BAT, BAT_OPTIONS), (".ps1", PS1, PS1_OPTIONS)]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_means_what_its_shell_makes_of_it(suffix: str, text: str, expected: Json, end: str) -> None:
    found = options(text.replace("\n", end), suffix)
    assert found.pop(TOOK) == [] and found == expected


LINES: list[tuple[str, str, Json]] = [
    # joined by the shell's own mark alone
    (".sh", "python train.py --a 1 \\\n--b 2", {"a": "1", "b": "2"}),
    (".sh", "python train.py --a 1 ^\n--b 2", {"a": ["1", "^"]}),
    (".sh", "python train.py --a 1 \\ \n--b 2", {"a": ["1", " "]}),
    (".bat", "python train.py --a C:\\x\\\n--b 2", {"a": "C:\\x\\"}),
    (".bat", "python train.py --a 1 ^\n--b 2", {"a": "1", "b": "2"}),
    (".cmd", "python train.py --a 1 ^^\n--b 2", {"a": ["1", "^"]}),
    (".ps1", "python train.py --a C:\\x\\\n--b 2", {"a": "C:\\x\\"}),
    (".ps1", "python train.py --a 1 `\n--b 2", {"a": "1", "b": "2"}),
    # quotes and backslashes
    (".sh", r'python train.py --a "C:\ai\x" --b C:\\ai --c "a\"b"', {"a": r"C:\ai\x", "b": r"C:\ai", "c": 'a"b'}),
    (".bat", r'python train.py --a "C:\My x" --b=C:\ai --c ^"', {"a": r"C:\My x", "b": r"C:\ai", "c": '"'}),
    (".ps1", r"""python train.py --a "C:\My x" --b='C:\$x' --c a`"b""", {"a": r"C:\My x", "b": r"C:\$x", "c": 'a"b'}),
    # what stands around a command
    (".sh", "FOO=1 nohup python -u train.py --a 1 > x.log 2>&1 &\necho $!", {"a": "1"}),
    (".sh", "cd x && (python train.py --a 1 || echo no); ls", {"a": "1"}),
    (".sh", "train() {\n  python train.py --a 1\n}\ntrain", {"a": "1"}),
    (".sh", "python3.10 -m sd.train --a 1", {"a": "1"}),
    (".sh", "bash -c 'python train.py --a 1'", {"a": "1"}),
    (".sh", "cp train.py x.py\nls train.py\ngit add train.py\n$PYTHON train.py --a 1", {"a": "1"}),
    (".sh", "./train.py --a 1", {"a": "1"}),
    (".sh", "A=1\nunset B\npython train.py --a $A --b $B", {"a": "1", "b": "$B"}),
    (".sh", 'A="--x 1"\nA+=" --y 2"\npython train.py $A --z "$A"', {"x": "1", "y": "2", "z": "--x 1 --y 2"}),
    (".sh", "A=(p 'q r')\npython train.py --a ${A[1]} --b ${#A} --c $A", {"a": ["q", "r"], "b": "${#A}", "c": "p"}),
    (".sh", "A=$B\nB=2\nexport C=${A:-${B}}\npython train.py --c $C", {"c": "$B"}),
    (".sh", "for r in 4 8; do python train.py --a $r; done", {"a": "4"}),
    (".sh", "while true; do A=1; done; A=2\npython train.py --a $A", {"a": "2"}),
    (".bat", "cmd /k python train.py --a 1", {"a": "1"}),
    (".bat", 'start "" cmd /c "python train.py --a 1"', {"a": "1"}),
    (".bat", "call x.bat && python train.py --a 1 & pause", {"a": "1"}),
    (".bat", "if exist train.py (python train.py --a 1) else echo no", {"a": "1"}),
    (".bat", "set A=(1)\npython train.py --a %A%", {"a": "(1)"}),
    (".bat", "set A=1\nset A=%A%2\npython train.py --a %a%", {"a": "12"}),
    (".bat", "for %%r in (4 8) do python train.py --a %%r", {"a": "4"}),
    (".bat", "%PYTHON% train.py --a %*", {"a": True}),
    (".ps1", "& python train.py --a 1; exit", {"a": "1"}),
    (".ps1", "if (Test-Path x) { python train.py --a 1 }", {"a": "1"}),
    (".ps1", "$a = 'x', 'y'\npython train.py --a $a --b \"$a\" --c ${a}", {"a": ["x", "y"], "b": "x y", "c": "x y"}),
    (".ps1", "foreach ($r in 4, 8) { python train.py --a $r }", {"a": "4"}),
    (".ps1", "$x = 1 -eq 2\npython train.py --a $x", {"a": "$x"}),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "text", "expected"), LINES, ids=range(len(LINES)))
def test_a_command_and_what_stands_around_it(suffix: str, text: str, expected: Json) -> None:
    found = options(text, suffix)
    del found[TOOK]
    assert {key: value for key, value in found.items() if key != "script"} == expected and found["script"] == "train.py"


def test_what_the_file_does_not_decide_and_further_trainings_are_said(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "V=a.pt\n[ -d /x ] && V=b.pt\n"
        "python train_network.py --network_module=networks.lora --vae $V --seed $SEED\n  --network_dim 8\n"
        "python tools/extract.py\nfor r in 1 2; do\n  python sdxl_train.py --x $r\ndone\n"
    )
    found = import_file(file)
    assert found.config["model"]["vae"] == "a.pt" and found.config["adapter"]["rank"] == 4
    assert [str(line) for line in found.lines[-4:]] == [
        "$V train_network.py: set under a condition that the file alone does not decide",
        "$SEED train_network.py: the file gives it no value",
        "line 7 sdxl_train.py: a further training script: put its command in a file of its own",
        "line 4 --network_dim 8: no command: its shell does not join it to the one above",
    ]
    assert {line.became for line in found.lines[-4:]} == {"left out"}


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".sh", "S=$((4 * 25))\npython train.py --steps $S"),
        (".bat", "set /a S=4*25\npython train.py --steps %S%"),
        (".bat", "set /p S=Steps?\npython train.py --steps %S%"),
        (".ps1", "$s = [Math]::Ceiling(4 * 25)\npython train.py --steps $s"),
    ],
)
def test_what_only_the_shell_can_compute_is_said(suffix: str, text: str) -> None:
    assert [why for _, _, why in options(text, suffix)[TOOK]] == [COMPUTED]


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".sh", "echo python train_network.py\n# python train_network.py\nls train_network.py\n"),
        (".sh", "python -m pip install x\npython cache_latents.py --a 1\n"),
        (".bat", "rem python train_network.py\necho python train_network.py\nif exist train_network.py echo yes\n"),
        (".ps1", "Write-Host python train_network.py\npython -c 'train_network.py'\n<# python train.py\n#>\n"),
    ],
)
def test_what_only_names_a_script_is_no_training(suffix: str, text: str) -> None:
    assert read_command(text, suffix) is None


def test_a_file_of_powershell_may_be_utf_16(tmp_path: Path) -> None:
    file = tmp_path / "run.ps1"
    file.write_bytes(PS1.encode("utf-16"))
    assert import_file(file).config["adapter"]["rank"] == 16


WINDOWS = r"""python sdxl_train_network.py --network_module=networks.lora --train_data_dir=C:\ai\img ^
  --pretrained_model_name_or_path="d:/My Models/xl.safetensors" --vae .\vae.pt --output_dir=C:\ai\out
"""


@pytest.mark.parametrize("wsl", [True, False])
def test_paths_of_windows_are_those_of_this_machine(wsl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "is_under_wsl", lambda: wsl)
    file = tmp_path / "run.bat"
    file.write_text(WINDOWS)
    found = import_file(file)
    config = found.config
    paths = [config["data"]["path"], config["model"]["pretrained"], config["model"]["vae"], config["output"]["runs"]]
    given = [r"C:\ai\img", "d:/My Models/xl.safetensors", r".\vae.pt", r"C:\ai\out"]
    assert paths == (
        ["/mnt/c/ai/img", "/mnt/d/My Models/xl.safetensors", "./vae.pt", "/mnt/c/ai/out"] if wsl else given
    )
    said = {line.value: line.why for line in found.lines if line.why.endswith("as WSL calls it")}
    assert said == ({old: f"{new}, as WSL calls it" for old, new in zip(given, paths, strict=True)} if wsl else {})


def test_a_path_of_windows_that_is_left_out_is_not_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "is_under_wsl", lambda: True)
    file = tmp_path / "run.bat"
    file.write_text(WINDOWS.rstrip() + " --console_log_file=C:\\ai\\log --other=D:\\x\n")
    lists = import_file(file).lists()
    told = {line.key: (head, line.value) for head, lines in lists.items() for line in lines}
    assert told["console_log_file"] == ("not needed", "C:\\ai\\log") and told["other"] == ("unknown", "D:\\x")


MUSUBI = [
    ("x.bat", "python wan_cache_latents.py --vae x\naccelerate launch src/musubi_tuner/wan_train_network.py --dit x",
     r"script wan_train_network.py \(Wan, by musubi-tuner\)"),
    ("x.ps1", "accelerate launch src\\musubi_tuner\\qwen_image_train.py `\n --dit x", "or Qwen-Image without a LoRA"),
    ("x.sh", "python -m musubi_tuner.zimage_train --dit x", "Z-Image, unless it trains a LoRA"),
    ("x.sh", "python flux_kontext_train_network.py", r"FLUX.1 Kontext"),
    ("x.sh", "python hv_train_network.py", r"\(HunyuanVideo, "),
    ("x.sh", "python hv_1_5_train_network.py", r"\(HunyuanVideo 1.5, "),
    ("x.toml", 'network_module = "networks.lora_wan"\nnetwork_dim = 8\ndataset_config = "x.toml"', r"\(Wan, "),
    ("x.toml", '[a]\nnetwork_module = "networks.lora"\ndit = "mp_rank_00.pt"\nnetwork_dim = 8', r"\(HunyuanVideo, "),
    ("x.toml", 'network_module = "networks.lora_flux"\ndit = "x"\nnetwork_dim = 8', "FLUX.1 Kontext"),
    ("x.toml", 'dit = "x"\ntask = "i2v-14B"\noutput_name = "x"', r"\(Wan, "),
    ("x.toml", 'dit = "x/qwen_image_bf16.safetensors"\noutput_name = "x"', r"\(Qwen-Image, "),
    ("x.toml", 'dit = "x"\noutput_name = "x"', "a model that is not named, by musubi-tuner"),
    ("x.toml", '[[datasets]]\nvideo_directory = "x"\ntarget_frames = [1]', "datasets.video_directory x .a data set of"),
    ("x.toml", '[[datasets]]\nimage_directory = "x"\nmultiple_target = true', "a data set of musubi-tuner, for Qwen"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), MUSUBI, ids=range(len(MUSUBI)))
def test_musubi_tuner_is_refused_by_the_name_of_its_model(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        import_file(tmp_path / name)
    assert main(["import", str(tmp_path / name), "--out", str(tmp_path / "ours.json")]) == 2
    assert "Nothing is written" in capsys.readouterr().err and not (tmp_path / "ours.json").exists()


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".sh", "for a in 1 2 3 4 5 6 7 8 9; do\n" * 30 + "A=1\n" + "done\n" * 30),
        (".sh", f"for i in {'a ' * 9_000}; do bash -c 'A=xxxxxxxx{'; A=$A$A' * 9}'; done\n"),
        (".sh", "A=x\n" + "A=(${A[@]} ${A[@]})\n" * 40 + "python train.py ${A[@]}"),
        (".bat", "set A=x\n" + "set A=%A%%A%\n" * 40 + "python train.py %A%"),
        (".ps1", "$a = 'x'\n" + "$a += $a\n" * 40 + "python train.py $a"),
        (".ps1", "$a = @('x', 'y')\n" + "$a += $a\n" * 40 + "python train.py $a"),
        (".ps1", "foreach ($a in 1,2,3,4,5,6,7,8,9) {\n" * 30 + "$b = 1\n" + "}\n" * 30),
    ],
)
def test_what_variables_and_loops_grow_to_is_bounded(suffix: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"x{suffix}"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(UserError, match="Write the command out"):
        import_file(file)
    assert time.process_time() - started < 5


HANGS = [
    (".sh", "$(" * 300_000), (".sh", "((" * 300_000), (".sh", "if x; then\n" * 50_000), (".sh", "<<E\n" * 100_000),
    (".sh", "x=(" * 200_000), (".sh", "{ " * 300_000), (".sh", "a&" * 300_000), (".sh", "case x in\n" * 90_000),
    (".bat", "if " * 20_000), (".bat", "if a==b " * 7_000), (".bat", "(" * 50_000), (".bat", "for %%a in (" * 5_000),
    (".bat", "for %%a in (a b) do " * 3_000), (".bat", "^\n" * 300_000), (".bat", '"=' * 30_000),
    (".ps1", "@'\n" * 200_000), (".ps1", "<#" * 300_000), (".ps1", "if ($a) {" * 20_000),
    (".ps1", f"$a={'(' * 20_000}{')' * 20_000}"), (".ps1", f"if ({'-not ' * 12_000}) {{ }}"),
    (".ps1", f"if ({'(' * 20_000}{')' * 20_000}) {{ }}"), (".ps1", f"$a={'1+' * 30_000}1"), (".ps1", "@(" * 200_000),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "text"), HANGS, ids=range(len(HANGS)))
def test_no_command_file_takes_long(suffix: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"x{suffix}"
    file.write_text(f"{text}\npython train_network.py --network_module=networks.lora\n")
    started = time.process_time()
    with suppress(UserError):
        import_file(file)
    assert time.process_time() - started < 5  # the slowest takes two


@pytest.mark.parametrize(("suffix", "text"), [(".sh", SH), (".bat", BAT), (".ps1", PS1)])
def test_a_damaged_command_file_is_read_or_refused_in_words(suffix: str, text: str, tmp_path: Path) -> None:
    draw = random.Random(suffix)
    file = tmp_path / f"x{suffix}"
    marks = "'\"`\\^$%!(){}[]<>|&;#@=,\n\0 é"
    started = time.process_time()
    for _ in range(120):
        damaged = list(text)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.choice((0, 1, 1, 40))] = draw.choice(marks) * draw.choice((1, 1, 3))
        file.write_text("".join(damaged), encoding="utf-8")
        with suppress(UserError):
            import_file(file)
    assert time.process_time() - started < 60
