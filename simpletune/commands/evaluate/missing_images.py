"""Generate the missing pictures of an evaluation one by one; each is stored as soon as it is made."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from PIL import Image

from simpletune.commands.evaluate.plan import EvaluatedWeights, EvaluationPlan, Shot
from simpletune.commands.generate.generate import image_metadata, say_what_is_painted
from simpletune.data.storage.cache import FileCache
from simpletune.runs.weights import Weights
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.png import save_png
from simpletune.stages.sample import decode
from simpletune.system.atomic import atomic_file, quarantine
from simpletune.system.console import progress, say
from simpletune.system.options import UserError, plural

FOLDER, IMAGES, LATENTS = "evaluation", "pictures", "latents"


class Gallery:
    """Pictures of a run's evaluations: ``RUN/evaluation/pictures/KEY.png``."""

    def __init__(self, run: Path):
        self.folder = run / FOLDER
        self.latents = FileCache(self.folder / LATENTS)

    def file(self, key: str) -> Path:
        return self.folder / IMAGES / f"{key}.png"

    def lacking(self, keys: Iterable[str]) -> list[str]:
        """List the pictures that are still to be generated. Renames and reports damaged ones."""
        missing = []
        for key in dict.fromkeys(keys):
            if self.read(key) is not None:
                continue
            missing.append(key)
            if (file := self.file(key)).exists():
                say(f"picture {file} is damaged: renamed to {quarantine(file).name}; drawing it again")
        return missing

    def read(self, key: str) -> Image.Image | None:
        """Read a picture; None if it is missing or damaged."""
        try:
            with Image.open(BytesIO(self.file(key).read_bytes())) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError):
            return None

    def open(self, key: str) -> Image.Image:
        """Read a picture that must be there."""
        image = self.read(key)
        if image is None:
            raise UserError(f"{self.file(key)} is missing or damaged. Start again: only this picture is drawn again")
        return image


def generate_missing(plan: EvaluationPlan, gallery: Gallery) -> int:
    """Generate what is missing: first all latents, each stored at once, then the pictures. Text encoders, denoiser and
    autoencoder are never in memory together."""
    keys = {key: (point, shot) for (point, shot), key in plan.keys.items()}
    missing = gallery.lacking(keys)
    if not missing:
        return 0
    not_generated = set(gallery.latents.lacking(missing))
    if not_generated:
        generate_latents(plan, gallery, not_generated)
    session = plan.session
    with session.stages.stage("decode"), progress("decode", len(missing), "pictures") as advance:
        vae = session.autoencoder()
        for key in missing:
            point, shot = keys[key]
            (image,) = decode(vae, session.config.model, [gallery.latents.load(key)["z"]])
            gallery.file(key).parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(gallery.file(key)) as part:
                save_png(image, part, shot.request, **image_metadata(session, point.weights))
            gallery.latents.file(key).unlink()
            advance()
        del vae
    free_memory(session.device)
    return len(missing)


def generate_latents(plan: EvaluationPlan, gallery: Gallery, not_generated: set[str]) -> None:
    """Generate latents with every point's weights; a base is loaded once for all its LoRAs."""
    session = plan.session
    points: dict[Weights, EvaluatedWeights] = {}
    wanted: dict[Weights, list[list[Shot]]] = {}
    for point in plan.points:
        groups = [group for group in plan.groups() if any(plan.keys[point, shot] in not_generated for shot in group)]
        if groups:
            points[point.weights], wanted[point.weights] = point, groups
    asked = {tuple(group): [shot.request for shot in group] for groups in wanted.values() for group in groups}
    requests = {weights: [asked[tuple(group)] for group in groups] for weights, groups in wanted.items()}
    every = [request for groups in requests.values() for group in groups for request in group]
    prompts = [text for each in every for text in each.texts]
    texts = session.encode_prompts(list(points), prompts)
    say(f"draw    {plural(len(every), 'picture')} by {plural(len(wanted), 'model')}")
    if every:
        say_what_is_painted(session, every[0])
    with progress("draw", len(every), "pictures") as advance:
        for weights, number, latents, _ in session.generate_latents(requests, texts):
            for shot, z in zip(wanted[weights][number], latents, strict=True):
                gallery.latents.save(plan.keys[points[weights], shot], {"z": z})
                advance()
