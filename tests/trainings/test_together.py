"""Several processes that train together: the weights of one, written by the first, stopped and resumed together, and
ended when one of them is lost. ``test_elastic.py`` changes their number."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_sdxl
import torch
import two_processes
from launching import ROOT, Launcher, Outcome, free_port
from safetensors import safe_open
from safetensors.torch import load_file
from two_processes import LEVERS, changed, require_same, run_of, tensors, together

from simpletune.config.load import validate
from simpletune.data.storage.cache import FileCache, crop_key
from simpletune.runs import checkpoint
from simpletune.runs.control import read_answers
from simpletune.runs.folder import SKIPPED, read_metrics, read_rows
from simpletune.stages.plan_data import make_plan
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.train_step import ignore_frozen_in_ddp
from simpletune.training.heartbeats import LOST
from simpletune.training.train import train

ground, whole = two_processes.ground, two_processes.whole


def unwatched(ground: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """A run of this name that is compared by what it trains."""
    return changed(ground, name, **{"validation": {"prompts": [], "loss_samples": 0}, **changes})


def alone(data: dict[str, Any]) -> Path:
    """One process that takes what two would, one after the other."""
    return train(validate(unwatched(data, f"{data['name']}-alone"), "test"))


def _alone_from_prompts(data: dict[str, Any]) -> Path:
    return train(validate(data | {"name": f"{data['name']}-alone"}, "test"))


def test_two_processes_train_what_one_would(whole: tuple[Path, list[str]], ground: dict[str, Any]) -> None:
    run = whole[0]
    one = alone(ground)
    torch.testing.assert_close(tensors(run), tensors(one), rtol=1e-4, atol=1e-6)
    losses = [[row[key] for row in read_metrics(each) for key in ("loss", "grad_norm")] for each in (run, one)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_processes_train_what_one_would_of_sdxl(launcher: Launcher, ground: dict[str, Any], tmp_path: Path) -> None:
    """With pictures of other sizes, of which the model is told, accumulation and an average."""
    model = {"family": "sdxl", "pretrained": str(tiny_sdxl.build(tmp_path / "sdxl", seed=1))}
    data = unwatched(ground, "sdxl", data={"resolution": 64, "crop": "random", "flip": True})
    data["model"] = model
    together(launcher, data)
    one, run = alone(data), run_of(data)
    torch.testing.assert_close(tensors(run), tensors(one), rtol=1e-3, atol=1e-5)
    losses = [[row["loss"] for row in read_metrics(each)] for each in (run, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"reduce": "exact", "batch_size": 2}], ids=["fast", "exact"])
def test_two_processes_train_the_slider_that_one_would(
    launcher: Launcher, ground: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    """From prompts alone: each draws its own micro-batches, and a step's gradients are exchanged once."""
    directions: list[dict[str, Any]] = [
        {"target": "a disc", "positive": "a large disc", "negative": "a small disc", "preserved": ["a heart"]},
        {"target": "stripes", "negative": "stripes", "neutral": ""},
    ]
    data = unwatched(ground, f"slider-{len(how)}", train=how)
    del data["data"]
    data["concept"] = {"directions": directions, "resolutions": [32], "drawing_steps": 4}
    data["output"] = data["output"] | {"cache": str(tmp_path / "cache")}
    together(launcher, data)
    one, run = _alone_from_prompts(data), run_of(data)
    exact = {"rtol": 0, "atol": 0} if how else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(tensors(run), tensors(one), **exact)
    losses = [[row["loss"] for row in read_metrics(each)] for each in (run, one)]
    assert losses[0] == (losses[1] if how else pytest.approx(losses[1], rel=1e-4))


def test_the_first_process_writes_and_speaks(whole: tuple[Path, list[str]], ground: dict[str, Any]) -> None:
    run, said = whole
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert [row["step"] for row in read_rows(run / "evaluations.jsonl")] == [0, 2, 4]
    assert sorted(entry.name for entry in run.parent.glob("*whole.*")) == [".whole.lock"]  # nothing was moved aside
    profiles = Path(ground["output"]["profiles"])
    assert len(list((profiles / "whole").rglob("*tfevents*"))) == 1
    for words in ("model   ", "next", "done in"):
        assert words in said[0] and words not in said[1]
    assert "Traceback" not in said[1]
    cache = Path(ground["output"]["cache"])
    assert len(list((cache / "latents").rglob("*.safetensors"))) == 6
    assert not list(run.rglob("*.part")) + list(cache.rglob("*.part"))


def put_request(run: Path, **request: Any) -> None:
    asked = "2999-01-01T00:00:00Z"  # after the next start
    (run / "control.json").write_text(json.dumps({"requests": [{**request, "asked": asked}]}))


def test_a_run_that_is_stopped_killed_asked_and_damaged_ends_as_if_nothing_had_happened(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any]
) -> None:
    data = unwatched(ground, "eventful", train={"steps": 6})
    run = run_of(data)

    # A signal or a request stops both one step later: the others learn it with the figures of that step.
    rarely = changed(data, "eventful", checkpoint={"every": 1000})
    stopped = launcher.train(rarely, rarely, moments={1: "step.begun:2=term"})
    assert stopped.codes == [143, 143], stopped.said
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [3]
    assert "step 3 of 6 is saved" in stopped.said[0] and "saves after at most two steps" in stopped.said[0]
    assert "is saved" not in stopped.said[1]

    # No launcher ends the other: it says why and ends with the code that means: start again.
    lost = launcher.train(data, data, resume="auto", moments={1: "step.begun=kill"}, alone=True)
    assert lost.codes == [LOST, -9], (lost.codes, lost.after, lost.said)
    assert "step 3 of 6" in lost.said[0]
    assert "Start all processes again with --resume auto" in lost.said[0] and "Traceback" not in lost.said[0]
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [3]

    put_request(run, id="now", ask="draw", prompt="a red disc", steps=1)
    together(launcher, data, resume="auto")
    torch.testing.assert_close(tensors(run), tensors(whole[0]), rtol=0, atol=0)
    rows, others = ([{**row, "seconds": 0} for row in read_metrics(each)] for each in (run, whole[0]))
    assert rows[:4] == others and [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    last = {name: tensor.clone() for name, tensor in tensors(run, 6).items()}  # which maps the file

    (checkpoint.checkpoint_folder(run, 6) / checkpoint.TRAINABLE).write_bytes(b"")
    put_request(run, id="enough", ask="stop")
    more = unwatched(data, "eventful", train={"steps": 10})
    stopped = launcher.train(more, more, resume="auto")
    assert stopped.codes == [130, 143], stopped.said
    assert "set aside" in stopped.said[0] and "step 6 of 10 is saved" in stopped.said[0]
    torch.testing.assert_close(tensors(run, 6), last, rtol=0, atol=0)
    answers = [(row["id"], row["state"], row["step"]) for row in read_answers(run)]
    assert answers == [("now", "done", 4), ("enough", "done", 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, last",
    [pytest.param({0: 2, 1: 2}, 3, id="both"), pytest.param({1: 4}, 4, id="the second, in the last step")],
)
def test_a_signal_stops_both_after_the_same_step(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], asked: dict[int, int], last: int
) -> None:
    data = unwatched(ground, f"stopped-{len(asked)}-{last}", checkpoint={"every": 1000})
    moments = {process: f"step.begun:{step}=term" for process, step in asked.items()}
    stopped = launcher.train(data, data, moments=moments)
    assert stopped.codes == [143, 143], stopped.said
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [last]
    assert f"step {last} of 4 is saved" in stopped.said[0]
    together(launcher, data, resume="auto")
    require_same(run_of(data), whole[0])


@pytest.mark.slow
def test_streamed_blocks_and_boundaries_on_the_host_change_nothing(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any]
) -> None:
    data = unwatched(ground, "streamed", memory=LEVERS)
    together(launcher, data)
    require_same(run_of(data), whole[0])


@pytest.mark.parametrize("weights", ["int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_quantised_bases_and_the_modulation_plan(launcher: Launcher, ground: dict[str, Any], weights: str) -> None:
    precision, memory = {"weights": weights, "compute": "fp32"}, {"modulation": "plan", "modulation_window": 3}
    data = unwatched(ground, weights, precision=precision, memory=memory | LEVERS)
    said = together(launcher, data)
    cached = (Path(ground["output"]["cache"]) / "quantised").iterdir()
    assert any(entry.is_dir() for entry in cached) and "base " not in said[1]
    resident = alone(unwatched(ground, weights, precision=precision))
    # AdamW makes steps of up to the learning rate, 0.01, of gradients near 0, whose rounding depends on sums' order
    torch.testing.assert_close(tensors(run_of(data)), tensors(resident), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_prior_of_the_bases_predictions(launcher: Launcher, ground: dict[str, Any]) -> None:
    """In the second pass of each process."""
    data = unwatched(ground, "prior", prior={"method": "base_prediction", "prompt": "a picture"})
    together(launcher, data)
    torch.testing.assert_close(tensors(run_of(data)), tensors(alone(data)), rtol=1e-4, atol=1e-6)


DRAWS = """
import os, sys, time
config, rank, port, of = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.training import class_images
honest = class_images.save_png
def save_png(picture, part, request, **more):
    print("drew", request.seed, flush=True)
    if os.environ.get("KILL"):
        if rank == "1":
            open(config + ".drew", "w").close()
            os.kill(os.getpid(), 9)
        while not os.path.exists(config + ".drew"):  # or it might draw all of them before the other one begins
            time.sleep(0.01)
    return honest(picture, part, request, **more)
class_images.save_png = save_png
sys.exit(main(["train", config, "--resume", "auto"]))
"""


def drawn(launcher: Launcher, data: dict[str, Any], place: Path, **environment: str) -> list[set[int]]:
    """The seeds of the class pictures that each of two processes draws."""
    (place / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        words = [[str(place / "config.json"), str(rank), port, "2"] for rank in (0, 1)]
        outcome = launcher.programs(DRAWS, *words, environment=environment, limit=0 if environment else 120)
    assert outcome.codes[1] == (-9 if environment else 0), outcome.said
    return [{int(seed) for seed in re.findall(r"^drew (\d+)$", said, re.MULTILINE)} for said in outcome.said]


def test_class_pictures_are_drawn_by_all(launcher: Launcher, ground: dict[str, Any], tmp_path: Path) -> None:
    """Each draws its share and what a killed one had claimed; a picture is the same whoever drew it."""
    prior = {"method": "class_pictures", "prompt": "a picture", "count": 8, "steps": 1}
    for name in ("cache", "own"):
        shutil.copytree(ground["output"]["cache"], tmp_path / name)
    data = unwatched(ground, "class", prior=prior, train={"steps": 2}, output={"cache": str(tmp_path / "cache")})
    before = drawn(launcher, data, tmp_path, KILL="1")
    files = {int(file.stem.removeprefix("seed-")) for file in (tmp_path / "cache" / "class").rglob("*.png")}
    # the survivor may draw what the killed one had claimed before it notices the death
    assert before[1] and not before[1] & files - before[0]
    after = drawn(launcher, data, tmp_path)
    assert not after[0] & after[1] and after[0] | after[1] == set(range(8)) - files
    assert not list((tmp_path / "cache" / "class").rglob(".*.part")), "what the killed one was writing"
    one = alone(changed(data, "class", output={"cache": str(tmp_path / "own")}))
    ours, own = (sorted((tmp_path / name / "class").rglob("*.png")) for name in ("cache", "own"))
    assert len(own) == 8 and [file.read_bytes() for file in ours] == [file.read_bytes() for file in own]
    torch.testing.assert_close(tensors(run_of(data), 2), tensors(one, 2), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_text_side(launcher: Launcher, ground: dict[str, Any]) -> None:
    """Each process has its own encoders; embeddings that stop get no gradient in any."""
    embeddings = {"token": "flat", "initial": "striped", "place": "input", "stop_at": 0.5}
    data = unwatched(ground, "text", text={"embeddings": embeddings, "lora": {"rank": 2, "learning_rate": 0.001}})
    together(launcher, data)
    found, expected = (
        {name: tensor for name, tensor in tensors(run).items() if not name.startswith(checkpoint.OPTIMIZER)}
        for run in (run_of(data), alone(data))
    )
    assert any("text.embeddings" in name for name in found) and any("text.encoders" in name for name in found)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_in_the_second_process_is_named_by_the_first(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(ground["output"]["cache"], tmp_path / "cache")
    train = {"on_nonfinite": "skip", "steps": 1}
    data = unwatched(ground, "odd", train=train, output={"cache": str(tmp_path / "cache")})
    config = validate(data, "test")
    plan = make_plan(config, config.data.scan(Path(config.data.path)).images)
    views = [plan.micro_batch(0, RankMicroBatches(process, 2).select(plan.areas(0))[0])[0].view for process in (0, 1)]
    for file in (tmp_path / "cache" / "latents").rglob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            key, z_0 = handle.metadata()["key"], handle.get_tensor("z_0")
        if key == crop_key(views[1]):
            FileCache(file.parent).save(key, {"z_0": z_0 * math.nan})
    names = [view.image.name for view in views]
    said = launcher.train(data, data).said[0]
    assert f"step 1: the loss is nan. Samples: {names[1]}. {names[1]}: its cached latents are non-finite" in said
    assert list(read_rows(run_of(data) / SKIPPED))[0]["samples"] == names


def test_frozen_tensors_are_not_exchanged() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    ignore_frozen_in_ddp(model)
    kept = set(model._ddp_params_and_buffers_to_ignore)  # type: ignore[arg-type]
    assert kept == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


FROZEN = """
import os, signal, sys
rank, port, config, what = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.system.options import UserError
from simpletune.stages.step.train_step import TrainStep
from simpletune.training import heartbeats
silent, stuck = 3 if what == "frozen" else 60, 4 if what == "hangs" else 60
heartbeats.PATIENCE = heartbeats.Timeouts(beat=0.2, silent=silent, meeting=60, failed=1, stuck=stuck)
step, steps = TrainStep.step, []
def freeze(self, *words):
    steps.append(1)
    if rank == "1" and len(steps) == 4:
        if what == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "fails":
            raise UserError("the disk of this machine is full", code=6)
        import time
        time.sleep(600)
    return step(self, *words)
TrainStep.step = freeze
sys.exit(main(["train", config, "--resume", "auto"]))
"""


@pytest.mark.parametrize(
    "what", ["fails", *(pytest.param(what, marks=pytest.mark.slow) for what in ("frozen", "hangs"))]
)
def test_the_other_ends_by_itself_when_one_is_frozen_fails_or_hangs(
    launcher: Launcher,
    ground: dict[str, Any],
    tmp_path: Path,
    what: str,
) -> None:
    data = unwatched(ground, f"one-{what}")
    (tmp_path / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        words = [[str(rank), port, str(tmp_path / "config.json"), what] for rank in (0, 1)]
        ended = launcher.programs(FROZEN, *words, limit=100 if what == "fails" else 3)
    said = {
        "frozen": "process 1 on {} has sent no heartbeat for 3 s",
        "fails": "process 1 on {} has failed: UserError: the disk of this machine is full",
        "hangs": "no process has done anything for 4 s",
    }[what].format(socket.gethostname())
    assert ended.codes == [LOST, {"frozen": -9, "fails": 6, "hangs": LOST}[what]], (ended.codes, ended.said)
    assert said in ended.said[0], ended.said[0]
    assert [row["step"] for row in read_metrics(run_of(data))][-1] >= 2
    assert [step for step, _ in checkpoint.list_checkpoints(run_of(data))] == [2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_all_again_when_one_is_killed(
    whole: tuple[Path, list[str]],
    ground: dict[str, Any],
    tmp_path: Path,
) -> None:
    data = unwatched(ground, "torchrun")
    (tmp_path / "config.json").write_text(json.dumps(data))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    moment = "step.begun:4=kill"  # a second start takes only two steps
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
               "2", str(ROOT / "tests/support/failpoints.py"), moment, "train",
               str(tmp_path / "config.json"), "--resume", "auto"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume  from" in done.stdout and "step 2 of 4" in done.stdout
    require_same(run_of(data), whole[0])
    result = Path(data["output"]["runs"]) / "torchrun" / "pytorch_lora_weights.safetensors"
    assert load_file(result).keys() == load_file(whole[0] / result.name).keys()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 1.0, 4.0])
def test_nobody_waits_for_a_torchrun_that_is_killed_before_its_processes_have_met(
    after: float, ground: dict[str, Any], tmp_path: Path
) -> None:
    """They waited for over half an hour, and held the lock. The first have hardly started, the last import torch."""
    (tmp_path / "config.json").write_text(json.dumps(unwatched(ground, f"orphans-{after:g}", train={"steps": 10_000})))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "simpletune", "train"]
    command = [sys.executable, *words, str(tmp_path / "config.json")]
    torchrun = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    children, late = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children"), time.monotonic() + 120
    while len(children.read_text().split()) < 2 and time.monotonic() < late:
        time.sleep(0.05)
    time.sleep(after)
    torchrun.kill()
    killed = time.monotonic()
    assert torchrun.stdout is not None
    said = torchrun.stdout.read().decode()  # until both have ended, too
    torchrun.wait()
    assert time.monotonic() - killed < 30, said
    assert said.count("is gone. This process ends, too") == 2, said


# A run of two processes. Each prints what it maps; the second may be unable to.
MAPS = """
import os, re, sys
config, rank, port, what = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.engine.memory.machine_weights import MachineWeights
from simpletune.stages.step.train_step import TrainStep
step, steps = TrainStep.step, []
def look(self, *words):
    steps.append(1)
    if len(steps) == 2:
        pattern = "(?m)^[0-9a-f-]+ rw-s.*memfd:simpletune.*\\n(?:[A-Z].*\\n)+"
        for found in re.findall(pattern, open("/proc/self/smaps").read()):
            print("mapped", found.split()[4], *re.findall("(?m)^(?:Rss|Pss): +([0-9]+)", found))
        kept = re.findall("(?m)/dev/shm/.*(?<! \\(deleted\\))$", open("/proc/self/maps").read())
        print("kept in /dev/shm:", kept, flush=True)
    return step(self, *words)
def fail(offer):
    raise PermissionError(13, "Permission denied", "/proc/1/fd/9")
TrainStep.step = look
if what == "refused":
    MachineWeights.join = fail
sys.exit(main(["train", config]))
"""


def mapping(launcher: Launcher, data: dict[str, Any], place: Path, what: str = "") -> Outcome:
    (place / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        return launcher.programs(MAPS, *([str(place / "config.json"), str(rank), port, what] for rank in (0, 1)))


def test_two_processes_hold_one_copy_and_leave_nothing(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    data = unwatched(ground, "one-copy", memory=LEVERS)
    outcome = mapping(launcher, data, tmp_path)
    assert outcome.codes == [0, 0], outcome.said
    mapped = [re.findall(r"^mapped (\d+) (\d+) (\d+)$", said, re.MULTILINE) for said in outcome.said]
    assert len(mapped[0]) == len(mapped[1]) == 1, outcome.said
    (first, rss, pss), (second, others, _) = mapped[0][0], mapped[1][0]
    assert first == second, "the same file"
    assert int(rss) >= int(others) > 0 and int(pss) <= 0.6 * int(rss), "each page counts half for each of two"
    assert all("kept in /dev/shm: []" in said for said in outcome.said), "one that is killed leaves none"
    require_same(run_of(data), whole[0])


def test_a_process_that_cannot_share_has_its_own_copy(
    launcher: Launcher, whole: tuple[Path, list[str]], ground: dict[str, Any], tmp_path: Path
) -> None:
    data = unwatched(ground, "copy-refused", memory=LEVERS)
    outcome = mapping(launcher, data, tmp_path, "refused")
    assert outcome.codes == [0, 0] and "mapped" in outcome.said[0] and "mapped" not in outcome.said[1]
    said = "warning 1 process has its own copy of the frozen weights in host memory, which takes as much memory"
    assert f"{said} again: [Errno 13] Permission denied: '/proc/1/fd/9'" in outcome.said[0]
    require_same(run_of(data), whole[0])
