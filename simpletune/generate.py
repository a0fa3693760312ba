"""Drawing with the base model, a LoRA, or a run's result: ``simpletune generate`` and the inference scripts."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

from simpletune.config import TrainConfig
from simpletune.devices import choose_device, prepare_environment
from simpletune.options import UserError
from simpletune.places import resolved
from simpletune.runs import CONFIG, newest_run, read_json_or_none
from simpletune.terminal import say

NO_RUN = {"name": "generate", "data": {"path": "demo:pictures"}}


@dataclass(frozen=True)
class Job:
    """What to draw with what.

    Args:
        config: of the run, or a stand-in that names the model.
        run: the run's folder, if there is one.
        lora: the LoRA file, or None for the base.
        scale: strength of the LoRA.
        output: the PNG.
    """

    config: TrainConfig
    run: Path | None
    lora: Path | None
    scale: float
    output: Path


def read_job(args: argparse.Namespace, default_name: str) -> Job:
    """The job that arguments and, where they are silent, the newest run describe.

    Raises:
        UserError: there is no run, no LoRA, or a file is missing.
    """
    run = None if args.model and not args.run else (args.run or newest_run(args.runs))
    if run is None:
        config = TrainConfig.model_validate({**NO_RUN, "model": {"family": "sd3"}, "precision": {"weights": "bf16"}})
    else:
        saved = read_json_or_none(run / CONFIG)
        if saved is None:
            raise UserError(f"--run: {run} has no {CONFIG}: it is not a run's folder")
        config = TrainConfig.model_validate_json((run / CONFIG).read_text())
    config = _with_arguments(config, args)
    lora = None if args.base else (args.lora or (run / "pytorch_lora_weights.safetensors" if run else None))
    if not args.base and (lora is None or not lora.exists()):
        raise UserError(f"--lora: {lora or 'no file given, and no run'} does not exist. Give a LoRA file, or --base")
    folder = run / "inference" if run else Path("inference-out")
    return Job(config, run, lora, args.scale, args.output or folder / f"{default_name}.png")


def _with_arguments(config: TrainConfig, args: argparse.Namespace) -> TrainConfig:
    """The run's configuration with the model, precision and device that arguments ask for."""
    import pydantic

    from simpletune.quant import Precision

    changes: dict[str, object] = {}
    if args.model:
        changes["model"] = config.model.model_copy(update={"pretrained": args.model})
    if args.precision:
        adapter: pydantic.TypeAdapter = pydantic.TypeAdapter(Precision)
        changes["precision"] = adapter.validate_python({"weights": args.precision})
    if args.device:
        changes["device"] = args.device
    return config.model_copy(update=changes)


def generate(args: argparse.Namespace, default_name: str | None = None) -> Path:
    """Draw one picture and say how long it took and how much memory.

    Args:
        args: as ``generate_arguments.add_arguments`` describes.
        default_name: of the picture's file, without its ending.

    Returns:
        The PNG.
    """
    prepare_environment()
    job = read_job(args, default_name or ("base" if args.base else "lora"))
    import torch

    from simpletune.adapters.lora_file import load_lora
    from simpletune.prepare import TextCache, free_memory
    from simpletune.sampling import draw, save_png
    from simpletune.stages import Stages

    config = job.config
    device, reason = choose_device(config.device, config.precision.compute, config.is_demo)
    here = resolved(config)
    stages = Stages(cuda=device.type == "cuda")
    request = _request(here, job, args)
    text = TextCache(here.model, here.precision.encoder_dtype(), Path(here.output.cache))
    with stages.stage("text"):
        text.fill([request.prompt, request.negative_prompt], device)
    with stages.stage("load"):
        transformer = here.model.load_transformer(here.precision, device)
        if job.lora is not None:
            load_lora(transformer, job.lora, job.scale)
        vae = here.model.load_vae(device, here.precision.encoder_dtype())
    with stages.stage("draw"):
        clock = time.perf_counter()
        picture = draw(transformer, vae, here.model, here.precision, [request], text.load)[0]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - clock
    free_memory(device)
    weights = "base" if job.lora is None else f"{job.lora} x {job.scale:g}"
    save_png(picture, job.output, request, model=config.model.pretrained, weights=weights)
    peak = stages.peak("peak_allocated_gib")
    memory = f"{peak:.2f} GiB on the GPU, " if peak is not None else ""
    memory += f"{stages.peak('peak_rss_gib'):.2f} GiB of the process"
    say(f"{job.output}: {weights}, {config.precision.weights} weights on {reason}")
    say(f"  prompt {request.prompt!r}, seed {request.seed}, {request.steps} steps, guidance {request.guidance:g}")
    say(f"  {seconds:.2f} s per picture, peak memory {memory}")
    return job.output


def _request(here: TrainConfig, job: Job, args: argparse.Namespace):  # type: ignore[no-untyped-def]  # needs torch to import
    """The picture that the run's first validation picture is, changed by the arguments."""
    from simpletune.sampling import Request

    option = here.validation
    width, height = args.size or here.picture_size()
    prompt = args.prompt or _default_prompt(here, job)
    request = Request(prompt, option.seed, option.negative_prompt, width, height, option.steps, option.guidance)
    given = {
        "seed": args.seed,
        "negative_prompt": args.negative_prompt,
        "steps": args.steps,
        "guidance": args.guidance,
    }
    return replace(request, **{name: value for name, value in given.items() if value is not None})


def _default_prompt(here: TrainConfig, job: Job) -> str:
    """The run's first validation prompt; where it drew with the first caption, that one."""
    if here.validation.prompts:
        return here.validation.prompts[0]
    if job.run is not None:
        from PIL import Image

        for file in sorted((job.run / "samples" / "base").glob("*.png")):
            return Image.open(file).text["prompt"]  # type: ignore[attr-defined]
        return here.data.scan(Path(here.data.path)).pictures[0].caption
    raise UserError('--prompt: say what to draw, as in --prompt "a lighthouse at dusk"')
