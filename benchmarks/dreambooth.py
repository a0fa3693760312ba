"""The baseline process of ``pair``: diffusers' DreamBooth LoRA recipe for SD3.

    python -m benchmarks.dreambooth PIPELINE PICTURES OUT --steps 20 --size 256

Load tokenizers, text encoders, autoencoder and transformer from a pipeline's folder, encode the one prompt, prepare the
pictures in memory, train with a TensorBoard log, save the LoRA, and load the pipeline with it: the example always does
the last two. ``--whole`` adds validation pictures after the first epoch and at the end, as in the command of its
documentation.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

UNLISTED = ("bitsandbytes", "optimum")  # not in the example's requirements, so its process does not import them
CLIP_TOKENS, T5_TOKENS = 77, 77
IMAGES = 4
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
SECONDS = "seconds.json"


def arguments() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = argparse.ArgumentParser(description="diffusers' DreamBooth LoRA recipe for SD3")
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--whole", action="store_true")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train; write beside the LoRA each step's loss and seconds, and the seconds after the LoRA was saved."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    from benchmarks.diffusers_training import DreamBooth

    project = ProjectConfiguration(project_dir=str(args.out), logging_dir=str(args.out / "logs"))
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="bf16", cpu=cpu, log_with="tensorboard", project_config=project)
    set_seed(0)
    prompt_embeds, pooled = embeddings(args.pipeline, args.prompt, accelerator.device)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(args.pipeline, subfolder="scheduler")
    vae = AutoencoderKL.from_pretrained(args.pipeline, subfolder="vae")
    transformer = SD3Transformer2DModel.from_pretrained(args.pipeline, subfolder="transformer")
    recipe = DreamBooth(transformer, vae, scheduler, accelerator, args.rank)
    dataset: Any = pixels(args.pictures, args.size)
    loader: Any = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=1, shuffle=True))
    accelerator.init_trackers("dreambooth-sd3-lora")
    seconds: list[float] = []
    losses: list[float] = []
    clock, epoch = time.perf_counter(), 0
    bar = tqdm(range(args.steps), desc="Steps")
    while len(losses) < args.steps:
        for batch in loader:
            loss = recipe.step(batch, prompt_embeds, pooled).item()
            accelerator.log({"loss": loss}, step=len(losses))
            bar.update(1)
            bar.set_postfix(loss=loss)
            losses.append(loss)
            seconds.append(time.perf_counter() - clock)
            clock = time.perf_counter()
            if len(losses) == args.steps:
                break
        if args.whole and epoch == 0:
            draw(args, accelerator, load(args, vae=vae, transformer=accelerator.unwrap_model(recipe.transformer)))
            clock = time.perf_counter()
        epoch += 1
    save(accelerator.unwrap_model(recipe.transformer), args.out)
    clock = time.perf_counter()
    pipe = load(args)
    pipe.load_lora_weights(args.out)
    if args.whole:
        draw(args, accelerator, pipe)
    found = {"seconds": seconds, "losses": losses, "after": time.perf_counter() - clock}
    accelerator.end_training()
    (args.out / SECONDS).write_text(json.dumps(found) + "\n", encoding="utf-8")


def embeddings(pipeline: Path, prompt: str, device: Any) -> tuple[Any, Any]:
    """Encode the prompt with the three text encoders in bf16, and free them.

    Returns:
        prompt_embeds [1, t, e] and pooled [1, p].
    """
    import torch
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

    states, pooled = [], []
    makers = [(CLIPTokenizer, CLIPTextModelWithProjection)] * 2 + [(T5TokenizerFast, T5EncoderModel)]
    loaded = []
    for suffix, (tokenizers, encoders) in zip(("", "_2", "_3"), makers, strict=True):
        tokenizer = tokenizers.from_pretrained(pipeline, subfolder=f"tokenizer{suffix}")
        encoder = encoders.from_pretrained(pipeline, subfolder=f"text_encoder{suffix}")
        loaded.append((tokenizer, encoder.requires_grad_(False).to(device, dtype=torch.bfloat16)))
    with torch.no_grad():
        for tokenizer, encoder in loaded[:2]:
            found = encoder(_tokens(tokenizer, prompt, CLIP_TOKENS).to(device), output_hidden_states=True)
            pooled.append(found[0])
            states.append(found.hidden_states[-2])
        tokenizer, encoder = loaded[2]
        t5 = encoder(_tokens(tokenizer, prompt, T5_TOKENS).to(device))[0]
    clip = torch.cat(states, dim=-1)
    clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    del loaded, tokenizer, encoder
    gc.collect()
    return torch.cat([clip, t5], dim=-2), torch.cat(pooled, dim=-1)


def _tokens(tokenizer: Any, prompt: str, length: int) -> Any:
    """Tokenize to [1, length], or fewer if a tiny encoder has fewer positions."""
    length = min(length, tokenizer.model_max_length)
    found = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return found.input_ids


def pixels(folder: Path, size: int) -> list[Any]:
    """Prepare all pictures once as [3, size, size] in -1..1: shorter side scaled to the size, random crop."""
    import numpy as np
    import torch
    from PIL import Image, ImageOps

    prepared = []
    for file in sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES):
        image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        scale = size / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
        left, top = (int(torch.randint(side - size + 1, ())) for side in image.size)
        cut = np.array(image.crop((left, top, left + size, top + size)))
        prepared.append(torch.from_numpy(cut).permute(2, 0, 1).float() / 127.5 - 1)
    return prepared


def save(transformer: Any, folder: Path) -> None:
    """Save the LoRA in fp32 with the pipeline's own function."""
    import torch
    from diffusers import StableDiffusion3Pipeline
    from peft.utils import get_peft_model_state_dict

    state = get_peft_model_state_dict(transformer.to(torch.float32))
    StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=state)


def load(args: argparse.Namespace, **parts: Any) -> Any:
    """Load the pipeline in bf16, reusing parts in memory."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(args.pipeline, torch_dtype=torch.bfloat16, **parts)


def draw(args: argparse.Namespace, accelerator: Any, pipe: Any) -> None:
    """Log validation pictures."""
    import numpy as np
    import torch

    pipe = pipe.to(accelerator.device)
    pipe.set_progress_bar_config(disable=True)
    with torch.autocast(accelerator.device.type, torch.bfloat16):
        images = [pipe(args.prompt).images[0] for _ in range(IMAGES)]
    for log in accelerator.trackers:
        log.writer.add_images("validation", np.stack([np.asarray(image) for image in images]), 0, dataformats="NHWC")


if __name__ == "__main__":
    for name in UNLISTED:
        sys.modules[name] = None  # type: ignore[assignment]
    main(arguments().parse_args())
