"""Verbs that answer over HTTP: serve, web."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import (
    DEVICE_HELP,
    MODULATION_HELP,
    OBJECTIVE_HELP,
    OBJECTIVES,
    PRECISION_HELP,
    RUNS_HELP,
    add_verbose,
    port,
    positive,
)
from simpletune.apps.serve.limits import Limits
from simpletune.system.extras import require_extra
from simpletune.system.startup import import_libraries


def serve(args: argparse.Namespace) -> None:
    """serve pictures over HTTP, with a page to try prompts"""
    require_extra("prometheus_client", "serve", "simpletune serve needs")
    import_libraries()
    from simpletune.apps.serve.server import run

    run(args)


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run", type=Path, help="a run or RUN@STEP that supplies model, LoRA and defaults (default: newest)")
    add("--runs", type=Path, default=Path("runs"), help=RUNS_HELP)
    add("--model", help="base model: a hub name (owner/name) or a folder; needs no run")
    add("--objective", choices=OBJECTIVES, help=f"with --model: {OBJECTIVE_HELP}")
    add(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="name a LoRA file, run or RUN@STEP; repeatable",
    )
    add(
        "--embedding",
        action="append",
        default=[],
        metavar="FILE[:TOKEN]",
        help="embeddings for every model but the base, used in prompts as TOKEN; repeatable",
    )
    add("--precision", choices=("bf16", "fp32", "int8", "int8-quanto"), help=PRECISION_HELP)
    add("--modulation", choices=("resident", "plan"), help=MODULATION_HELP)
    add("--device", choices=("auto", "cuda", "cpu"), help=DEVICE_HELP)
    add("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=port, help="port (default: AIP_HTTP_PORT, or 8000); 0 picks a free one")
    add("--predictions", choices=("plain", "object"), default="plain", help='object: return {"output": base64}')
    add("--queue", type=positive, default=Limits.queue, help=f"maximum waiting requests (default: {Limits.queue})")
    add(
        "--timeout",
        type=positive,
        default=int(Limits.seconds),
        help=f"seconds per request (default: {Limits.seconds:g})",
    )
    add("--max-side", type=positive, help=f"maximum side in pixels (default: {Limits.side}, or the model's limit)")
    add("--max-steps", type=positive, default=Limits.steps, help=f"maximum steps per picture (default: {Limits.steps})")
    add(
        "--max-instances",
        type=positive,
        default=Limits.instances,
        help=f"maximum pictures per request (default: {Limits.instances})",
    )
    add(
        "--max-prompt",
        type=positive,
        default=Limits.prompt,
        help=f"maximum characters of a prompt (default: {Limits.prompt})",
    )
    add("--max-body", type=positive, default=Limits.body, help=f"maximum bytes per request (default: {Limits.body})")
    add_verbose(parser)


def web(args: argparse.Namespace) -> None:
    """open a page to start, watch and judge runs"""
    from simpletune.apps.web.app import run

    run(args)


def web_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs"), help=RUNS_HELP)
    add(
        "--root",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder whose pictures and configurations the page may use; repeatable (default: the current folder)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=port, default=8100, help="port (default: %(default)s); 0 picks a free one")
    add("--token", action="store_true", help="ask for a token on this machine too (always for other addresses)")


VERBS = {"serve": (serve, serve_arguments), "web": (web, web_arguments)}
