"""A picture's way into latents against diffusers' own processor and autoencoders."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletune.data.sources.image_files import crop_to_bucket
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, load_autoencoder
from simpletune.models.shared.parts import Part
from simpletune.system.options import UserError

SIZES = [((96, 48), (48, 32)), ((50, 130), (40, 64)), ((64, 64), (64, 64)), ((31, 31), (64, 64))]


@pytest.mark.parametrize(("size", "bucket"), SIZES)
@pytest.mark.parametrize("kind", ["sd15", "sd3", pytest.param("taesd3", marks=pytest.mark.data)])
def test_latents_are_those_of_diffusers(
    kind: str, size: tuple[int, int], bucket: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(1)
    if kind == "taesd3":
        folder: Path = request.getfixturevalue("real_data") / "taesd3"
        vae = AutoencoderTiny.from_pretrained(folder).eval()
    else:
        shift = {"shift_factor": 0.0609, "scaling_factor": 1.5305, "latent_channels": 16} if kind == "sd3" else {}
        vae = AutoencoderKL(block_out_channels=(8,) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
                            up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=4,
                            **({"latent_channels": 4, "scaling_factor": 0.18215} | shift)).eval()  # fmt: skip
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    processor = VaeImageProcessor(vae_scale_factor=8, resample="lanczos")
    pixels = processor.preprocess(image, height=bucket[1], width=bucket[0], resize_mode="crop")
    own = torch.from_numpy(crop_to_bucket(image, bucket))[None]
    torch.testing.assert_close(own, pixels, rtol=0, atol=1e-6)
    with torch.no_grad():
        if kind == "taesd3":
            expected = vae.encode(pixels).latents
        else:
            mode = vae.encode(pixels).latent_dist.mode()
            expected = (mode - 0.0609) * 1.5305 if kind == "sd3" else mode * 0.18215
        torch.testing.assert_close(SD3().autoencoder.encode(vae, own), expected, rtol=1e-5, atol=1e-5)


def test_an_autoencoder_with_the_attention_names_of_older_diffusers_loads(tmp_path: Path) -> None:
    vae = AutoencoderKL(block_out_channels=[32] * 4, down_block_types=["DownEncoderBlock2D"] * 4,
                        up_block_types=["UpDecoderBlock2D"] * 4, norm_num_groups=4)  # fmt: skip
    vae.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = re.compile(rf"\.({'|'.join(old)})\.")
    names = {name: renamed.sub(lambda found: f".{old[found[1]]}.", name) for name in load_file(file)}
    assert sum(name != other for name, other in names.items()) == 16
    save_file({names[name]: tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    loaded = load_autoencoder(Part("vae", tmp_path), torch.float32, STABLE_DIFFUSION).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in vae.state_dict().items())
    save_file({name: tensor for name, tensor in load_file(file).items() if ".key." not in name}, file)
    with pytest.raises(UserError, match="configuration .*missing: decoder.mid_block.attentions.0.to_k"):
        load_autoencoder(Part("vae", tmp_path), torch.float32, STABLE_DIFFUSION)
