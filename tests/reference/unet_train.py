"""The first steps of a U-Net's training run, computed without the package under test, in fp32 on the CPU.

Two implementations share diffusers' network, torch's AdamW and the plan of ``plan.py``:

- ``papers``: noise, target and loss from ``ddpm.py`` in float64, and LoRA by hand;
- ``dreambooth``: the step of diffusers' examples (train_dreambooth.py and train_dreambooth_lora.py, without
  accelerate): DDPMScheduler's add_noise and get_velocity, F.mse_loss, and LoRA by add_adapter.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, e the text's width, r the rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpm
import image_files
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from plan import MicroBatch, Settings, buckets, draw_dropped, draw_noise, micro_batches, stream
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

SIDE = 64  # buckets are multiples of it: the latent's 8 times three halvings
PLAN = {"sigma": "uniform", "shift": 1.0, "t5": False, "t5_length": 0}  # settings of SD3 only

Lora = Mapping[str, Tensor]  # <module>.lora_A.weight [r, in(, 1, 1)] and <module>.lora_B.weight [out, r(, 1, 1)]


@dataclass(frozen=True)
class Prepared:
    """The data of a run, encoded once."""

    z_0: list[Tensor]  # per sample [c, h, w]
    prompt_embeds: Tensor  # [samples + 1, 77, e]; the last row is the empty string
    steps: list[list[MicroBatch]]


@dataclass(frozen=True)
class Step:
    """One optimizer step, and the trained weights after it by their names in diffusers or in the LoRA."""

    loss: float
    norm: float
    weights: dict[str, Tensor]


@torch.no_grad()
def encode_prompts(pipeline: Path, captions: list[str]) -> Tensor:
    """CLIP's last hidden states after its final norm [captions, 77, e]; the padding is not masked."""
    tokenizer = CLIPTokenizer.from_pretrained(pipeline / "tokenizer")
    encoder = CLIPTextModel.from_pretrained(pipeline / "text_encoder", dtype=torch.float32).eval()
    length = tokenizer.model_max_length
    ids = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    return encoder(ids).last_hidden_state


def prepare(pipeline: Path, images: Sequence[tuple[Path, str]], settings: Settings) -> Prepared:
    """Sorts the pictures by path, encodes them and their captions, and lays out the steps."""
    samples = sorted((Path(path).absolute().as_posix(), caption) for path, caption in images)
    candidates = buckets(settings.resolution, settings.max_aspect, SIDE)
    members, z_0 = image_files.encode(pipeline, [Path(path) for path, _ in samples], candidates)
    prompt_embeds = encode_prompts(pipeline, [caption for _, caption in samples] + [""])
    return Prepared(z_0, prompt_embeds, micro_batches(settings, members))


def papers(scheduler: Mapping[str, Any], time: Tensor, z_0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """z_t and the target [b, c, h, w] from the papers' formulas."""
    objective = ddpm.Ddpm(ddpm.angles(scheduler)[time.numpy()], scheduler.get("prediction_type") == "v_prediction")
    wide = z_0.double().numpy(), noise.double().numpy()
    return torch.from_numpy(objective.noised(*wide)).float(), torch.from_numpy(objective.target(*wide)).float()


def dreambooth(scheduler: Mapping[str, Any], time: Tensor, z_0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """z_t and the target [b, c, h, w] as diffusers' examples make them."""
    noise_scheduler = DDPMScheduler.from_config(dict(scheduler))
    z_t = noise_scheduler.add_noise(z_0, noise, time)
    if noise_scheduler.config.prediction_type == "v_prediction":
        return z_t, noise_scheduler.get_velocity(z_0, noise, time)
    return z_t, noise


def add_lora(unet: UNet2DConditionModel, lora: Lora, scale: float) -> dict[str, Tensor]:
    """Adds ``scale`` B A x to the outputs of layers; 1x1 convolutions are products over channels."""
    own = {name: tensor.clone().requires_grad_() for name, tensor in lora.items()}

    def update(a: Tensor, b: Tensor) -> Callable[..., Tensor]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if isinstance(module, nn.Conv2d):
                return output + scale * torch.einsum("or,ri,bihw->bohw", b[..., 0, 0], a[..., 0, 0], inputs[0])
            return output + scale * (inputs[0] @ a.T @ b.T)

        return hook

    for module in {name.rsplit(".lora_", 1)[0] for name in own}:
        a, b = (own[f"{module}.lora_{side}.weight"] for side in "AB")
        unet.get_submodule(module).register_forward_hook(update(a, b))
    return own


def add_adapter(unet: UNet2DConditionModel, lora: Lora, alpha: float) -> dict[str, Tensor]:
    """As diffusers' example: peft's LoRA on named modules, here with given initial weights."""
    modules = sorted({name.rsplit(".lora_", 1)[0] for name in lora})
    rank = next(tensor.shape[0] for name, tensor in lora.items() if ".lora_A." in name)
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules))
    state = {name.replace(".weight", ".default.weight"): tensor for name, tensor in lora.items()}
    if unexpected := unet.load_state_dict(state, strict=False).unexpected_keys:
        raise ValueError(f"no layer of the U-Net takes {unexpected}")
    return {name.replace(".default", ""): p for name, p in unet.named_parameters() if p.requires_grad}


def run(
    pipeline: Path,
    images: Sequence[tuple[Path, str]],
    settings: Mapping[str, Any],
    lora: Lora | None = None,
    examples: bool = False,
) -> list[Step]:
    """Trains the U-Net of a folder in diffusers' layout.

    Args:
        pictures: (path, caption) of every picture, in any order.
        settings: the fields of `plan.Settings` without those of ``PLAN``.
        lora: its initial weights; None trains the whole U-Net.
        examples: follow diffusers' examples instead of the papers.
    """
    chosen = Settings(**settings, **PLAN)
    unet = UNet2DConditionModel.from_pretrained(pipeline / "unet", torch_dtype=torch.float32)
    scheduler = json.loads((pipeline / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    if lora is None:
        trained = dict(unet.named_parameters())
    else:
        unet.requires_grad_(False)
        rank = next(tensor.shape[0] for name, tensor in lora.items() if ".lora_A." in name)
        alpha = chosen.lora_alpha or rank
        trained = add_adapter(unet, lora, alpha) if examples else add_lora(unet, lora, alpha / rank)
    optimizer = torch.optim.AdamW(
        trained.values(), chosen.lr, chosen.betas, chosen.eps, weight_decay=chosen.weight_decay
    )
    data, done = prepare(pipeline, images, chosen), []
    for batches in data.steps:
        samples, total = sum(len(batch.samples) for batch in batches), 0.0
        for batch in batches:
            loss = loss_of(unet, data, chosen, batch, scheduler, examples) * len(batch.samples) / samples
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(list(trained.values()), chosen.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        done.append(Step(total, norm.item(), {name: tensor.detach().clone() for name, tensor in trained.items()}))
    return done


def loss_of(
    unet: UNet2DConditionModel,
    data: Prepared,
    settings: Settings,
    batch: MicroBatch,
    scheduler: Mapping[str, Any],
    examples: bool,
) -> Tensor:
    """The mean squared error of the network at uniform timesteps of the plan's draws."""
    places = [(batch.step, batch.micro, batch.first + number) for number in range(len(batch.samples))]
    z_0 = torch.stack([data.z_0[sample] for sample in batch.samples])
    noise = torch.stack([torch.from_numpy(draw_noise(settings, *place, tuple(z_0.shape[1:]))) for place in places])
    steps = scheduler["num_train_timesteps"]
    time = torch.tensor([int(stream(settings.seed, "sigma", *place).integers(0, steps)) for place in places])
    rows = [-1 if draw_dropped(settings, *place) else s for place, s in zip(places, batch.samples, strict=True)]
    z_t, target = (dreambooth if examples else papers)(scheduler, time, z_0, noise)
    prediction = unet(z_t, time, data.prompt_embeds[rows]).sample
    if examples:
        return F.mse_loss(prediction.float(), target.float(), reduction="mean")
    return (prediction - target).square().mean()
