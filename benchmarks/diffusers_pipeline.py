"""The baseline of ``inference``: diffusers' own pipeline, used as in its documentation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simpletune.models.sd3.sd3_option import SD3
from simpletune.stages.sample import ImageRequest
from simpletune.system.options import UserError


class Plain:
    """``StableDiffusion3Pipeline`` with everything on the device.

    Args:
        model: with folders resolved; a folder in diffusers' layout.
        dtype: of all weights.
        device: to load onto.
        lora: a folder with a LoRA to load, or None.

    Raises:
        UserError: the model is not such a folder.
    """

    def __init__(self, model: SD3, dtype: torch.dtype, device: torch.device, lora: Path | None):
        from diffusers import StableDiffusion3Pipeline
        from diffusers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        folder = model.files.part("transformer").folder
        if folder is None or not (folder.parent / "model_index.json").exists():
            raise UserError(
                f"--model: {model.pretrained} is not a folder in diffusers' layout, which the baseline needs. "
                "Use a pipeline's folder or hub name"
            )
        self.pipe: Any = StableDiffusion3Pipeline.from_pretrained(folder.parent, dtype=dtype).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.length, self.device = model.t5_length, device
        if lora is not None:
            self.pipe.load_lora_weights(lora, weight_name="pytorch_lora_weights.safetensors")

    @torch.no_grad()
    def draw(self, request: ImageRequest) -> tuple[float, float, float, Tensor]:
        """Draw one picture like the pipeline's ``__call__``, and time its three parts.

        Returns:
            Seconds to encode, to denoise and to decode, and the latents [1, c, h, w].
        """
        clock = time.perf_counter()
        prompt, negative, pooled, negative_pooled = self.pipe.encode_prompt(
            request.prompt, None, None, negative_prompt=request.negative_prompt, max_sequence_length=self.length
        )
        self._finish()
        encoded = time.perf_counter()
        z = self.pipe(
            prompt_embeds=prompt, negative_prompt_embeds=negative, pooled_prompt_embeds=pooled,
            negative_pooled_prompt_embeds=negative_pooled, width=request.width, height=request.height,
            num_inference_steps=request.steps, guidance_scale=request.guidance, output_type="latent",
            generator=torch.Generator("cpu").manual_seed(request.seed),
        ).images  # fmt: skip
        self._finish()
        denoised = time.perf_counter()
        vae = self.pipe.vae
        pixels = vae.decode(z / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        self.pipe.image_processor.postprocess(pixels, output_type="pil")
        return encoded - clock, denoised - encoded, time.perf_counter() - denoised, z.float().cpu()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
