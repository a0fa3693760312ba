"""``simpletune evaluate``: generate with every checkpoint from the same noise, embed, score, write the table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from simpletune import __version__
from simpletune.commands.evaluate.embed import embed
from simpletune.commands.evaluate.encoders import EncoderInfo, find_encoder
from simpletune.commands.evaluate.measure import measure
from simpletune.commands.evaluate.missing_images import FOLDER, IMAGES, Gallery, generate_missing
from simpletune.commands.evaluate.plan import FIRST_SEED, EvaluationPlan, evaluated_weights, real_images, shots_of
from simpletune.commands.evaluate.predict_stages import estimate_stages
from simpletune.commands.evaluate.prompt_sets import find_prompts, subject_words
from simpletune.commands.generate.generate import image_size
from simpletune.commands.generate.session import GenerationSession, given_arguments, open_session
from simpletune.data.demo import ENCODERS
from simpletune.estimate.job_estimate import MIB
from simpletune.runs.best_checkpoint import choose_best
from simpletune.runs.folder import SCORES
from simpletune.runs.report.evaluations import describe_scores
from simpletune.runs.weights_names import find_whole_run, run_config
from simpletune.stages.sample import ImageRequest
from simpletune.system.atomic import write_json
from simpletune.system.checksums import with_sum
from simpletune.system.console import say
from simpletune.system.locks import exclusive
from simpletune.system.options import Json, UserError, plural

VERSION = 1
SUBJECT, PROMPT = "subject_fidelity", "prompt_fidelity"
COLUMNS = (
    (SUBJECT, "subject"),
    (PROMPT, "prompt"),
    ("diversity", "diversity"),
    ("pres", "PRES"),
    ("copying", "copied"),
    ("cmmd", "CMMD"),
    ("kid", "KID"),
)
"""Scores in the table, with their headings."""


def evaluate(args: argparse.Namespace) -> Path:
    """Evaluate a run; continues from what an interrupted call has generated and embedded."""
    args.run = find_whole_run(str(args.evaluated), "all checkpoints of a run are evaluated together")
    encoders = encoders_of(run_config(args.run).is_demo, args.encoders)
    args.runs = args.model = args.no_t5 = None
    session = open_session(args)
    plan = plan_of(session, args)
    gallery = Gallery(args.run)
    gallery.folder.mkdir(exist_ok=True)
    with exclusive(gallery.folder, "wait for the other evaluation of this run"):
        not_generated = len(gallery.lacking(plan.keys.values()))
        say(
            f"evaluate {plural(len(plan.points), 'model')} x {plural(len(plan.shots), 'picture')} "
            f"({plan.prompts.name}), {not_generated} to draw, on {session.reason}"
        )
        stages = estimate_stages(plan, encoders, not_generated)
        if args.predict:
            return args.run / SCORES
        generated = generate_missing(plan, gallery)
        embedded = [embed(plan, gallery, about) for about in encoders]
        result = evaluation_record(plan, encoders, gallery)
        for entry, found in zip(result["points"], measure(plan, embedded).values(), strict=True):
            entry["scores"] = found
        result["cost"] = {  # a resumed call measures only its own part
            "drawn": generated,
            "predicted": {
                name: {"peak_mib": round(stage.bytes / MIB, 1), "seconds": round(stage.seconds, 1)}
                for name, stage in stages.items()
            },
            "measured": session.stages.as_json(),
        }
        write_json(args.run / SCORES, with_sum(result))
    say("\n".join(lines(result)))
    memory = f"; peak memory {session.memory()}" if session.stages.as_json() else ", nothing was left to compute"
    say(f"{args.run / SCORES}: every score with its interval{memory}")
    best = choose_best(args.run)
    if best is not None:
        say(f"best    {best.describe(args.run)}")
    return args.run / SCORES


def encoders_of(is_demo: bool, names: Sequence[str] | None) -> list[EncoderInfo]:
    """Find the encoders; for a run of the demo model, its own two by default."""
    if not names and not is_demo:
        raise UserError(
            "--encoders is missing. Name folders or hub names, such as facebook/dino-vits16 "
            "openai/clip-vit-large-patch14"
        )
    found = [find_encoder(name) for name in names or ENCODERS]
    titles = [about.title for about in found]
    double = next((title for title in titles if titles.count(title) > 1), None)
    if double is not None:
        raise UserError(f"--encoders: two are called {double}. Rename one folder, or leave one out")
    return found


def plan_of(session: GenerationSession, args: argparse.Namespace) -> EvaluationPlan:
    """Gather points, prompts, requests and real pictures."""
    config, option = session.config, session.config.validation
    real, everything = real_images(config, args.run)
    written = run_config(args.run)  # its data may be the demo's, by name
    words = subject_words(written, args.token, args.kind)
    prompts = find_prompts(args.prompts, written, words, [image.caption for image in real])
    width, height = image_size(config, args)
    asked, negative = given_arguments(args, "steps", "guidance"), config.model.text.steered_from(option.negative_prompt)
    first = ImageRequest(
        "",
        FIRST_SEED if args.seed is None else args.seed,
        negative,
        width,
        height,
        asked.get("steps", option.steps),
        asked.get("guidance", option.guidance),
    )
    shots = shots_of(first, prompts.prompts, args.seeds)
    return EvaluationPlan(
        session, tuple(evaluated_weights(args.run, args.strengths)), prompts, tuple(shots), tuple(real), everything
    )


def evaluation_record(plan: EvaluationPlan, encoders: Sequence[EncoderInfo], gallery: Gallery) -> Json:
    """Return everything in ``evaluation.json`` but scores and cost."""
    session, first = plan.session, plan.shots[0].request
    known = [
        {
            "title": about.title,
            "name": about.name,
            "kind": about.kind.name,
            "digest": about.digest,
            "parameters": about.parameters,
            "reads_prompts": about.kind.reads_prompts,
            "preprocessing": about.kind.about_preprocessing,
        }
        for about in encoders
    ]
    own = [number for number, shot in enumerate(plan.shots) if not shot.of_class]
    generated = {
        point: [f"{FOLDER}/{IMAGES}/{gallery.file(plan.keys[point, plan.shots[n]]).name}" for n in own]
        for point in plan.points
    }
    return {
        "version": VERSION,
        "simpletune": __version__,
        "prompts": {
            "slice": plan.prompts.name,
            "n": len(plan.prompts.prompts),
            "seeds": len(own) // len(plan.prompts.prompts),
            "texts": [prompt.text for prompt in plan.prompts.prompts],
            "scored": [prompt.scored for prompt in plan.prompts.prompts],
        },
        "drawing": {
            "width": first.width,
            "height": first.height,
            "steps": first.steps,
            "guidance": first.guidance,
            "first_seed": first.seed,
            "precision": session.config.precision.weights,
            "device": session.reason,
            **session.speed.lossy(),
        },
        "real": {"pictures": len(plan.real), "of": plan.all_real},
        "encoders": known,
        "main": main_encoders(known),
        "points": [
            {
                "title": point.title,
                "name": point.name(session.run),
                "step": point.step,
                "strength": point.strength,
                "pictures": generated[point],
            }
            for point in plan.points
        ],
    }


def main_encoders(encoders: Sequence[Json]) -> dict[str, str | None]:
    """Choose the encoder for each fidelity: for the subject, the first that reads only pictures, otherwise the first;
    for prompts, the first that reads prompts."""
    images = [each["title"] for each in encoders if not each["reads_prompts"]]
    prompts = [each["title"] for each in encoders if each["reads_prompts"]]
    return {SUBJECT: (images or prompts)[0], PROMPT: prompts[0] if prompts else None}


def lines(result: Json) -> list[str]:
    """Format one table for each encoder: value and half the width of its 95% interval (``0.712 ±0.021``), by point."""

    def cell(value: Json) -> str:
        shown = f"{value['value']:.3f}"
        return shown if value["low"] is None else f"{shown} ±{(value['high'] - value['low']) / 2:.3f}"

    found: list[str] = []
    for encoder in result["encoders"]:
        title = encoder["title"]
        shown = [(score, name) for score, name in COLUMNS if title in result["points"][0]["scores"].get(score, {})]
        width = max(len(point["title"]) for point in result["points"])
        found.append(f"{title} ({encoder['kind']}), {result['prompts']['slice']}")
        found.append(f"  {'':<{width}}" + "".join(f"{name:>16}" for _, name in shown))
        for point in result["points"]:
            cells = [cell(point["scores"][score][title]) for score, _ in shown]
            found.append(f"  {point['title']:<{width}}" + "".join(f"{each:>16}" for each in cells))
        counts = {name: result["points"][0]["scores"][score][title]["n"] for score, name in shown}
        found.append(f"  {'n':<{width}}" + "".join(f"{count:>16}" for count in counts.values()))
    named = [score for score, _ in COLUMNS if result["points"][0]["scores"].get(score)]
    found += [f"  {describe_scores([score])}" for score in named]
    return found
