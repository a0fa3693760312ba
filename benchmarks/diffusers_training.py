"""The training baseline: SD3 trained as in diffusers' two DreamBooth examples.

It reproduces ``examples/dreambooth/train_dreambooth_lora_sd3.py`` and ``train_dreambooth_sd3.py`` of diffusers with
their defaults and ``--mixed_precision bf16`` (docs/explanation/measurements.md). It imports nothing from simpletune, so
that simpletune adds nothing to its start-up time.

Shapes: b samples, c latent channels, h and w an eighth of the picture's, t text tokens, e and p the text's widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from peft import LoraConfig
from torch import Tensor
from torch.profiler import record_function

TARGETS = [
    "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
    "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
]  # fmt: skip
AUTOENCODER = "autoencoder"
"""Name of the profiler range around the encoding of pictures."""


@dataclass(frozen=True)
class Flags:
    """Flags of the examples' command line.

    Args:
        checkpointing: ``--gradient_checkpointing``.
        precondition: ``--precondition_outputs``: turn the model's output into an estimate of z_0.
        lr: ``--learning_rate`` of AdamW.
    """

    checkpointing: bool = False
    precondition: bool = True
    lr: float = 1e-4


class DreamBooth:
    """A model trained as in the examples.

    Args:
        transformer: SD3Transformer2DModel.
        vae: AutoencoderKL; stays in fp32 and encodes every batch, without a cache.
        scheduler: FlowMatchEulerDiscreteScheduler.
        accelerator: with device and mixed precision.
        rank: of the LoRA; None: train all weights, in fp32 under autocast.
        flags: of the examples' command line.
    """

    def __init__(
        self,
        transformer: Any,
        vae: Any,
        scheduler: Any,
        accelerator: Accelerator,
        rank: int | None = 16,
        flags: Flags = Flags(),
    ):
        self.vae, self.scheduler, self.accelerator = vae, scheduler, accelerator
        self.precondition = flags.precondition
        self.dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        vae.requires_grad_(False).to(accelerator.device, dtype=torch.float32)
        transformer.requires_grad_(rank is None)
        transformer.to(accelerator.device, dtype=torch.float32 if rank is None else self.dtype)
        if flags.checkpointing:
            transformer.enable_gradient_checkpointing()
        if rank is not None:
            lora = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=TARGETS)
            transformer.add_adapter(lora)
        self.parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(self.parameters, lr=flags.lr, betas=(0.9, 0.999), weight_decay=1e-4, eps=1e-8)
        schedule = get_scheduler("constant", optimizer=optimizer)
        self.transformer, self.optimizer, self.schedule = accelerator.prepare(transformer, optimizer, schedule)
        self.transformer.train()

    def step(self, pixels: Tensor, prompt_embeds: Tensor, pooled: Tensor) -> Tensor:
        """Take one step.

        Args:
            pixels: [b, 3, 8h, 8w] in -1..1.
            prompt_embeds: [b, t, e].
            pooled: [b, p].

        Returns:
            The loss, on the device.
        """
        with self.accelerator.accumulate([self.transformer]):
            z_0 = self.encode(pixels)
            draws = compute_density_for_timestep_sampling("logit_normal", len(z_0), 0.0, 1.0, 1.29)
            indices = (draws * self.scheduler.config.num_train_timesteps).long()
            loss = self.loss(z_0, torch.randn_like(z_0), indices, prompt_embeds, pooled)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pictures [b, 3, 8h, 8w] to latents [b, c, h, w] sampled from the posterior."""
        with record_function(AUTOENCODER):
            z_0 = self.vae.encode(pixels.to(dtype=self.vae.dtype)).latent_dist.sample()
            z_0 = (z_0 - self.vae.config.shift_factor) * self.vae.config.scaling_factor
            return z_0.to(dtype=self.dtype)

    def loss(
        self,
        z_0: Tensor,  # [b, c, h, w]
        noise: Tensor,  # [b, c, h, w]
        indices: Tensor,  # [b], into the scheduler's timesteps
        prompt_embeds: Tensor,  # [b, t, e]
        pooled: Tensor,  # [b, p]
    ) -> Tensor:
        """Return the mean squared error; preconditioned (arXiv:2206.00364, section 5), sigma^2 times the velocity's."""
        timesteps = self.scheduler.timesteps[indices].to(device=z_0.device)
        sigmas = self.sigmas(timesteps, z_0)
        noisy = (1.0 - sigmas) * z_0 + sigmas * noise
        predicted = self.transformer(
            hidden_states=noisy, timestep=timesteps, encoder_hidden_states=prompt_embeds, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip
        if self.precondition:
            predicted = predicted * (-sigmas) + noisy
        target = z_0 if self.precondition else noise - z_0
        weights = compute_loss_weighting_for_sd3("logit_normal", sigmas=sigmas).float()
        error = weights * (predicted.float() - target.float()) ** 2
        return error.reshape(len(error), -1).mean(1).mean()

    def sigmas(self, timesteps: Tensor, like: Tensor) -> Tensor:
        """Look up the noise levels [b, 1, 1, 1] of timesteps in the scheduler's table."""
        table = self.scheduler.timesteps.to(like.device)
        found = [(table == timestep).nonzero().item() for timestep in timesteps]
        return self.scheduler.sigmas.to(like.device, like.dtype)[found].view(-1, 1, 1, 1)
