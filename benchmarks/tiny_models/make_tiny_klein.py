"""``make tiny-klein``: make the tiny FLUX.2 klein that ships with the tool.

The autoencoder is the tiny SD3's, whose layers klein's class has too, with the statistics of what it makes of the
demo's pictures. The Qwen3 is random: each word of the captions is one token, whose vector goes almost unchanged through
its layers, so there is nothing that training must teach it. The transformer is trained by ``simpletune train`` on
captioned pictures, and exported with them in half precision. Finished steps are skipped; an interrupted training
resumes.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tiny_models import make_tiny_sd3, networks, tiny_klein, tiny_sd3, train_autoencoder
from simpletune.data import demo
from simpletune.data.demo import demo_scenes
from simpletune.system.atomic import new_folder

if TYPE_CHECKING:
    from diffusers import AutoencoderKLFlux2

CONFIG = Path("configs/more/tiny_klein_from_scratch.json")
CARD = Path(__file__).with_name("tiny_klein_card.md")
IMAGES = 3_072
MEASURED = 1_024  # pictures whose latents' statistics the autoencoder gets
WORDS = ("user", "assistant", demo_scenes.STYLE_TRIGGER, demo_scenes.SUBJECT_TRIGGER)
WIDTH = 32  # of the Qwen3
TRANSFORMER: dict[str, Any] = {
    "in_channels": 64, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4,
    "joint_attention_dim": 3 * WIDTH, "axes_dims_rope": (8, 8, 8, 8),
}  # fmt: skip
"""A latent's place has the tiny autoencoder's 16 channels of 2 x 2 places."""


def assemble(folder: Path, source: Path, seed: int) -> None:
    """Put autoencoder, encoder and an untrained transformer into one pipeline folder, fp32.

    Args:
        folder: must not exist, or be empty.
        source: the tiny SD3's folder.
        seed: seed of the encoder and of the transformer's weights, which `init: random` ignores.
    """
    from diffusers import Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with new_folder(folder) as sibling:
        words = list(dict.fromkeys([*demo_scenes.words(), *WORDS]))
        tokens = tiny_klein.write_tokenizer(sibling / "tokenizer", words)
        with tiny_sd3.seeded(seed, 0):
            encoder = Qwen3ForCausalLM(Qwen3Config(**{**tiny_klein.QWEN, "vocab_size": tokens, "hidden_size": WIDTH}))
            encoder.model.embed_tokens.weight.data.normal_()  # beside which what the layers add is small
        tiny_sd3.save_model(encoder, sibling / "text_encoder", "fp32")
        tiny_sd3.save_model(autoencoder(source / "vae", seed), sibling / "vae", "fp32")
        with tiny_sd3.seeded(seed, 3):
            transformer = Flux2Transformer2DModel(**{**tiny_klein.TRANSFORMER, **TRANSFORMER})
        tiny_sd3.save_model(transformer, sibling / "transformer", "fp32")
        write_scheduler_and_index(sibling)


def autoencoder(source: Path, seed: int) -> AutoencoderKLFlux2:
    """Build klein's class of autoencoder from an SD3's folder, with the statistics of the demo's pictures."""
    import torch
    from diffusers import AutoencoderKL, AutoencoderKLFlux2
    from torch.nn.functional import pixel_unshuffle

    plain = AutoencoderKL.from_pretrained(source, local_files_only=True)
    shared = "down_block_types up_block_types block_out_channels layers_per_block latent_channels norm_num_groups "
    names = (shared + "use_quant_conv use_post_quant_conv sample_size").split()
    vae = AutoencoderKLFlux2(**{name: plain.config[name] for name in names}).eval()
    missing, unexpected = vae.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("bn.") for name in missing), (missing, unexpected)
    with torch.no_grad():
        pixels = train_autoencoder.render(MEASURED, seed=seed + 1).split(64)
        raw = torch.cat([vae.encode(train_autoencoder.to_unit(each)).latent_dist.mode() for each in pixels])
        vae.bn.running_var, vae.bn.running_mean = torch.var_mean(pixel_unshuffle(raw, 2), dim=(0, 2, 3))
    return vae


def write_scheduler_and_index(folder: Path) -> None:
    """As the tiny SD3's: shift 1, no shift, because 64 px are 16 tokens, far below the fewest that klein's is for."""
    tiny_klein.write_scheduler_and_index(folder, shift=1.0, use_dynamic_shifting=False)


def export(pipeline: Path, run: Path, folder: Path, dtype: networks.Dtype) -> None:
    """Write the trained pipeline in half precision, with its card and what its run left.

    Args:
        pipeline: the folder from ``assemble``.
        run: the training of the transformer.
        folder: folder to write; replaced if it exists.
        dtype: type of all weights.
    """
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3ForCausalLM

    models = {
        "transformer": Flux2Transformer2DModel.from_pretrained(run / "transformer", local_files_only=True),
        "vae": AutoencoderKLFlux2.from_pretrained(pipeline / "vae", local_files_only=True),
        "text_encoder": Qwen3ForCausalLM.from_pretrained(pipeline / "text_encoder", local_files_only=True),
    }
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as sibling:
        for name, model in models.items():
            tiny_sd3.save_model(model, sibling / name, dtype)
        shutil.copytree(pipeline / "tokenizer", sibling / "tokenizer")
        write_scheduler_and_index(sibling)
        make_tiny_sd3.write_record(sibling, CARD, CONFIG, run, "transformer", {})


def make(parts: Path, run: Path, folder: Path, overrides: list[str]) -> None:
    """Run every step that has not been completed yet.

    Args:
        parts: folder for the inputs of the training.
        run: the run's folder, as in the configuration.
        folder: for the result.
        overrides: ``key.path=value`` overrides, for a shorter trial.
    """
    if not (parts / "pipeline").exists():
        assemble(parts / "pipeline", demo.MODELS[demo.TINY_SD3], seed=0)
    if not (parts / "pictures").exists():
        make_tiny_sd3.write_images(parts / "pictures", IMAGES, seed=7)
    make_tiny_sd3.train(CONFIG, run, overrides)
    export(parts / "pipeline", run, folder, "fp16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the tiny FLUX.2 klein")
    parser.add_argument("--parts", type=Path, default=Path("runs/tiny-klein-parts"), help="folder for inputs")
    parser.add_argument("--run", type=Path, default=Path("runs/tiny-klein"), help="folder of the run")
    parser.add_argument("--out", type=Path, default=demo.MODELS[demo.TINY_KLEIN], help="folder for the result")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for a trial")
    arguments = parser.parse_args()
    make(arguments.parts, arguments.run, arguments.out, arguments.overrides)
