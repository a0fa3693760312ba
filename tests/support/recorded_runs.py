"""Write folders of runs as training leaves them, so that reports are tested without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from PIL import Image

from simpletune.config.load import with_default_tags
from simpletune.config.schema import TrainConfig
from simpletune.runs.report.run_data import Json
from simpletune.stages.png import save_png
from simpletune.stages.sample import ImageRequest

NASTY = "a <script>alert(\"1\")</script> & `code` | [link](x) 'quoted' " + "very " * 60 + "longprompt" * 12
GPU = {"text": 1.9, "latents": 2.2, "validate": 2.6, "train": 2.75, "save": 2.05}


def config_of(name: str, **changes: Any) -> TrainConfig:
    """A configuration of a run at another's defaults."""
    data = {"name": name, "model": {"pretrained": "demo:tiny-sd3"}, "data": {"path": "/somewhere/private/pictures"}}
    return TrainConfig.model_validate_json(json.dumps(with_default_tags(TrainConfig, {**data, **changes})))


def write_run(
    folder: Path, steps: int = 40, scale: float = 1.0, gpu: bool = True, finished: bool = True, **changes: Any
) -> Path:
    """Write a run of some steps, four per epoch, with a factor of its times and peaks; a finished one has a summary."""
    folder.mkdir(parents=True)
    config = config_of(folder.name, **{"train": {"steps": 40}, **changes})
    (folder / "config.json").write_text(config.model_dump_json(by_alias=True))
    versions = "torch 2.13.0, diffusers 0.42.0"
    (folder / "environment.json").write_text(json.dumps({"device": "a made-up card", "versions": versions}))
    rows = [
        {"step": step + 1, "epoch": step // 4, "loss": 1 / (1 + 0.1 * step) + 0.05 * math.sin(step), "lr": 1e-4,
         "seconds": 0.5 * scale, "grad_norm": 0.1}
        for step in range(steps)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = [{"step": step, "eval_loss": 1 / (1 + 0.1 * step)} for step in range(0, steps + 1, 20)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in losses))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary_of(config, steps, scale, gpu, rows)))
    return folder


def summary_of(config: TrainConfig, steps: int, scale: float, gpu: bool, rows: list[Json]) -> Json:
    """What summary.json holds."""
    stages = {
        name: {"seconds": 3.0, "peak_allocated_gib": peak * scale if gpu else None,
               "peak_reserved_gib": peak * scale * 1.1 if gpu else None, "peak_rss_gib": 0.5 * scale}
        for name, peak in GPU.items()
    }  # fmt: skip
    return {
        "name": config.name, "device": "cuda (made up)" if gpu else "cpu (made up)", "steps": steps,
        "seconds_per_step": 0.5 * scale, "samples_per_second": 2 / scale, "steps_per_epoch": 4,
        "peak_allocated_gib": 2.75 * scale if gpu else None, "peak_reserved_gib": 3.0 * scale if gpu else None,
        "peak_rss_gib": 0.5 * scale, "stages": stages, "first_loss": rows[0]["loss"], "final_loss": rows[-1]["loss"],
        "seconds_total": 360.0, "seconds_setup": 60.0, "trainable_parameters": 1000, "total_parameters": 100_000,
        "eval_loss_before": 1.0, "eval_loss_after": 0.2, "output": "runs/x/y", "warnings": [],
    }  # fmt: skip


def add_prediction(folder: Path, factor: float = 1.02) -> None:
    """A prediction that is off by a factor."""
    file = folder / "summary.json"
    summary = json.loads(file.read_text())
    stages = {
        name: {"peak_allocated_mib": gib * 1024 * factor, "by_kind": {"weights": gib * 800, "activations": gib * 200}}
        for name, gib in GPU.items()
        if name != "save"
    }
    summary["predicted"] = {"stages": stages, "peak_allocated_mib": 2.75 * 1024 * factor}
    file.write_text(json.dumps(summary))


def add_images(folder: Path, prompts: list[str], steps: tuple[int, ...] = (20, 40), side: int = 64) -> None:
    """Pictures of the base and of some steps."""
    for number, prompt in enumerate(prompts):
        request = ImageRequest(prompt, number, "", side, side, 2, 1.0)
        for step in (0, *steps):
            state = f"step-{step:06d}" if step else "base"
            image = Image.new("RGB", (side, side), (40 + 4 * step, 90 + 20 * number, 200 - 4 * step))
            save_png(image, folder / "samples" / state / f"prompt-{number:02d}.png", request, run=folder.name)


def add_profiles(profiles: Path, epochs: tuple[int, ...] = (0, 9)) -> None:
    """Summaries of traced epochs, in the form in which the profiler leaves them."""
    phases = {"data": 0.004, "noise": 0.002, "forward": 0.13, "loss": 0.003, "backward": 0.21, "optimizer": 0.03}
    timeline = []
    for number in range(60):
        phase = "forward" if number < 20 else "backward" if number < 50 else "optimizer"
        live = 12.0 * number if number < 20 else max(0.0, 8.0 * (50 - number))
        kinds = {"weights": 420.0, "adapter": 12.0, "optimizer": 24.0, "activations": live}
        timeline.append({"ms": 6.0 * number, "phase": phase, "total_mib": sum(kinds.values()), "by_kind": kinds})
    for epoch in epochs:
        operators = [
            {"name": f"aten::operator_{n}<int>", "calls": 900 - n, "self_ms": 90 / (n + 1), "share": 0.3 / (n + 1)}
            for n in range(20)
        ]
        value = {
            "epoch": epoch, "steps": 2, "seconds_per_step": 0.379, "phases": phases, "idle": {"share": 0.031},
            "operators": operators, "kernels": [], "flops_per_step": 6.7e12, "tflops": 17.4, "peak_tflops": 121.0,
            "mfu": 0.144, "memory": {"peak_mib": 856.0, "at": "backward blocks.1", "timeline": timeline},
            "notes": ["the window was cut short"],
        }  # fmt: skip
        file = profiles / f"epoch-{epoch:03d}" / "summary.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(value))


ScoredRow = tuple[int | None, float | None, float, float, float]


def scored(folder: Path, rows: list[ScoredRow], reads: bool = True, prompts: int = 25) -> None:
    """Write an evaluation: step, strength, subject fidelity, change of prompt fidelity, half its interval."""
    points = [
        {"step": step, "strength": strength, "scores": {
            "subject_fidelity": {"dino": {"value": subject, "prompts": prompts}},
            "prompt_fidelity": {"clip": {
                "value": 0.3 + change, "by_prompt": [0.3 + change - error, 0.3 + change + error * (1 + change)],
                "from_base": {"value": change, "low": change - error, "high": change + error}}},
        }}
        for step, strength, subject, change, error in rows
    ]  # fmt: skip
    main = {"subject_fidelity": "dino", "prompt_fidelity": "clip" if reads else None}
    (folder / "evaluation.json").write_text(json.dumps({"main": main, "points": points}))
