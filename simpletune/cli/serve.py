"""The verb that answers others' requests: serve."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.serve.limits import Limits
from simpletune.system.startup import import_libraries


def serve(args: argparse.Namespace) -> None:
    """answer HTTP requests with pictures, and show a page to try prompts on"""
    from simpletune.serve import require_packages

    require_packages()
    import_libraries()
    from simpletune.serve.server import run

    run(args)


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``serve``."""
    from simpletune.cli.drawing_arguments import positive

    add = parser.add_argument
    add("--run", type=Path, help="a run or RUN@STEP: its model, its LoRA and its defaults; default: the newest")
    add("--runs", type=Path, default=Path("runs"), help="where runs are (default: runs)")
    add("--model", help="base model: a hub name (owner/name) or a folder; alone it needs no run")
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a LoRA file, run or RUN@STEP, by a name",
    )
    add("--precision", choices=("bf16", "fp32", "int8", "int8-quanto"), help="how weights are held; default: the run's")
    add("--modulation", choices=("resident", "plan"), help="plan: a third of the weights stay in host memory")
    add("--device", choices=("auto", "cuda", "cpu"), help="default: the run's")
    add("--host", help="the address to listen on (default: 127.0.0.1, only this machine)")
    add("--port", type=port, help="default: AIP_HTTP_PORT, or 8000; 0: any that is free")
    add("--predictions", choices=("plain", "object"), default="plain", help='object: {"output": base64} each')
    add("--queue", type=positive, default=Limits.queue, help=f"requests that may wait (default: {Limits.queue})")
    add("--timeout", type=positive, default=int(Limits.seconds), help=f"seconds ({Limits.seconds:g}) for an answer")
    add("--max-side", type=positive, help=f"pixels (default: {Limits.side}, or what the model can)")
    add("--max-steps", type=positive, default=Limits.steps, help=f"of a picture (default: {Limits.steps})")
    add("--max-instances", type=positive, default=Limits.instances, help=f"a request's pictures ({Limits.instances})")
    add("--max-prompt", type=positive, default=Limits.prompt, help=f"characters (default: {Limits.prompt})")
    add("--max-body", type=positive, default=Limits.body, help=f"bytes of a request (default: {Limits.body})")


def port(text: str) -> int:
    """A port's number."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to 65535")
    return int(text)


VERBS = {"serve": (serve, serve_arguments)}
