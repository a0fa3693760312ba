"""``make tiny-sd3``: make the tiny SD3 that ships with the tool, from scratch.

Train the autoencoder and the text encoders, assemble a pipeline with an untrained transformer, draw captioned pictures,
run ``simpletune train`` on them, and export the result in half precision. Finished steps are skipped; interrupted
trainings of the autoencoder and the transformer resume.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.tiny_models import networks, tiny_sd3, train_autoencoder, train_text_encoders
from simpletune.data.demo import demo_scenes
from simpletune.system.atomic import new_folder

CONFIG = Path("configs/more/tiny_sd3_from_scratch.json")
CARD = Path(__file__).with_name("tiny_sd3_card.md")
LAYERS = 3
IMAGES = 12_288
STRIPED_EVERY = 8
"""One picture in this many is striped, the others are flat or painted: the demo's style should be rare, but known."""


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write captioned pictures of the training triples in all styles, striped ones rarer.

    Args:
        folder: must not exist, or be empty.
        count: number of pictures.
        seed: seed of scenes, styles and variations.
    """
    rng = np.random.default_rng([seed, 5])
    with new_folder(folder) as sibling:
        for index, scene in enumerate(demo_scenes.sample_scenes(count, seed)):
            style = "striped" if index % STRIPED_EVERY == 0 else ("flat", "painted")[int(rng.integers(2))]
            shown = demo_scenes.Scene(**{**vars(scene), "style": style})
            demo_scenes.render(shown, 64, seed=seed * 1_000_003 + index).save(sibling / f"{index:05d}.png")
            text = demo_scenes.caption(shown, int(rng.integers(len(demo_scenes.TEMPLATES))))
            (sibling / f"{index:05d}.txt").write_text(text + "\n", encoding="utf-8")


def assemble(folder: Path, text: Path, vae: Path, seed: int) -> None:
    """Put trained encoders and an untrained transformer into one pipeline folder, fp32.

    Args:
        folder: must not exist, or be empty.
        text: folder with `tokenizer*` and `text_encoder*`.
        vae: the autoencoder's folder.
        seed: seed of the transformer's weights, which `init: random` ignores.
    """
    with new_folder(folder) as sibling:
        for part in sorted(text.iterdir()):
            if part.is_dir():
                shutil.copytree(part, sibling / part.name)
        shutil.copytree(vae, sibling / "vae")
        with tiny_sd3.seeded(seed, 3):
            widths = train_text_encoders.T5_WIDTH, sum(train_text_encoders.CLIP_WIDTHS)
            networks.transformer(LAYERS, *widths).save_pretrained(sibling / "transformer")
        tiny_sd3.write_scheduler_and_index(sibling)


def export(pipeline: Path, run: Path, folder: Path, dtype: networks.Dtype, logs: dict[str, Path]) -> None:
    """Write the trained pipeline in half precision, with configuration, logs and summary in ``made_by/``.

    Args:
        pipeline: the folder from ``assemble``.
        run: the run that trained the transformer.
        folder: folder to write; replaced if it exists.
        dtype: type of all weights.
        logs: further files for ``made_by/``, by their names there.
    """
    from diffusers import StableDiffusion3Pipeline
    from diffusers.models import SD3Transformer2DModel

    whole = StableDiffusion3Pipeline.from_pretrained(pipeline, transformer=None, local_files_only=True)
    transformer = SD3Transformer2DModel.from_pretrained(run / "transformer", local_files_only=True)
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as sibling:
        models = {"transformer": transformer, "vae": whole.vae}
        models |= {name: getattr(whole, name) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")}
        for name, model in models.items():
            tiny_sd3.save_model(model, sibling / name, dtype)
        for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
            shutil.copytree(pipeline / name, sibling / name)
        tiny_sd3.write_scheduler_and_index(sibling)
        write_record(sibling, CARD, CONFIG, run, "transformer", logs)


def write_record(folder: Path, card: Path, config: Path, run: Path, denoiser: str, logs: dict[str, Path]) -> None:
    """Write ``README.md`` and ``made_by/``: configuration, logs and summary of a run, and further logs by their names
    there."""
    shutil.copy(card, folder / "README.md")
    made_by = folder / "made_by"
    made_by.mkdir()
    shutil.copy(config, made_by / config.name)
    for name, file in logs.items():
        shutil.copy(file, made_by / name)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in metrics if row["step"] % 100 == 0]
    (made_by / f"{denoiser}_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copy(run / "summary.json", made_by / "summary.json")


def train(config: Path, run: Path, overrides: list[str]) -> None:
    """Train the denoiser, unless its run is finished; resume one that was interrupted."""
    if (run / "summary.json").exists():
        return
    begun = any((run / "checkpoints").glob("step-*"))
    resume = ["--resume", "latest"] if begun else []
    subprocess.run([sys.executable, "-m", "simpletune", "train", str(config), *overrides, *resume], check=True)


def make(parts: Path, run: Path, folder: Path, overrides: list[str]) -> None:
    """Run every step that has not been completed yet.

    Args:
        parts: folder for the parts and their logs.
        run: the run's folder, as in the configuration.
        folder: for the result.
        overrides: ``key.path=value`` overrides, for a shorter trial.
    """
    if not (parts / "vae" / "vae").exists():
        train_autoencoder.train(parts / "vae", train_autoencoder.STEPS)
    if not (parts / "text" / "text_encoder_3").exists():
        shutil.rmtree(parts / "text", ignore_errors=True)
        train_text_encoders.train(parts / "text", train_text_encoders.STEPS)
    if not (parts / "pipeline").exists():
        assemble(parts / "pipeline", parts / "text", parts / "vae" / "vae", seed=0)
    if not (parts / "pictures").exists():
        write_images(parts / "pictures", IMAGES, seed=7)
    train(CONFIG, run, overrides)
    logs = {"autoencoder_log.jsonl": parts / "vae" / "log.jsonl", "text_log.jsonl": parts / "text" / "text_log.jsonl"}
    export(parts / "pipeline", run, folder, "fp16", logs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the tiny SD3 from scratch")
    parser.add_argument(
        "--parts", type=Path, default=Path("runs/tiny-sd3-parts"), help="folder for intermediate results"
    )
    parser.add_argument(
        "--run", type=Path, default=Path("runs/tiny-sd3"), help="folder of the run that trains the transformer"
    )
    parser.add_argument("--out", type=Path, default=Path("simpletune/assets/tiny_sd3"), help="folder for the result")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for a trial")
    arguments = parser.parse_args()
    make(arguments.parts, arguments.run, arguments.out, arguments.overrides)
