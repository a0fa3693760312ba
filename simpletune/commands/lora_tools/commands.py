"""What ``simpletune lora`` writes, LoRA files or merged models: export, merge, mix, extract, resize."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.files.header import EMBEDDED, LISTED, OBJECTIVE, LoraHeader, objectives_of, open_lora
from simpletune.commands.lora_tools.metadata import (
    SAID,
    base_fields,
    foreign_fields,
    header_of,
    shared_fields,
    source_note,
)
from simpletune.config.load import read_saved
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.models.families import denoiser_in
from simpletune.models.lora_registry import family_of_names, is_convolution
from simpletune.models.shared.family import Family
from simpletune.models.shared.lora_layout import Layout, LoraNames
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.text_layers import encoders_in, split_text, style_of
from simpletune.runs.folder import CONFIG, SUMMARY, read_json_or_none
from simpletune.runs.outputs import require_new
from simpletune.runs.weights_names import find_lora, is_run, run_config
from simpletune.system.console import progress, say
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.startup import import_libraries

if TYPE_CHECKING:
    from simpletune.adapters.files.base_reader import BaseReader
    from simpletune.adapters.files.updates import Updates
    from simpletune.runs.stack import Stack

A1111 = "a1111"  # format of hypernetworks
LAYOUT_NAMES = ("diffusers", "kohya", "onetrainer", "comfy")  # formats of LoRA


@dataclass(frozen=True)
class NamedLora:
    """The LoRA that a command names: a file, a run, one of its checkpoints, or a name on the hub."""

    file: Path
    run: Path | None  # that made it, if the name was a run
    weight: float = 1.0  # strength
    step: int | None = None  # step of the run's checkpoint; None for the run's result

    def config(self, metadata: Mapping[str, str]) -> TrainConfig | None:
        """Return the configuration that made the LoRA: the run's, else the one in the file's header, else None."""
        text: str | bytes | None = metadata.get(EMBEDDED)
        if self.run is not None and (self.run / CONFIG).is_file():
            text = (self.run / CONFIG).read_bytes()
        if text is None:
            return None
        try:
            return read_saved(text)
        except ValueError:
            say("this LoRA's configuration is from another version of simpletune: the header omits details of the run")
            return None

    @property
    def name(self) -> str:
        """The run's or the file's name, without a path."""
        return self.title if self.run else self.file.name

    @property
    def title(self) -> str:
        """A short name: the run's, with the checkpoint's step, or the file's."""
        at = f"-step-{self.step}" if self.step is not None else ""
        return f"{self.run.resolve().name}{at}" if self.run else self.file.stem

    @property
    def steps(self) -> int | None:
        """Number of training steps, if known."""
        summary = read_json_or_none(self.run / SUMMARY) if self.run else None
        return self.step if self.step is not None else summary["steps"] if summary else None


def named_lora(text: str, strength: bool = False) -> NamedLora:
    """Find a LoRA by file, run, checkpoint or hub name."""
    remedy = "Extract a LoRA from its difference from the base: simpletune lora extract BASE TUNED"
    named = find_lora(text, remedy=remedy, strength=strength)
    assert named.lora is not None
    return NamedLora(named.lora, named.run, 1.0 if named.scale is None else named.scale, named.step)


def export(args: argparse.Namespace) -> Path:
    """Write a LoRA in another layout; LoKr and LoHa on request approximated by LoRA."""
    from simpletune.adapters.files.factors import resize_all
    from simpletune.adapters.files.read import read_lora
    from simpletune.adapters.files.updates import LoraUpdate

    source = named_lora(args.lora)
    if args.format == A1111:
        return export_hypernetwork(source, args)
    header = open_lora(source.file)
    out = args.out or (source.run or source.file.parent) / f"{source.title}_{args.format}.safetensors"
    refuse_same(out, source.file)
    require_new(out, args.overwrite)
    updates: Updates = read_lora(header)
    lost = None
    if args.rank is not None or args.energy is not None:
        require_rank_or_energy(args)
        if args.format == "lycoris":
            raise UserError("--format lycoris writes LoKr and LoHa as they are. Leave out --rank and --energy")
        if all(isinstance(update, LoraUpdate) for update in updates.values()):
            raise UserError(
                "--rank and --energy approximate LoKr and LoHa; this file is LoRA. Use simpletune lora resize"
            )
        updates, lost = resize_all(updates, args.rank, args.energy)
    config = source.config(header.metadata)
    names = names_of_run(config, header)
    require_suited(source, config, args.format)
    metadata = base_fields(header) | header_of(updates, out.stem, config, source.steps, names)
    said = {name: value for name in SAID if (value := getattr(args, name, None)) is not None}
    metadata |= shared_fields(source.run, source.step, header.metadata, said)
    kept, left_out = kept_fields(source, header, metadata)
    metadata |= kept
    if not getattr(args, "thumbnail", True):
        metadata.pop("modelspec.thumbnail", None)
    written = write_lora_file(updates, out, args, metadata, names, usual_layout(names, header))
    say_rest(header, kept, left_out)
    if lost is not None:
        kinds = " and ".join(header.named_kinds)
        say(f"  LoRA of rank {ranks_of(updates)} for {kinds}: residual {lost:.3%} of the update (Frobenius norm)")
    return written


def export_hypernetwork(source: NamedLora, args: argparse.Namespace) -> Path:
    """Write a hypernetwork in the form of AUTOMATIC1111's web UI."""
    from simpletune.adapters.files.attach import holds_hypernetwork
    from simpletune.adapters.methods.hypernetwork_files import read_hypernetwork, write_a1111
    from simpletune.runs.model_card import public_name

    if not holds_hypernetwork(source.file):
        raise UserError(
            f"--format {args.format} writes hypernetworks, and {source.file} is not one. The web UI reads LoRA in "
            "kohya's layout: use --format kohya"
        )
    unfit = [name for name in ("rank", "energy", "dtype", *SAID[1:]) if getattr(args, name, None) is not None]
    if unfit:
        raise UserError(f"--{unfit[0]}: the web UI's form of a hypernetwork has no place for it. Leave it out")
    out = args.out or (source.run or source.file.parent) / f"{source.title}_{args.format}.pt"
    if out.suffix != ".pt":
        raise UserError(f"--out: {out} does not end in .pt, the only files that the web UI looks for. Use a .pt name")
    require_new(out, args.overwrite)
    found = read_hypernetwork(source.file)
    config = source.config(found.metadata)
    base = None if config is None else public_name(config.model.files.weights_from)
    written = write_a1111(found, out, getattr(args, "title", None) or out.stem, source.steps, base)
    say(f"{written}: {args.format}, {plural(len(found.tensors), 'tensor')}, {written.stat().st_size / 2**20:.1f} MiB. "
        "It is a pickle file of plain tensors, which simpletune itself does not read")  # fmt: skip
    return written


def resize(args: argparse.Namespace) -> Path:
    from simpletune.adapters.files.factors import resize_all
    from simpletune.adapters.files.read import read_lora

    require_rank_or_energy(args)
    source = named_lora(args.lora)
    refuse_same(args.out, source.file)
    require_new(args.out, args.overwrite)
    header = open_lora(source.file)
    old = read_lora(header)
    if args.conv_rank and not any(update.is_spatial for update in old.values()):
        raise UserError("--conv-rank: this LoRA updates no convolution larger than 1x1. Leave it out")
    new, lost = resize_all(old, args.rank, args.energy, args.conv_rank)
    details = {"lora": source.file.name, "rank": args.rank, "energy": args.energy}
    note = source_note("resize", details | ({"conv_rank": args.conv_rank} if args.conv_rank else {}))
    config = source.config(header.metadata)
    names = names_of_run(config, header)
    require_suited(source, config, args.format)
    metadata = base_fields(header) | header_of(new, args.out.stem, config, source.steps, names) | note
    kept, left_out = kept_fields(source, header, metadata)
    style = None if header.modules else style_of(header.text[0])
    written = write_lora_file(new, args.out, args, {**metadata, **kept}, names, usual_layout(names, header), style)
    say_rest(header, kept, left_out)
    say(f"  rank {ranks_of(old)} before, {ranks_of(new)} now; lost {lost:.3%} of the update (Frobenius norm)")
    return written


def mix(args: argparse.Namespace) -> Path:
    from simpletune.adapters.files.mix import PRUNING, Recipe
    from simpletune.adapters.files.mix import mix as mixed
    from simpletune.adapters.files.read import read_lora
    from simpletune.adapters.files.write import names_in

    sources = [named_lora(text, strength=True) for text in args.loras]
    if len(sources) < 2:
        raise UserError("mix needs at least two LoRAs, as in: simpletune lora mix a.safetensors:0.7 b.safetensors:0.5")
    if args.rank and not args.method.endswith("svd"):
        raise UserError(
            f"--rank applies to methods that end in svd, not to {args.method}. Use simpletune lora resize instead"
        )
    for source in sources:
        refuse_same(args.out, source.file)
    require_new(args.out, args.overwrite)
    if args.method in PRUNING:
        import_libraries()  # PEFT
    recipe = Recipe(args.method, args.rank, args.density, args.seed)
    updates = mixed([(read_lora(source.file), source.weight) for source in sources], recipe)
    parts = [(source.name, source.weight) for source in sources]
    details = {"loras": parts, "method": args.method}
    details |= {"density": args.density, "seed": args.seed} if args.method in PRUNING else {}
    headers = [open_lora(source.file) for source in sources]
    names = names_of_sources(sources, headers) or names_in(updates)
    metadata = base_fields(headers[0]) | header_of(updates, args.out.stem, None, None, names)
    objectives = objectives_of(headers)
    if len(objectives) == 1 and all(OBJECTIVE in header.metadata for header in headers):
        metadata[OBJECTIVE] = next(iter(objectives))
    layouts = [usual_layout(names, header) for header in headers]
    usual = next((each for each in layouts if each is not None and not each.original), layouts[0])
    style = None if any(header.modules for header in headers) else style_of(headers[0].text[0])
    written = write_lora_file(updates, args.out, args, metadata | source_note("mix", details), names, usual, style)
    for header in headers:
        say_rest(header, {}, [*foreign_fields(header.metadata, metadata)[0]])
    say_objectives(objectives)
    summed = " + ".join(f"{weight:g} {name}" for name, weight in parts)
    say(f"  {summed} by {args.method}: rank {ranks_of(updates)}")
    return written


def merge(args: argparse.Namespace) -> Path:
    from simpletune.adapters.files.base_reader import BaseReader
    from simpletune.adapters.files.describe import format_strengths, oft_strengths
    from simpletune.adapters.files.merge import Merger
    from simpletune.adapters.files.read import read_lora

    sources = [named_lora(text, strength=True) for text in args.loras]
    single = args.format == "single-file" or (args.format is None and args.out.suffix == ".safetensors")
    if single and args.out.suffix != ".safetensors":
        raise UserError(
            f"--out: {args.out} does not end in .safetensors. Name a .safetensors file, or use --format diffusers"
        )
    if not single and args.out.suffix == ".safetensors":
        raise UserError(f"--out: {args.out} names a file, but --format diffusers writes a folder. Name a folder")
    base, under = full_result(args.base) or BaseReader(args.base or base_name(sources)), list[tuple[str, float]]()
    if not args.base and (stack := stack_of(sources[0])) is not None:
        base.tensors = stack.merger(BaseReader(base.name))
        under = [(each["name"], each["scale"]) for each in stack.about]
    if single and base.rest is not None:
        refuse_same(args.out, base.rest)
    require_new(args.out, args.overwrite, folder=not single)
    headers = [open_lora(source.file) for source in sources]
    loras = [(read_lora(header), source.weight * args.scale) for header, source in zip(headers, sources, strict=True)]
    left_out = sorted({name for updates, _ in loras for name in split_text(updates)[1]}) if args.denoiser_only else []
    if args.denoiser_only:
        loras = [(split_text(updates)[0], weight) for updates, weight in loras]
    merger = Merger(base, loras, args.dtype)
    parts = [*under, *((source.name, source.weight * args.scale) for source in sources)]
    note = source_note("merge", {"base": Path(base.name).name, "loras": parts})
    with progress("merge", len(base.shapes), "tensors") as advance:
        (merger.write_file if single else merger.write_folder)(args.out, note, advance)
    summed = ", ".join(f"{weight:g} x {name}" for name, weight in parts)
    say(f"{args.out}: {base.name}{f' with {summed}' if summed else ''}")
    types = ", ".join(sorted({merger.kind(name) for name in base.shapes}))
    own = base.family.lora[0].names.encoders
    if merger.text:
        say(f"  with the updates of {encoders_in(merger.text, own)}: {plural(len(merger.text), 'layer')}")
    if left_out:
        count = plural(len(left_out), "layer")
        say(f"  without the updates of {encoders_in(left_out, own)}: {count} (--denoiser-only)")
    for header in headers:
        say_rest(header, {}, [])
        if strengths := oft_strengths(header):
            say(f"  {header.file.name}: {format_strengths(strengths)}")
    say_objectives(objectives_of(headers), base.name, full_objective(args.base))
    changed = plural(len(merger.changed), "layer")
    say(f"  changed {changed}, written in {types}; rounding lost {merger.lost:.2%} of the update")
    return args.out


def extract(args: argparse.Namespace) -> Path:
    import torch

    from simpletune.adapters.files.base_reader import BaseReader
    from simpletune.adapters.files.extract import extract as extracted

    require_rank_or_energy(args, both=True)
    require_new(args.out, args.overwrite)
    base, tuned = BaseReader(args.base), BaseReader(args.tuned)
    if args.conv_rank and base.family.lora[0].names.convolutions is None:
        raise UserError(f"--conv-rank: {base.name} has no convolutions that a LoRA can update. Leave it out")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with progress("extract", len(base.shapes), "tensors") as advance:
        found = extracted(base, tuned, args.rank, args.energy, device, advance, args.conv_rank)
    details = {"base": Path(base.name).name, "tuned": Path(tuned.name).name, "rank": args.rank, "energy": args.energy}
    note = source_note("extract", details | ({"conv_rank": args.conv_rank} if args.conv_rank else {}))
    own = base.family.lora[0].names
    metadata = header_of(found.updates, args.out.stem, None, None, own)
    usual = suited_layout(base.family, base.config, args.format)
    written = write_lora_file(found.updates, args.out, args, metadata | note, own, usual)
    for row in sorted(found.rows, key=lambda row: -row.residual):
        say(f"  {row.layer}: rank {row.rank}, residual {row.relative:.3%} of {row.norm:.4g}")
    say(
        f"  total of {plural(len(found.rows), 'layer')}: residual {found.relative:.3%} of the difference "
        "(Frobenius norm)"
    )
    if found.left_out:
        names = sorted(found.left_out, key=lambda name: -found.left_out[name])
        others = sum(norm**2 for norm in found.left_out.values())
        share = (others / (others + sum(row.norm**2 for row in found.rows))) ** 0.5
        spatial = args.conv_rank is None and any(is_convolution(name.removesuffix(".weight")) for name in names)
        why = "" if spatial else " that a LoRA cannot represent"
        say(f"  left out {len(names)} tensors{why} ({share:.3%} of the difference): {join_names(names)}")
        if spatial:
            say("  give --conv-rank, such as --conv-rank 8, for the convolutions among them")
    return written


def names_of_run(config: TrainConfig | None, header: LoraHeader) -> LoraNames | None:
    """Return the LoRA names of the family that a file is for: of its run, else as the file shows; None if it shows
    none."""
    if config is not None:
        return config.model.lora[0].names
    return None if header.layout is None else header.layout.names


def names_of_sources(sources: Sequence[NamedLora], headers: Sequence[LoraHeader]) -> LoraNames | None:
    """Return the LoRA names of the family that files are for; None if no file shows one. Raises UserError if they are
    for several."""
    found: dict[LoraNames, str] = {}
    for source, header in zip(sources, headers, strict=True):
        config = source.config(header.metadata)
        names = names_of_run(config, header)
        if names is not None and (config is not None or len(header.family.names) == 1):
            found.setdefault(names, source.name)
    if len(found) > 1:
        listed = ", ".join(f"{name} for {names.title}" for names, name in found.items())
        raise UserError(f"a LoRA is for one model, but these are for several: {listed}. Use LoRAs for the same model")
    return next(iter(found), None)


def usual_layout(names: LoraNames | None, header: LoraHeader) -> Layout | None:
    """Return the layout of a file that is made from another one, unless the user wants one: that of a run's result; but
    the other file's, if that has diffusers' names and the result original ones, which may be other layers' in its
    model."""
    if names is None:
        return None
    layouts, own = family_of_names(names).lora, header.layout
    if own is None or own not in layouts or own.original or own.name not in LAYOUT_NAMES:
        return layouts[0]
    return own if layouts[0].original else layouts[0]


def require_suited(source: NamedLora, config: TrainConfig | None, wanted: str | None) -> None:
    """Check that ``suited_layout`` accepts the wanted layout, for a run whose model is there; nothing shows the model
    of another file. Raises UserError if it does not."""
    if source.run is None or config is None:
        return
    try:
        known = resolve_model_folder(config).model.files.denoiser_config(fetch=False)
    except UserError:  # a result is written without its base, too
        return
    if known is not None:
        suited_layout(config.model, known, wanted)


def suited_layout(family: Family, config: ModelConfig, wanted: str | None = None) -> Layout:
    """Return the layout of a run's result on a model of this configuration. Raises UserError if the wanted one has
    original names that are those of other layers in the published models."""
    suited = [each for each in family.lora if not each.original or each.names.suits(config)]
    if any(each.name == wanted for each in family.lora if each not in suited):
        raise UserError(
            f"--format {wanted}: its names have the published models' numbers of blocks, and this model's blocks are "
            f"numbered otherwise. Use --format {' or '.join(each.name for each in suited if each.name in LAYOUT_NAMES)}"
        )
    return suited[0]


def write_lora_file(
    updates: Updates,
    out: Path,
    args: argparse.Namespace,
    metadata: Mapping[str, str],
    names: LoraNames | None,
    default: Layout | None,
    style: str | None = None,
) -> Path:
    """Write a LoRA file of a family, if that is known, and describe it. ``default``: the layout without --format;
    ``style``: the layout without either, of text encoders' keys alone."""
    from simpletune.adapters.files.write import is_single_encoder, write_lora

    layouts = () if names is None else family_of_names(names).lora
    usual = "kohya" if is_single_encoder(updates, metadata, names) else "diffusers"
    layout = args.format or style or (default.name if default is not None else usual)
    kohya = next((each for each in layouts if each.name == "kohya"), None)
    if layout == "comfy" and (usual == "kohya" if names is None else kohya is not None and not kohya.original):
        layout = "kohya"  # kohya's scripts train diffusers' model, and ComfyUI loads those names
    if layout == "onetrainer" and kohya is not None and layout not in (each.name for each in layouts):
        layout = "kohya"  # the same names
    written = write_lora(updates, out, layout, args.dtype, metadata, names)
    size = written.stat().st_size / 2**20
    say(f"{written}: {layout}, {plural(len(updates), 'layer')}, rank {ranks_of(updates)}, {size:.1f} MiB")
    return written


def kept_fields(
    source: NamedLora, header: LoraHeader, written: Mapping[str, str]
) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return ``foreign_fields`` of a file; none of a run's own, whose configuration the header is written from."""
    return foreign_fields(header.metadata, written) if source.run is None else ({}, [])


def say_rest(header: LoraHeader, kept: Mapping[str, str], left_out: Sequence[str]) -> None:
    """Say what becomes of a file's parts that are no updates: its header's fields, and embeddings inside it."""
    if kept:
        say(f"  keeps {plural(len(kept), 'other field')} of its header: {join_names(sorted(kept), LISTED)}")
    if left_out:
        listed = join_names(left_out, LISTED)
        say(f"  leaves out {plural(len(left_out), 'field')} of {header.file.name}'s header: {listed}")
    if header.bundled:
        say(f"  leaves out {plural(len(header.bundled), 'tensor')} of embeddings inside {header.file.name}: "
            f"{join_names(header.bundled, LISTED)}")  # fmt: skip


def ranks_of(updates: Updates) -> str:
    """Format the rank, or the smallest and the largest."""
    ranks = sorted({update.rank for update in updates.values()})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def full_result(base: str | None) -> BaseReader | None:
    """Return the model of a run that trained the base itself, with the run's other parts; None if it names none."""
    from simpletune.adapters.files.base_reader import BaseReader

    run = Path(base or "")
    if base is None or not is_run(run) or (folder := denoiser_in(run)) is None:
        return None
    config = resolve_model_folder(run_config(run))
    family = config.model.model_copy(update={config.model.denoiser: str(folder), "loras": []})
    conventions = config.model.conventions(config.objective, config.resolution)
    scheduler = config.objective.scheduler_config(config.model.files.scheduler_config(), conventions)
    return BaseReader(base, (family, family.files.part(family.denoiser)), scheduler)


def full_objective(base: str | None) -> str | None:
    """Return the objective of a run that is named as the base; None if no run is."""
    return run_config(Path(base)).objective.name if base is not None and is_run(Path(base)) else None


def say_objectives(objectives: Mapping[str, Sequence[str]], base: str = "", of_base: str | None = None) -> None:
    """Name LoRAs that were trained by different objectives, and by another than that of the base, as far as it is
    known."""
    if of_base is not None:
        objectives = {**objectives, of_base: [base, *objectives.get(of_base, ())]}
    if len(objectives) > 1:
        listed = ", ".join(f"{join_names(names, LISTED)} by {name}" for name, names in objectives.items())
        say(f"  trained by different objectives, whose updates do not suit each other: {listed}")


def base_name(sources: list[NamedLora]) -> str:
    """Return the base that the first LoRA's run trained on."""
    if not sources:
        raise UserError("merge needs a LoRA, or --base with a model to write as it is, such as a run with full weights")
    config = sources[0].config(open_lora(sources[0].file).metadata) if sources[0].run else None
    if config is None:
        raise UserError("--base: name the model to merge into: a folder, a single file or a hub name")
    if config.model.init == "random":
        raise UserError(f"--base: {sources[0].run} trained on random weights, which were not saved. Name another base")
    return config.model.files.weights_from


def stack_of(source: NamedLora) -> Stack | None:
    """Return the LoRAs that a run trained on top of, which its base needs."""
    from simpletune.runs.stack import read_stack, without_assistants

    config = source.config(open_lora(source.file).metadata)
    if config is None:
        return None
    return read_stack(resolve_model_folder(without_assistants(config)), source.run)


def refuse_same(out: Path, source: Path) -> None:
    if out.resolve() == source.resolve():
        raise UserError(f"--out: {out} is the input file. Choose another name")


def require_rank_or_energy(args: argparse.Namespace, both: bool = False) -> None:
    """Require --rank or --energy, within their ranges; with both, the rank is the maximum."""
    if args.rank is None and args.energy is None:
        raise UserError("give --rank, such as --rank 16, or --energy, such as --energy 0.95")
    if args.rank is not None and args.energy is not None and not both:
        raise UserError("give --rank or --energy, not both")
    if args.energy is not None and not 0 < args.energy <= 1:
        raise UserError(f"--energy: {args.energy:g} is not a share between 0 and 1. Use a value such as 0.95")
