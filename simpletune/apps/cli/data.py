"""Verbs for data sets: data, caption."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import (
    JSON_HELP,
    add_overrides,
    positive,
    probability,
    read_config_arguments,
    whole_number,
)
from simpletune.apps.cli.estimate import ABOUT_DEVICE
from simpletune.apps.cli.train import is_folder_of_images

PLACE_HELP = "a folder of pictures, or a configuration"


def data(args: argparse.Namespace) -> None:
    """check a data set before training: unusable, small and duplicate pictures, and crops; needs no weights"""
    from simpletune.commands.inspect_data.report import report

    if args.masks_from is not None:
        write_masks(args)
        return
    from simpletune.commands.inspect_data.folder_config import folder_config, with_model
    from simpletune.system.gpus import find_card

    if is_folder_of_images(args.config):
        config, about = folder_config(args.config, args.overrides, args.model, args.device)
    else:
        about = ""
        if args.device is not None and args.device.lower() != "cpu":
            about = f"sizes are the configuration's own, on {find_card(args.device).name} as on any card"
        config = read_config_arguments(args, needs_model=False)
        if args.model is not None:
            config = with_model(config, args.model)
    report(config, args.out, args.json, args.pictures, about)


def write_masks(args: argparse.Namespace) -> None:
    """Write the masks of ``data --masks-from``, and no report."""
    from simpletune.commands.masks import saliency
    from simpletune.data.sources.folder import Folder
    from simpletune.system.options import UserError

    if args.model is not None or args.device is not None:
        raise UserError(
            "--masks-from needs neither --model nor --device: masks have the pictures' own sizes. Leave out"
        )
    if args.json or args.out is not None:
        raise UserError("--masks-from writes masks and no report. Leave out --out and --json, or call data again")
    sources: list[Folder] = []
    if is_folder_of_images(args.config):
        sources.append(Folder(path=str(args.config)))
    else:
        from simpletune.config.resolve import resolve_data_folder

        for source in resolve_data_folder(read_config_arguments(args, needs_model=False)).pictures.members:
            if not isinstance(source, Folder) or source.mask == "alpha":
                raise UserError(
                    f"data.mask: {source.path} has no mask files, but opacity. Set data.mask=files in a folder"
                )
            sources.append(source)
    saliency.write_masks(sources, args.masks_from)


def data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG_OR_FOLDER", help=PLACE_HELP)
    add_overrides(parser)
    parser.add_argument("--model", metavar="NAME", help="show the sizes of this base: hub name, folder or file")
    parser.add_argument(
        "--device", metavar="CARD", help=f"of a folder: those for {ABOUT_DEVICE}, or cpu (default: this machine's)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write data.html, sheet.png and data.json to it")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument(
        "--masks-from",
        type=Path,
        metavar="MODEL.onnx",
        help="write masks instead: what stands out to a saliency model such as U2-Net, for pictures without a mask",
    )
    count = whole_number("a whole number from 0 to 2000", 0, 2000)
    parser.add_argument("--pictures", type=count, default=96, metavar="N", help="show at most N pictures (default: 96)")


def caption(args: argparse.Namespace) -> None:
    """caption pictures with an image-to-text model or a tagger; writes NAME.txt, keeps captions that a person wrote"""
    from simpletune.system.startup import import_libraries

    import_libraries()
    from simpletune.commands.caption.caption import CaptionRequest, run

    rewrite = "all" if args.replace else "ours" if args.again else "missing"
    run(
        CaptionRequest(
            args.place,
            args.model,
            tuple(args.overrides),
            args.prompt,
            args.prefix,
            args.trigger,
            rewrite,
            args.batch_size,
            args.precision,
            args.max_new_tokens,
            args.device,
            args.predict,
            args.threshold,
            args.character_threshold,
            args.blacklist,
        )
    )


def caption_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", type=Path, metavar="CONFIG_OR_FOLDER", help=PLACE_HELP)
    add_overrides(parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="folder or hub name of a Florence-2, Qwen-VL or BLIP model, or of a WD14 tagger, which needs the extra "
        "tags (default: a model that fits the machine)",
    )
    parser.add_argument(
        "--prompt", help="a question (Qwen-VL), a task such as <CAPTION> (Florence-2), the caption's beginning (BLIP)"
    )
    parser.add_argument("--prefix", default="", metavar="TEXT", help="text before every caption")
    parser.add_argument("--trigger", default="", metavar="WORD", help="trigger word, put first in every caption")
    parser.add_argument(
        "--threshold", type=probability, metavar="P", help="tagger: least probability of a tag (default: 0.35)"
    )
    parser.add_argument(
        "--character-threshold",
        type=probability,
        metavar="P",
        help="tagger: least probability of a character's name (default: 0.85)",
    )
    parser.add_argument(
        "--blacklist", default="", metavar="TAGS", help="tagger: tags to leave out, between commas, or a file of them"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="also redo captions that a model wrote with other settings")
    which.add_argument("--replace", action="store_true", help="replace every caption, including those written by hand")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="pictures per batch (default: 1)")
    parser.add_argument(
        "--precision", choices=("bf16", "int8", "fp32"), default="bf16", help="precision of the weights (default: bf16)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=120, metavar="N", help="maximum tokens per caption (default: 120)"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto, a card")
    parser.add_argument("--predict", action="store_true", help="predict the memory and write nothing")


VERBS = {"data": (data, data_arguments), "caption": (caption, caption_arguments)}
