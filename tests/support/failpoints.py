"""Kill or fail a run at named moments.

In a process, call ``arm("checkpoint.before-rename", action)``. From outside, start ``simpletune`` through this file:

    python tests/support/failpoints.py checkpoint.before-rename:2=kill train CONFIG

The first word is a comma-separated list of ``NAME[:COUNT]=ACTION``. COUNT 3 acts at the third pass; ACTION is one of
ACTIONS.

The package itself knows nothing of these moments. Each is a place before or after a statement of a function; when a
moment is armed or watched, that function gets the code of its own source with one more call there.
"""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Moment(NamedTuple):
    """A place in the package.

    Args:
        about: state of the files at that moment.
        function: ``MODULE:FUNCTION``, below ``simpletune``.
        at: ``before`` or ``after`` and the start of a statement's first line, which occurs once in the function.
    """

    about: str
    function: str
    at: str


NAMES = {
    "run.moved-traces": Moment("an older run's traces are moved, but not its folder",
        "runs.folder:open_fresh", "after os.replace(traces, "),
    "run.cleared": Moment("an entry of a run without a checkpoint is removed",
        "runs.folder:clear_unsaved", "after remove(entry)"),
    "run.opened-again": Moment("metrics beyond the checkpoint are dropped, but not evaluations",
        "runs.folder:open_again", "after write_text(file, "),
    "data.scanned": Moment("pictures and captions are read, but not encoded",
        "training.set_up:set_up", "after data = plan_data("),
    "text.encoded": Moment("a prompt is in the cache",
        "stages.text_cache:PromptEntries._encode", "before poll()"),
    "class.drawn": Moment("a class picture is in the cache",
        "training.class_images:generate_missing", "after advance()"),
    "latents.encoded": Moment("a picture is in the cache",
        "stages.latent_cache:LatentCache.fill", "before poll()"),
    "file.before-rename": Moment("a weight file is written and flushed, but not renamed",
        "system.safetensors_file:write_safetensors", "after _sort_metadata("),
    "file.after-rename": Moment("a weight file is renamed",
        "system.safetensors_file:write_safetensors", "after with atomic_file("),
    "quantised.before-rename": Moment("a quantised base is written, but not renamed",
        "models.shared.quantised_cache:QuantisedBase._write", "after flush_to_disk(folder / ABOUT)"),
    "model.loaded": Moment("the base model is loaded",
        "training.load_job:load_model", "before text = "),
    "run.restored": Moment("the checkpoint is restored into the model",
        "training.load_job:load_model", "after if core.fp16 is not None and saved.fp16"),
    "step.begun": Moment("a step begins",
        "training.trainer:Trainer._steps", "after began = "),
    "step.updated": Moment("the weights are updated, but the step is not logged",
        "training.trainer:Trainer._steps", "before traces.after_step()"),
    "metrics.appended": Moment("the step is logged",
        "runs.folder:append_metrics", "after with room_for("),
    "checkpoint.begun": Moment("a checkpoint's temporary folder is created, but empty",
        "runs.checkpoint:save_checkpoint", "before metadata = "),
    "checkpoint.part": Moment("a process has written its part of divided weights, but not of the optimizer",
        "engine.fsdp.checkpoints:_write_own", "after written: "),
    "checkpoint.weights": Moment("a checkpoint's weights are written, but not its optimizer",
        "runs.checkpoint:save_checkpoint", "after write_safetensors(trained_parameters("),
    "checkpoint.optimizer": Moment("a checkpoint's optimizer is written, but not its state.json",
        "runs.checkpoint:save_checkpoint", "after write_safetensors(tensors, "),
    "checkpoint.before-rename": Moment("a checkpoint is complete, but not renamed",
        "runs.checkpoint:save_checkpoint", "after flush_to_disk(part / STATE)"),
    "checkpoint.after-rename": Moment("a checkpoint is renamed, but older ones are not removed",
        "runs.checkpoint:save_checkpoint", "after flush_to_disk(folder.parent)"),
    "checkpoint.removing": Moment("an older checkpoint is renamed, but its files are not removed",
        "runs.checkpoint_folders:remove_oldest", "after replace(old, gone)"),
    "validation.evaluated": Moment("the validation loss is recorded, but no picture is drawn",
        "training.validator:Validator.evaluate", "after record_validation("),
    "validation.picture": Moment("a validation picture is written to the temporary folder",
        "training.validation_images:Previews.generate", "after save_png("),
    "validation.drawn": Moment("the pictures of a step are written, but not the grid",
        "training.validation_images:Previews.generate", "after with atomic_folder("),
    "shard.written": Moment("a shard is written beside its samples, but not renamed",
        "data.storage.shards:write_shard", "after for chunk in "),
    "shard.joined": Moment("a shard is written, but not in its place",
        "data.storage.shard_cache:ShardWriter._store", "before self.shards.put("),
    "shard.stored": Moment("a shard is stored, but its samples still lie beside it",
        "data.storage.shard_cache:ShardWriter._store", "after self.shards.put("),
    "shard.cleared": Moment("a shard is stored and its samples removed, but no index names it",
        "data.storage.shard_cache:ShardWriter._store", "after for each in new:"),
    "remote.file": Moment("a file of a checkpoint is in the object store, but others are not",
        "runs.remote.upload:Uploader._upload_checkpoint", "after self._put("),
    "remote.uploaded": Moment("a checkpoint is in the object store, but its index does not name it",
        "runs.remote.upload:Uploader._upload", "before self._commit(checkpoints"),
    "remote.committed": Moment("the object store's index names a new checkpoint, but older ones are not removed",
        "runs.remote.upload:Uploader._upload", "after self._commit(checkpoints"),
    "remote.fetched": Moment("a checkpoint is fetched, but not renamed",
        "runs.remote.checkpoint_store:_fetch_checkpoint", "after for name in "),
    "finish.saved": Moment("the last checkpoint is written, but not the result",
        "training.finish:finish", "before with trainer.stages.stage("),
    "finish.exported": Moment("the result is written",
        "training.finish:finish", "after with trainer.stages.stage("),
    "finish.summary": Moment("the summary is written for the first time, but not the card and the report",
        "training.finish:finish", 'before trainer.tasks.run("the model card", '),
    "finish.reported": Moment("the report is written, but not the final summary",
        "training.finish:finish", "after page, reported = "),
}  # fmt: skip


class InjectedError(RuntimeError):
    """Report a failure injected at a moment."""


def _raise() -> None:
    raise InjectedError("a failpoint raised")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "int": lambda: os.kill(os.getpid(), signal.SIGINT),
    "raise": _raise,
    "full": _full,
}
_armed: dict[str, tuple[int, Callable[[], object]]] = {}
_watchers: list[Callable[[str], object]] = []
changed: dict[FunctionType, CodeType] = {}  # the functions that have moments now, and their own code


def passed(name: str) -> None:
    """Notify the watchers and run an armed action; the functions with moments call this."""
    for watcher in _watchers:
        watcher(name)
    left, action = _armed.pop(name, (0, None))
    if left > 1 and action is not None:
        _armed[name] = left - 1, action
    elif action is not None:
        action()


def arm(name: str, action: str | Callable[[], object] = "kill", count: int = 1) -> None:
    """Run an action at a named moment, once.

    Args:
        name: one of NAMES.
        action: one of ACTIONS, or a function.
        count: number of the pass at which to act.

    Raises:
        ValueError: the name or the action is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"unknown failpoint {name}. Use one of {', '.join(NAMES)}")
    if isinstance(action, str) and action not in ACTIONS:
        raise ValueError(f"unknown failpoint action {action}. Use one of {', '.join(ACTIONS)}")
    install(NAMES[name].function)
    _armed[name] = (count, ACTIONS[action] if isinstance(action, str) else action)


def arm_all(text: str) -> None:
    """Arm the moments of a list of ``NAME[:COUNT]=ACTION``.

    Raises:
        ValueError: an entry is none.
    """
    for part in text.split(","):
        moment, equals, action = part.strip().partition("=")
        name, _, count = moment.partition(":")
        if not equals or (count and not count.isdigit()):
            raise ValueError(f"{part!r} is not NAME[:COUNT]=ACTION")
        arm(name, action, int(count or 1))


def watch(watcher: Callable[[str], object]) -> None:
    """Call a function at every moment, before any armed action."""
    install_all()
    _watchers.append(watcher)


def disarm() -> None:
    """Remove all armed actions and watchers, and give the functions their own code back."""
    _armed.clear()
    _watchers.clear()
    for function, code in changed.items():
        function.__code__ = code
    changed.clear()


def install_all() -> None:
    """Give every function its moments, so that forked processes need not."""
    for function in {moment.function for moment in NAMES.values()}:
        install(function)


def install(place: str) -> None:
    """Give a function its moments; nothing if it has them.

    Raises:
        LookupError: the function has changed, and NAMES must follow.
    """
    name, _, path = place.partition(":")
    module = importlib.import_module(f"simpletune.{name}")
    function: object = module
    for part in path.split("."):
        function = getattr(function, part)
    plain = inspect.unwrap(function)  # type: ignore[arg-type]
    assert isinstance(plain, FunctionType)
    if plain not in changed:
        code = with_moments(place)
        changed[plain] = plain.__code__
        plain.__globals__["__passed__"] = passed
        plain.__code__ = code


@cache
def with_moments(place: str) -> CodeType:
    """Compile a function's source with calls of ``passed`` at its moments."""
    name, _, path = place.partition(":")
    file = ROOT / "simpletune" / f"{name.replace('.', '/')}.py"
    text = file.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    node: ast.AST = tree
    for part in path.split("."):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part)
    here = {moment: each.at.partition(" ") for moment, each in NAMES.items() if each.function == place}
    found = {moment: _statement(node, start, lines, moment) for moment, (_, _, start) in here.items()}
    for moment, (block, statement) in found.items():
        call = ast.copy_location(ast.parse(f"__passed__({moment!r})").body[0], statement)
        block.insert(block.index(statement) + (here[moment][0] == "after"), call)
    ast.fix_missing_locations(tree)
    codes = [compile(tree, str(file), "exec", dont_inherit=True)]
    for code in codes:  # grows while it is read
        if code.co_qualname == path:
            return code
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    raise LookupError(f"no code of {place}")


def _statement(function: ast.AST, start: str, lines: list[str], moment: str) -> tuple[list[ast.stmt], ast.stmt]:
    """Find the one statement of a function whose first line starts so, and its block."""
    found = [
        (block, statement)
        for node in ast.walk(function)
        for field in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, field, None), list)
        for statement in block
        if lines[statement.lineno - 1].strip().startswith(start)
    ]
    if len(found) != 1:
        raise LookupError(f"{moment}: {len(found)} statements start with {start!r}. Correct NAMES in {__file__}")
    return found[0]


def import_libraries_first() -> None:
    """Import the libraries as a run does, before the modules with moments import a part of them."""
    from simpletune.system.devices import prepare_environment
    from simpletune.system.startup import import_libraries

    prepare_environment()
    import_libraries()


def main() -> None:
    """Run ``simpletune`` with moments armed."""
    sys.path.insert(0, str(ROOT))
    from simpletune.apps.cli.main import main as simpletune

    import_libraries_first()
    arm_all(sys.argv[1])
    sys.exit(simpletune(sys.argv[2:]))


if __name__ == "__main__":
    main()
