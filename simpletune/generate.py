"""Drawing with the base model, a LoRA, or a run's result: ``simpletune generate`` and the inference scripts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from pydantic import TypeAdapter

from simpletune.config import TrainConfig
from simpletune.data.folder import Folder
from simpletune.devices import choose_device
from simpletune.options import UserError
from simpletune.places import resolved
from simpletune.prepare import TextCache, free_memory
from simpletune.quant import Precision
from simpletune.results import (
    BASE,
    Weights,
    find_run,
    full_model_of,
    load_weights,
    lora_weights,
    precision_of,
    result_of,
    run_config,
)
from simpletune.sampling import Request, draw, save_png
from simpletune.stages import Stages
from simpletune.terminal import say


@dataclass
class Studio:
    """Everything for drawing that does not depend on the weights: configuration, device, prompts, autoencoder.

    Args:
        config: of the run, changed by arguments, with folders resolved.
        run: the run's folder, or None.
        device: where to.
        reason: which device and why.
        stages: time and memory so far.
    """

    config: TrainConfig
    run: Path | None
    device: torch.device
    reason: str
    stages: Stages

    def draw(self, weights: Weights, requests: Sequence[Request]) -> tuple[list[Image.Image], float]:
        """Draw pictures with some weights.

        Returns:
            The pictures, and seconds per picture, loading left out.
        """
        config = self.config
        text = TextCache(config.model, config.precision.encoder_dtype(), Path(config.output.cache))
        with self.stages.stage("text"):
            text.fill([prompt for r in requests for prompt in (r.prompt, r.negative_prompt)], self.device)
        with self.stages.stage("load"):
            sizes = {(request.width, request.height) for request in requests}
            transformer, modulation = load_weights(config, weights, self.device, sizes)
            vae = config.model.load_vae(self.device, config.precision.encoder_dtype(), config.memory.vae_tile)
        with self.stages.stage("draw"):
            clock = time.perf_counter()
            pictures = draw(transformer, vae, config.model, config.precision, list(requests), text.load, modulation)
            seconds = (time.perf_counter() - clock) / len(requests)
        del transformer, modulation, vae
        free_memory(self.device)
        return pictures, seconds

    def memory(self) -> str:
        """The peaks so far, in words."""
        peak = self.stages.peak("peak_allocated_gib")
        on_device = f"{peak:.2f} GiB on the GPU, " if peak is not None else ""
        return f"{on_device}{self.stages.peak('peak_rss_gib'):.2f} GiB of the process"


def open_studio(args: argparse.Namespace) -> Studio:
    """The run that arguments name, or the newest, with their changes; ``--model`` alone needs no run.

    Raises:
        UserError: there is no run, or no usable device.
    """
    run = None if args.model and not args.run else find_run(args.run, args.runs)
    if run is None:
        config = TrainConfig(name="generate", data=Folder(path="demo:pictures"))
    else:
        config = run_config(run)
    changes: dict[str, object] = {}
    if args.model:
        changes["model"] = config.model.model_copy(update={"pretrained": args.model, "init": "pretrained"})
    if args.precision:
        changes["precision"] = TypeAdapter(Precision).validate_python({"weights": args.precision})
    if args.modulation:
        changes["memory"] = config.memory.model_copy(update={"modulation": args.modulation})
    if args.device:
        changes["device"] = args.device
    config = config.model_copy(update=changes)
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    return Studio(resolved(config), run, device, reason, Stages(cuda=device.type == "cuda"))


def request_of(studio: Studio, args: argparse.Namespace, prompt: str | None) -> Request:
    """The picture that the run's first validation picture is, changed by the arguments."""
    option = studio.config.validation
    width, height = args.size or studio.config.picture_size()
    prompt = prompt or default_prompt(studio)
    request = Request(prompt, option.seed, option.negative_prompt, width, height, option.steps, option.guidance)
    given = {name: getattr(args, name) for name in ("seed", "negative_prompt", "steps", "guidance")}
    return replace(request, **{name: value for name, value in given.items() if value is not None})


def default_prompt(studio: Studio) -> str:
    """The run's first validation prompt; where it drew with the first caption, that one."""
    if studio.config.validation.prompts:
        return studio.config.validation.prompts[0]
    if studio.run is None:
        raise UserError('--prompt: say what to draw, as in --prompt "a lighthouse at dusk"')
    for file in sorted((studio.run / "samples" / "base").glob("*.png")):
        return Image.open(file).text["prompt"]  # type: ignore[attr-defined]
    return studio.config.data.scan(Path(studio.config.data.path)).pictures[0].caption


def weights_of(studio: Studio, args: argparse.Namespace) -> tuple[str, Weights]:
    """The weights that arguments ask for, and the picture's name.

    Raises:
        UserError: there is no run to take them from.
    """
    if args.base:
        return "base", BASE
    if args.lora:
        return "lora", lora_weights(args.lora, args.scale)
    if studio.run is None:
        raise UserError("--lora: no file is given, and no run. Give a LoRA, or --base")
    if args.full:
        return "full", full_model_of(studio.run)
    weights = result_of(studio.run, args.scale)
    return ("full" if weights.transformer else "lora"), weights


def generate(args: argparse.Namespace) -> Path:
    """Draw one picture and say how long it took and how much memory.

    Args:
        args: as ``generate_arguments.add_arguments`` describes.

    Returns:
        The PNG.
    """
    studio = open_studio(args)
    name, weights = weights_of(studio, args)
    request = request_of(studio, args, args.prompt)
    pictures, seconds = studio.draw(weights, [request])
    folder = studio.run / "inference" if studio.run else Path("inference-out")
    output = args.output or folder / f"{name}.png"
    precision = getattr(precision_of(studio.config, weights), "weights")  # noqa: B009 members own it
    save_png(pictures[0], output, request, weights=weights.label, precision=precision)
    say(f"{output}: {weights.label}, {precision} weights on {studio.reason}")
    say(f"  prompt {request.prompt!r}, seed {request.seed}, {request.steps} steps, guidance {request.guidance:g}")
    say(f"  {seconds:.2f} s per picture, peak memory {studio.memory()}")
    return output
