# Installs everything it needs into .venv, then fine-tunes Stable Diffusion 3 as CONFIG says: train.sh and setup.sh for
# Windows without WSL. Nobody has tried it there yet (docs/how-to/install.md). No param(): all words are passed on.
#
# Exit codes: 3  this machine lacks something (Python, venv, NVIDIA driver), or .venv may hold somebody's files
#             4  the install failed; its log is .venv\install.log

$minDriver = 580 # as in setup.sh
$cudaIndex = 'https://download.pytorch.org/whl/cu130' # the package index has torch for Windows without CUDA only
$caller = (Get-Location).Path
$root = $PSScriptRoot
$venv = Join-Path $root '.venv'
$venvPython = Join-Path $venv 'Scripts\python.exe'
$log = Join-Path $venv 'install.log'
$marker = Join-Path $venv '.simpletune-installing'
$stampFile = Join-Path $venv '.simpletune-installed-run'
$indexFile = Join-Path $venv '.simpletune-torch-index'

$usage = @'
usage: .\train.ps1 [CONFIG | FOLDER] [key.path=value ...] [--flags]

  CONFIG            a JSON file, or the name of one in configs/, such as sd3_medium_lora_8gb
                    (default: configs/demo.json, which needs no GPU and no download of weights)
  FOLDER            a folder of pictures; writes FOLDER.json beside it, with reasons, unless it exists
  key.path=value    overrides one field of the configuration, e.g. train.steps=30
  --flags           are passed to `simpletune train`, e.g. --resume latest

The first call makes .venv and installs simpletune; later ones start at once. $env:PYTHON chooses the Python,
$env:SIMPLETUNE_TORCH_INDEX the package index for torch.
'@

function Say($text) { [Console]::Error.WriteLine("setup: $text") }

function Stop-Setup($code, $problem, $remedy) {
    Say $problem
    [Console]::Error.WriteLine("       $remedy")
    exit $code
}

# Returns the command of the first Python that is new enough and can make virtual environments, as a list of words.
function Find-Python {
    $probe = 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
    $candidates = @(('py', '-3.13'), ('py', '-3.12'), ('py', '-3.11'), @('python'), @('python3'))
    if ($env:PYTHON) { $candidates = @(, @($env:PYTHON)) } # an explicit choice is used or refused, never replaced
    foreach ($words in $candidates) {
        if (-not (Get-Command $words[0] -ErrorAction SilentlyContinue)) { continue }
        $rest = @($words | Select-Object -Skip 1)
        & $words[0] @rest -c $probe 2>$null | Out-Null
        if ($LASTEXITCODE -eq 0) { return $words }
    }
    Stop-Setup 3 'simpletune needs Python 3.11 or newer with venv; none was found or runs.' `
        'Install one: winget install Python.Python.3.12, or name it: $env:PYTHON = "C:\path\to\python.exe"'
}

# The package index for torch: the chosen one, the recorded one, or with a card that of CUDA builds; empty: pip's own.
function Get-TorchIndex {
    if ($env:SIMPLETUNE_TORCH_INDEX) { return $env:SIMPLETUNE_TORCH_INDEX }
    if (Test-Path $indexFile) { return (Get-Content $indexFile -TotalCount 1) }
    if (-not (Get-Command nvidia-smi -ErrorAction SilentlyContinue)) { return '' }
    $driver = (& nvidia-smi --query-gpu=driver_version --format=csv,noheader) | Select-Object -First 1
    if ("$driver" -notmatch '^\d+') {
        Say "nvidia-smi reports no driver version ($driver). Continuing: until it does, only the CPU can be used."
        return ''
    }
    if ([int]$Matches[0] -lt $minDriver) {
        Stop-Setup 3 "NVIDIA driver $driver is too old for torch 2.11 and newer, which needs driver $minDriver or newer." `
            'Update the driver, or choose a torch for CUDA 12: $env:SIMPLETUNE_TORCH_INDEX = URL ending in cu126 or cu128'
    }
    return $cudaIndex
}

# What an up-to-date .venv was made from; empty without a working Python.
function Get-Stamp {
    if (-not (Test-Path $venvPython)) { return '' }
    $version = & $venvPython -c 'import sys; print(''%d.%d'' % sys.version_info[:2])'
    if ($LASTEXITCODE -ne 0) { return '' }
    $pyproject = (Get-FileHash (Join-Path $root 'pyproject.toml') -Algorithm SHA256).Hash.ToLower()
    return "python $version; pyproject $pyproject; root $root"
}

function Test-Current {
    $stamp = Get-Stamp
    if (-not $stamp -or (Test-Path $marker) -or -not (Test-Path $stampFile)) { return $false }
    if ($env:SIMPLETUNE_TORCH_INDEX -and $env:SIMPLETUNE_TORCH_INDEX -ne (Get-TorchRecord)) { return $false }
    return (Get-Content $stampFile -TotalCount 1) -eq $stamp
}

function Get-TorchRecord { if (Test-Path $indexFile) { Get-Content $indexFile -TotalCount 1 } }

function Invoke-Pip($what) {
    & $venvPython -m pip --disable-pip-version-check --no-input --log $log install --quiet @args
    if ($LASTEXITCODE -ne 0) {
        Stop-Setup 4 "Installing $what failed. The whole log: $log" 'See the lines above; then run the same command again.'
    }
}

function Install-Simpletune {
    $half = (Test-Path $marker) -or ((Test-Path $venv) -and -not (Get-Stamp))
    $ownsIt = (Test-Path (Join-Path $venv 'pyvenv.cfg')) -and -not (Get-Item $venv -Force).LinkType
    if ($half -and -not $ownsIt -and (Get-ChildItem $venv -Force)) {
        Stop-Setup 3 "$venv cannot be used and is not emptied: without pyvenv.cfg, or as a link, it may hold somebody's files." `
            'Move it away, then run the same command again.'
    }
    $index = Get-TorchIndex
    if ($half -or -not (Test-Path $venv)) {
        $python = @(Find-Python)
        $rest = @($python | Select-Object -Skip 1)
        Say 'making .venv, installing simpletune and the packages for training. This takes minutes.'
        & $python[0] @rest -m venv --clear $venv
        if ($LASTEXITCODE -ne 0) { Stop-Setup 4 "$($python[0]) -m venv failed." 'See the lines above.' }
    } else {
        Say 'installing simpletune and the packages for training. This takes minutes.'
    }
    New-Item -ItemType File -Force $marker | Out-Null
    if ($index) {
        $torch = (Select-String -Path (Join-Path $root 'pyproject.toml') -Pattern '^ *"(torch[<>=][^"]*)"').Matches[0].Groups[1].Value
        if ($index -ne (Get-TorchRecord)) { & $venvPython -m pip uninstall --quiet -y torch } # it would count as satisfied
        Invoke-Pip "$torch from $index" --index-url $index $torch
        Set-Content $indexFile $index
    }
    Invoke-Pip 'simpletune' -e $root
    Set-Content $stampFile (Get-Stamp)
    Remove-Item $marker
    Say 'done.'
}

if ($args -contains '--help' -or $args -contains '-h') {
    $usage
    if (-not (Test-Current)) { exit 0 } # --help must not start an install
    & $venvPython -m simpletune train --help
    exit $LASTEXITCODE
}

$config = 'configs/demo.json'
$words = @($args | ForEach-Object { @($_) -join ',' }) # PowerShell makes a list of a,b
if ($words.Count -and ((Test-Path -LiteralPath $words[0]) -or $words[0] -notmatch '=|^-')) {
    $config = $words[0]
    $words = @($words | Select-Object -Skip 1)
    # Relative to the caller's folder; otherwise relative to the project, or the name of one of its configurations.
    $ours = (Test-Path -LiteralPath (Join-Path $root $config)) -or (Test-Path -LiteralPath (Join-Path $root "configs/$config.json"))
    if ($caller -ne $root -and -not [IO.Path]::IsPathRooted($config) -and ((Test-Path -LiteralPath (Join-Path $caller $config)) -or -not $ours)) {
        $config = Join-Path $caller $config
    }
}

if (-not (Test-Current)) { Install-Simpletune }
Push-Location $root
try {
    if ($caller -ne $root) {
        [Console]::Error.WriteLine("train.ps1: relative paths in the config and in overrides are taken from $root")
    }
    if ($PSVersionTable.PSVersion -lt [version]'7.3') { # which pass " on as it is
        $words = @($words | ForEach-Object { $_ -replace '(\\*)"', '$1$1\"' })
    }
    & $venvPython -m simpletune train $config @words
    exit $LASTEXITCODE
} finally {
    Pop-Location
}
