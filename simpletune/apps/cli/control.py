"""The verb for a run that trains, or has stopped: control."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.apps.cli.arguments import seconds
from simpletune.system.options import Json, UserError
from simpletune.system.signals import handle_signals
from simpletune.system.startup import import_libraries

if TYPE_CHECKING:
    from simpletune.runs.control import AnyRequest

LOOK_EVERY = 0.2  # seconds
WAIT = 600.0  # seconds
GENERATING = ("negative_prompt", "seed", "strength", "steps", "guidance", "width", "height")


def control(args: argparse.Namespace) -> None:
    """ask a training run for a picture, a checkpoint or to stop, after the current step; finish a stopped run"""
    if args.finish:
        finish(args)
        return
    from simpletune.runs.control import ask

    request = build_request(args)
    ask(args.run, request)
    if args.wait == 0:
        print(f"asked {args.run}: request {request.id}")
        return
    answer = wait_for_answer(args.run, request.id, WAIT if args.wait is None else args.wait)
    if answer["state"] != "done":
        raise UserError(f"{answer['state']} at step {answer['step']}: {answer.get('why', '')}")
    print(args.run / answer["file"])


def finish(args: argparse.Namespace) -> None:
    """Export a stopped run's checkpoint as its result, without training."""
    for name in ("wait", *GENERATING):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} does not belong to --finish. Leave it out")
    with handle_signals():
        import_libraries()
        from simpletune.training.finish_early import finish_early

        finish_early(str(args.run))


def build_request(args: argparse.Namespace) -> AnyRequest:
    """Build the request that the arguments describe. Raises UserError if a value is out of range or of another one."""
    from pydantic import ValidationError

    from simpletune.config.error_text import problems_of
    from simpletune.runs.control import GenerateRequest, SaveRequest, StopRequest, new_id
    from simpletune.system.options import ConfigError

    how = {name: value for name in GENERATING if (value := getattr(args, name)) is not None}
    if args.draw is None:
        if how:
            raise UserError(f"--{next(iter(how)).replace('_', '-')} belongs to --draw. Leave it out")
        return StopRequest(id=new_id("stop"), ask="stop") if args.stop else SaveRequest(id=new_id("save"), ask="save")
    data: Json = {"id": new_id("draw"), "prompt": args.draw, **how}
    try:
        return GenerateRequest(**data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, data, GenerateRequest), "--draw") from None


def wait_for_answer(run: Path, request: str, seconds: float) -> Json:
    """Wait for the answer to a request. Raises UserError if there is none in time, or the run has ended without one."""
    from simpletune.runs.control import read_answers
    from simpletune.system.locks import is_held

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        held = is_held(run)  # check before reading answers: a run answers before it ends
        found = next((row for row in read_answers(run) if row["id"] == request), None)
        if found is not None:
            return found
        if not held:
            raise UserError(f"{run} has ended without an answer. Continue it with train CONFIG --resume auto")
        time.sleep(LOOK_EVERY)
    raise UserError(
        f"no answer within {seconds:g} s; the request stays in {run}/control.json until the step is done. "
        "Wait longer with --wait"
    )


def control_arguments(parser: argparse.ArgumentParser) -> None:
    about = "folder of a training run, such as runs/demo; for --finish also one of its checkpoints: runs/demo@100"
    parser.add_argument("run", type=Path, metavar="RUN[@STEP]", help=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--draw", metavar="PROMPT", help="draw a picture after the step, into RUN/drawn")
    what.add_argument("--save", action="store_true", help="write a checkpoint after the step")
    what.add_argument("--stop", action="store_true", help="write a checkpoint after the step and stop; can be resumed")
    about = "export a stopped run's last intact checkpoint, or that of RUN@STEP, as its result, without training"
    what.add_argument("--finish", action="store_true", help=about)
    parser.add_argument("--negative-prompt", metavar="TEXT", help="what to steer away from (default: the run's)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the noise (default: 0)")
    parser.add_argument(
        "--strength", type=float, metavar="X", help="LoRA strength, from 0 (the base) to 4 (default: 1)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="sampling steps (default: as in the run's validation)")
    parser.add_argument(
        "--guidance", type=float, metavar="X", help="guidance scale (default: as in the run's validation)"
    )
    parser.add_argument("--width", type=int, metavar="PIXELS", help="picture width (default: as in validation)")
    parser.add_argument("--height", type=int, metavar="PIXELS", help="picture height (default: as in validation)")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help=f"how long to wait for the answer (default: {WAIT:g}); 0: do not wait",
    )


VERBS = {"control": (control, control_arguments)}
