"""Write what a release leaves with its users: runs, a cache, LoRAs, configurations. Later versions must read all of it.

    python tests/releases/release_files.py

Only from a clean tree whose commit has the tag of its version, such as v0.1.0, or is the one that set this version in
pyproject.toml. Everything is made by the command line, in a folder of its own with relative paths.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "files.tar.gz"
LARGEST = 8 * 2**20  # bytes of the archive
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

MODELS: dict[str, dict[str, Any]] = {
    "sd3": {"family": "sd3", "pretrained": "models/sd3", "t5_length": 8},
    "sd15": {"family": "sd15", "pretrained": "models/sd15"},
    "sdxl": {"family": "sdxl", "pretrained": "models/sdxl"},
    "klein": {"family": "klein", "pretrained": "models/klein", "text_length": 64},
    "zimage": {"family": "zimage", "pretrained": "models/zimage", "text_length": 64},
    "qwen_image": {"family": "qwen_image", "pretrained": "models/qwen_image", "text_length": 64},
}
KEPT = ("sd3", "sd15")
"""Models that are kept: the others are too large."""
RUN: dict[str, Any] = {
    "device": "cpu",
    "data": {"path": "pictures", "resolution": 64},
    "precision": {"weights": "fp32"},
    "optimizer": {"lr": 0.01},
    "train": {"steps": 4},
    "memory": {"checkpointing": "none"},
    "checkpoint": {"every": 2},
    "validation": {"prompts": ["a red disc"], "steps": 2, "guidance": 2.0, "loss_samples": 2},
    "profile": {"max_traces": 0},
    "tracking": {"tensorboard": False},
    "output": {"runs": "runs", "profiles": "profiles", "cache": "cache"},
}
QUICK: dict[str, Any] = {
    "checkpoint": {"every": None},
    "validation": {**RUN["validation"], "prompts": []},
    "train": {"steps": 2},
}
LORA: dict[str, Any] = {"method": "lora", "rank": 2}
CONVOLVED = {"rank": 1, "conv_rank": 1}
DIRECTION = {"target": "a disc", "positive": "a red disc", "negative": "a blue disc", "preserved": ["a star"]}
SLIDER: dict[str, Any] = {
    "adapter": LORA,
    "data": None,
    "concept": {"directions": [DIRECTION], "resolutions": [64], "drawing_steps": 4},
}
# name: model, changes, and layouts to export the result to
FILES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "sd3-lora": ("sd3", {"adapter": LORA}, ("kohya", "onetrainer", "comfy")),
    "sd3-dora": ("sd3", {"adapter": {"method": "dora", "rank": 2}}, ("kohya",)),
    "sd3-lokr": ("sd3", {"adapter": {"method": "lokr", "factor": 4, "rank": 1}}, ("lycoris",)),
    "sd3-loha": ("sd3", {"adapter": {"method": "loha", "rank": 1}}, ("lycoris",)),
    "sd3-oft": ("sd3", {"adapter": {"method": "oft"}}, ("kohya",)),
    "sd15-lora": ("sd15", {"adapter": {"method": "lora", **CONVOLVED}}, ("diffusers", "onetrainer")),
    "sd15-textlora": ("sd15", {"adapter": LORA, "text": {"lora": {"rank": 1}}}, ("kohya",)),
    "sd15-hypernetwork": ("sd15", {"adapter": {"method": "hypernetwork", "widths": "all"}}, ("a1111",)),
    "sdxl-lora": ("sdxl", {"adapter": {"method": "lora", **CONVOLVED}}, ("diffusers", "onetrainer")),
    "sd3-slider": ("sd3", SLIDER, ("kohya",)),
    "klein-lora": ("klein", {"adapter": LORA}, ("kohya", "comfy")),
    "klein-lokr": ("klein", {"adapter": {"method": "lokr", "factor": 4, "rank": 1}}, ("lycoris",)),
    "zimage-lora": ("zimage", {"adapter": LORA}, ("kohya", "comfy")),
    "qwen_image-lora": ("qwen_image", {"adapter": LORA}, ("kohya", "onetrainer")),
}


def require_release(version: str) -> str:
    """Return the commit of a clean tree that is the release. SystemExit: it is not."""
    if git("status", "--porcelain"):
        raise SystemExit("release_files.py: the tree has changes. Commit them, or make the files in a fresh clone")
    commit = git("rev-parse", "HEAD")
    tagged = f"v{version}" in git("tag", "--points-at", "HEAD").split()
    changed = git("show", "--format=", "HEAD", "--", "pyproject.toml")
    if not tagged and f'+fallback_version = "{version}"' not in changed:
        raise SystemExit(
            f"release_files.py: commit {commit[:8]} has no tag v{version} and does not set this version in "
            "pyproject.toml. Check out the release"
        )
    return commit


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()


def simpletune(folder: Path, *words: str, failpoint: str | None = None, code: int = 0) -> None:
    """Run a command in a folder. SystemExit: it ends otherwise than expected."""
    start = ["-m", "simpletune"] if failpoint is None else [str(ROOT / "tests/support/failpoints.py"), failpoint]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *start, *words], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != code:
        raise SystemExit(
            f"release_files.py: {' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )


def configuration(folder: Path, name: str, model: str, **changes: Any) -> str:
    """Write a configuration; return its path within the folder."""
    file = folder / "configs" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    data = {"name": name, "model": MODELS[model], **RUN, **changes}
    if data["data"] is None:  # a slider needs no pictures, and has no validation loss on them
        del data["data"]
        data["validation"] = {**data["validation"], "loss_samples": 0}
    file.write_text(json.dumps(data, indent=2), encoding="utf-8")
    return f"configs/{name}.json"


def losses(folder: Path, name: str) -> list[float]:
    from simpletune.runs.folder import read_metrics

    return [row["loss"] for row in read_metrics(folder / "runs" / name)]


def merge_words(name: str, out: Path) -> list[str]:
    """The command that merges an adapter's file into its model."""
    base = f"models/{model_of(name)}"
    return ["merge", f"loras/{name}.safetensors", "--base", base, "--dtype", "fp32", "--out", str(out)]


def model_of(name: str) -> str:
    return name.partition("-")[0]


def sum_of_updates(file: Path) -> float:
    """Sum of what a LoRA's file adds to weights, without signs; for models too large to be kept, and text encoders."""
    from simpletune.adapters.files.read import read_lora

    return sum(update.delta().abs().double().sum().item() for update in read_lora(file).values())


def change(folder: Path, name: str, merged: Path) -> float:
    """Mean difference between a merged model's weights and its base's."""
    from safetensors.torch import load_file

    file = "diffusion_pytorch_model.safetensors"
    part = folder / "models" / model_of(name) / ("transformer" if model_of(name) == "sd3" else "unet")
    new, old = load_file(merged / file), load_file(part / file)
    differences = [(new[key].float() - old[key].float()).abs().double().sum().item() for key in old]
    return sum(differences) / sum(tensor.numel() for tensor in old.values())


def images_in(report: Path) -> int:
    return report.read_text(encoding="utf-8").count("data:image")


def make(folder: Path) -> dict[str, Any]:
    """Fill an empty folder; return what later versions are held to."""
    import tiny_sd15
    import tiny_sdxl

    from benchmarks.tiny_models import tiny_klein, tiny_qwen_image, tiny_sd3, tiny_zimage
    from simpletune.config.load import shipped_files
    from simpletune.data.demo import demo_scenes

    tiny_sd3.build(folder / "models" / "sd3", tiny_sd3.MINIMAL, seed=1)
    tiny_sd15.build(folder / "models" / "sd15", dtype="bf16")
    tiny_sdxl.build(folder / "models" / "sdxl", dtype="bf16")
    for name, family in {"klein": tiny_klein, "zimage": tiny_zimage, "qwen_image": tiny_qwen_image}.items():
        family.build(folder / "models" / name, seed=1)
    demo_scenes.write_folder(folder / "pictures", demo_scenes.sample_scenes(4, seed=3), seed=3)

    expected = {**write_runs(folder), **write_loras(folder)}
    (folder / "shipped").mkdir()
    for file in shipped_files().values():
        shutil.copy(file, folder / "shipped")
    models = [f"models/{name}" for name in MODELS if name not in KEPT]
    for left in ("profiles", "runs/.web", "runs/full/checkpoints", *models):
        shutil.rmtree(folder / left, ignore_errors=True)
    for file in list(folder.rglob("*")):
        if file.suffix == ".lock" or file.name == "report.html":  # a page has 1 MB; the command writes it again
            file.unlink()
    return expected


def write_runs(folder: Path) -> dict[str, Any]:
    """Train to the end, until killed, embeddings, and the whole model; return what the first run lost and drew."""
    simpletune(folder, "train", configuration(folder, "finished", "sd3", adapter=LORA))
    stopped = configuration(folder, "stopped", "sd3", adapter=LORA)
    simpletune(folder, "train", stopped, failpoint="checkpoint.after-rename=kill", code=-9)
    embedded = {"embeddings": {"token": "<disc>", "initial": "circle"}}
    prompt = {"data": {**RUN["data"], "prompt": "a photo of <disc>"}}
    text = configuration(folder, "embeddings", "sd3", adapter={"method": "none"}, text=embedded, **QUICK, **prompt)
    simpletune(folder, "train", text)
    half = {"precision": {"weights": "bf16"}}
    simpletune(folder, "train", configuration(folder, "full", "sd3", adapter={"method": "full"}, **half, **QUICK))
    return {"losses": losses(folder, "finished"), "pictures": images_in(folder / "runs/finished/report.html")}


def write_loras(folder: Path) -> dict[str, Any]:
    """Train every kind and write it in its layouts; return what each file changes in its model."""
    loras = folder / "loras"
    loras.mkdir()
    for name, (model, changes, layouts) in FILES.items():
        simpletune(folder, "train", configuration(folder, name, model, **changes, **QUICK))
        (trained,) = (folder / "runs" / name).glob("pytorch_*.safetensors")
        shutil.copy2(trained, loras / f"{name}.safetensors")
        for layout in layouts:
            ending = "pt" if layout == "a1111" else "safetensors"
            out = f"loras/{name}-{layout}.{ending}"
            simpletune(folder, "export", f"runs/{name}", "--format", layout, "--out", out)
        shutil.rmtree(folder / "runs" / name)
    merged = ("--dtype", "bf16", "--out", "models/sd3-merged.safetensors")
    simpletune(folder, "merge", "loras/sd3-lora.safetensors", "--base", "models/sd3", *merged)
    expected: dict[str, Any] = {"changes": {}, "sums": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in sorted(file.stem for file in loras.glob("*.safetensors") if "hypernetwork" not in file.name):
            if model_of(name) not in KEPT or "text" in name:
                expected["sums"][name] = sum_of_updates(loras / f"{name}.safetensors")
                continue
            simpletune(folder, *merge_words(name, Path(scratch) / name))
            expected["changes"][name] = change(folder, name, Path(scratch) / name)
    return expected


def main() -> None:
    (version,) = re.findall(r'^fallback_version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    commit = require_release(version)
    place = ROOT / "tests" / "releases" / version
    if place.exists():
        raise SystemExit(f"release_files.py: {place} exists. A release's files are made once")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / version
        folder.mkdir()
        expected = make(folder)
        with tarfile.open(Path(scratch) / ARCHIVE, "w:gz") as archive:
            archive.add(folder, version, filter=without_owner)
        size = (Path(scratch) / ARCHIVE).stat().st_size
        if size > LARGEST:
            raise SystemExit(f"release_files.py: {size:,} bytes; at most {LARGEST:,}. Make the models smaller")
        place.mkdir()
        shutil.copy2(Path(scratch) / ARCHIVE, place)
    libraries = {name: version_of(name) for name in ("torch", "diffusers", "peft", "safetensors")}
    about = {"version": version, "commit": commit, "made": str(date.today()), "libraries": libraries, **expected}
    (place / "release.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(f"{place.relative_to(ROOT)}: {size:,} bytes")


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(uid=0, gid=0, uname="", gname="", deep=False)


if __name__ == "__main__":
    main()
