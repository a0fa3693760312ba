"""Full fine-tuning with weights divided among processes (``train.fsdp``) against one process that holds all."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher, Outcome, free_port
from PIL import Image
from reference.adamw import adamw_step
from safetensors.torch import load_file
from tiny_runs import merged

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import validate
from simpletune.data.demo import demo_scenes
from simpletune.engine.fsdp.fsdp_model import process_starts
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.optim.place import (
    SMALLEST,
    ParameterRange,
    PartGenerator,
    StatePiece,
    dequantise_blocks,
    join_state,
    quantise_blocks,
)
from simpletune.engine.quant.precision import FP32
from simpletune.estimate.simulate.processes import fake_processes, simulate_one_of
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints, saved_file
from simpletune.runs.folder import read_metrics, read_rows
from simpletune.runs.weights import overwrite
from simpletune.runs.weights_names import CheckpointRef, find_in_run
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import ConfigError
from simpletune.system.safetensors_file import WeightReader
from simpletune.training.train import train

STEPS = 6


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with two buckets, whose epoch of 11 micro-batches ends with a step of three."""
    place = tmp_path_factory.mktemp("fsdp")
    tiny_sd3.build(place / "pipeline", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=1, dtype="fp32")
    demo_scenes.write_folder(place / "pictures", demo_scenes.sample_scenes(11, seed=3, style="flat"), seed=3, pixels=64)
    for file in sorted((place / "pictures").glob("*.png"))[:4]:
        Image.open(file).resize((96, 32)).save(file)
    return {
        "name": "one",
        "device": "cpu",
        "model": {"pretrained": str(place / "pipeline"), "t5_length": 8},
        "data": {"path": str(place / "pictures"), "resolution": 32, "caption_dropout": 0.3},
        "adapter": {"method": "full"},
        "precision": {"weights": "fp32"},
        "optimizer": {"name": "adamw", "lr": 0.001},
        "train": {"steps": STEPS, "gradient_accumulation": 4, "fsdp": "full", "clip_norm": 0.5},
        "ema": {"decay": 0.9},
        "memory": {"checkpointing": "all"},
        "checkpoint": {"every": 2},
        "validation": {"prompts": [], "loss_samples": 2},
        "profile": {"max_traces": 0},
        "output": {name: str(place / name) for name in ("runs", "profiles", "cache")} | {"report": False},
    }


def changed(ground: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return merged(ground, name=name, **changes)


def run_of(data: dict[str, Any]) -> Path:
    return Path(data["output"]["runs"]) / data["name"]


def trained(launcher: Launcher, data: dict[str, Any], processes: int, **how: Any) -> Outcome:
    outcome = launcher.train(*[data] * processes, **how)
    assert outcome.codes == [0] * processes, outcome.said
    return outcome


def killed(launcher: Launcher, data: dict[str, Any], processes: int, rank: int, moment: str) -> None:
    """One process is killed at a moment; a launcher then ends the others."""
    outcome = launcher.train(*[data] * processes, moments={rank: moment})
    assert outcome.codes[rank] == -9 and 0 not in outcome.codes, outcome.said


def saved(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and averages of a checkpoint, joined by hand: the rows of all its files in their order."""
    folder, found = checkpoint_folder(run, step), {}
    for kind in ("trainable", "ema"):
        files = sorted(folder.glob(f"{kind}-*.safetensors")) or [folder / f"{kind}.safetensors"]
        parts = [load_file(file) for file in files]
        for name in dict.fromkeys(name for part in parts for name in part):
            found[f"{kind}:{name}"] = torch.cat([part[name] for part in parts if name in part])
    return found


def require_close_rows(run: Path, other: Path) -> None:
    rows = [[[row[key] for key in ("loss", "grad_norm")] for row in read_metrics(each)] for each in (run, other)]
    torch.testing.assert_close(*map(torch.tensor, rows), rtol=1e-4, atol=1e-6)


def require_close(run: Path, other: Path) -> None:
    """The stated tolerance: sums of fp32 gradients in another order, over all steps."""
    torch.testing.assert_close(saved(run), saved(other), rtol=1e-3, atol=1e-5)
    require_close_rows(run, other)
    rows = [[row["eval_loss"] for row in read_rows(each / "evaluations.jsonl")] for each in (run, other)]
    torch.testing.assert_close(*map(torch.tensor, rows), rtol=1e-4, atol=1e-6)


def require_same_bits(run: Path, other: Path) -> None:
    """Every file of the last checkpoints, apart from the configuration, and every figure."""
    folders = [checkpoint_folder(each, STEPS) for each in (run, other)]
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        mine, others = (load_file(folder / name) for folder in folders)
        assert mine.keys() == others.keys()
        assert [key for key in mine if not torch.equal(mine[key], others[key])] == [], name
    rows, other_rows = ([{**row, "seconds": 0} for row in read_metrics(each)] for each in (run, other))
    assert rows == other_rows and len(rows) == STEPS


@pytest.fixture(scope="module")
def one(ground: dict[str, Any]) -> Path:
    """One process, which holds everything."""
    return train(validate(ground, "test"))


@pytest.fixture(scope="module")
def two(launcher: Launcher, ground: dict[str, Any]) -> tuple[Path, Outcome]:
    """Two processes, never stopped."""
    data = changed(ground, "two")
    return run_of(data), trained(launcher, data, 2)


def test_two_processes_train_what_one_does(one: Path, two: tuple[Path, Outcome]) -> None:
    require_close(two[0], one)
    exported = load_file(two[0] / "transformer" / "diffusion_pytorch_model.safetensors")
    alone = load_file(one / "transformer" / "diffusion_pytorch_model.safetensors")
    torch.testing.assert_close(exported, alone, rtol=1e-3, atol=1e-5)
    averages = {name[4:]: tensor for name, tensor in saved(two[0]).items() if name.startswith("ema:")}
    assert [name for name in averages if not torch.equal(averages[name], exported[name])] == []
    configs = [json.loads((run / "transformer" / "config.json").read_text()) for run in (two[0], one)]
    assert configs[0] == configs[1]
    figures = [json.loads((run / "summary.json").read_text()) for run in (two[0], one)]
    assert figures[0]["trainable_parameters"] == figures[1]["trainable_parameters"]


def test_each_process_writes_its_rows_and_the_index_says_which(two: tuple[Path, Outcome]) -> None:
    folder = checkpoint_folder(two[0], STEPS)
    index = json.loads((folder / "trainable.shards.json").read_text())
    parts = [load_file(folder / each["file"]) for each in index["files"]]
    assert len(parts) == index["processes"] == 2
    sizes = [sum(tensor.numel() for tensor in part.values()) for part in parts]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sum(sizes)
    for name, about in index["parameters"].items():
        counts = [part[name].numel() if name in part else 0 for part in parts]
        whole = torch.Size(about["shape"]).numel()
        assert [about["starts"][1], whole - about["starts"][1]] == counts, name
    reader = WeightReader([saved_file(folder, "trainable.safetensors")])
    assert {name: list(reader.get(name).shape) for name in reader.names} == {
        name: about["shape"] for name, about in index["parameters"].items()
    }
    named = find_in_run(CheckpointRef(two[0], STEPS))
    assert named.trained == folder / "ema.shards.json"
    model = validate(json.loads((two[0] / "config.json").read_text()), "test").model.load_denoiser(FP32(), CPU, 0)
    overwrite(model, named.trained)  # as generate, compare and finish do
    exported = load_file(two[0] / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(parameter, exported[name]) for name, parameter in model.named_parameters())
    listed = checkpoint.read_checkpoint(folder)  # every file has a checksum, and all are as they were
    assert listed.processes == 2
    state = json.loads((folder / "state.json").read_text())
    assert set(state["sha256"]) == {file.name for file in folder.iterdir()} - {"state.json"}


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_last_checkpoint_and_the_run_goes_on_in_the_same_bits(
    launcher: Launcher, two: tuple[Path, Outcome], ground: dict[str, Any]
) -> None:
    data = changed(ground, "killed")
    killed(launcher, data, 2, rank=1, moment="checkpoint.part:2=kill")
    assert [step for step, _ in list_checkpoints(run_of(data))] == [2]
    checkpoint.read_checkpoint(checkpoint_folder(run_of(data), 2))
    said = trained(launcher, data, 2, resume="auto").said[0]
    assert "step 2 of 6" in said
    require_same_bits(run_of(data), two[0])


@pytest.mark.slow
def test_two_processes_go_on_as_one(launcher: Launcher, one: Path, ground: dict[str, Any]) -> None:
    data = changed(ground, "two-then-one")
    killed(launcher, data, 2, rank=0, moment="step.begun:5=kill")
    said = trained(launcher, data, 1, resume="auto").said[0]
    assert "resume  changed processes: 2 -> 1" in said and "step 4 of 6" in said
    require_close(run_of(data), one)
    assert (checkpoint_folder(run_of(data), STEPS) / "trainable.safetensors").is_file()


@pytest.mark.slow
def test_a_full_disk_of_another_process_is_said_and_nothing_half_is_left(
    launcher: Launcher, ground: dict[str, Any]
) -> None:
    data = changed(ground, "full-disk", ema=None, validation={"loss_samples": 0})
    outcome = launcher.train(data, data, moments={1: "checkpoint.part:1=full"})
    assert outcome.codes[0] != 0
    assert "process 1 could not write its part of" in outcome.said[0] and "No space left" in outcome.said[0]
    assert list_checkpoints(run_of(data)) == []
    trained(launcher, data, 2, resume="auto")


@pytest.mark.slow
def test_the_first_process_draws_and_answers_while_the_others_help(launcher: Launcher, ground: dict[str, Any]) -> None:
    """The pictures of a divided model are those of a whole one; requests reach all processes."""
    looks = {"prompts": ["a red disc"], "steps": 2, "every": 2, "loss_samples": 2}
    short = {"steps": 3, "gradient_accumulation": 2}
    names = ("drawn-one", "drawn-two")
    for count, name in enumerate(names, 1):
        trained(launcher, changed(ground, name, validation=looks, train=short), count)
    runs = [run_of(changed(ground, name)) for name in names]
    shots = [sorted(file.relative_to(run / "samples") for file in (run / "samples").rglob("*.png")) for run in runs]
    assert shots[0] == shots[1] and len(shots[0]) >= 3
    for shot in shots[0]:
        one, two = (Image.open(run / "samples" / shot).convert("L").resize((8, 8)) for run in runs)
        worst = max(abs(a - b) for a, b in zip(one.getdata(), two.getdata(), strict=True))
        assert worst <= 3, (shot, worst)
    require_close_rows(*runs)


# A process of a run whose evaluation after two steps fails in the first process, between the passes of two blocks.
FAILS = """
import os, sys
config, rank, port = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
from simpletune.apps.cli.main import main
from simpletune.training.validation_loss import LossEvaluator
evaluate = LossEvaluator.evaluate
def fail(*words):
    raise RuntimeError("no memory is left")
def fails(self, denoiser, step):
    hook = denoiser.transformer_blocks[1].register_forward_pre_hook(fail) if step == 2 and rank == "0" else None
    try:
        return evaluate(self, denoiser, step)
    finally:
        if hook is not None:
            hook.remove()
LossEvaluator.evaluate = fails
sys.exit(main(["train", config]))
"""


@pytest.mark.slow
def test_a_failed_evaluation_of_the_first_process_leaves_all_in_step(
    launcher: Launcher, two: tuple[Path, Outcome], ground: dict[str, Any], tmp_path: Path
) -> None:
    """The others do not wait in its collectives, and none of these is paired with one of the next step."""
    data = changed(ground, "failed")
    (tmp_path / "config.json").write_text(json.dumps(data))
    with free_port() as port:
        outcome = launcher.programs(FAILS, *([str(tmp_path / "config.json"), rank, port] for rank in ("0", "1")))
    assert outcome.codes == [0, 0], outcome.said
    assert "the validation loss failed (RuntimeError: no memory is left); training continues" in outcome.said[0]
    assert [row["step"] for row in read_rows(run_of(data) / "evaluations.jsonl")] == [0, 4, 6]
    require_same_bits(run_of(data), two[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lora": ({"adapter": {"method": "lora"}}, "train.fsdp: full divides what trains"),
    "partial": ({"adapter": {"method": "partial", "layers": ["*.bias"]}}, "train.fsdp: full divides what trains"),
    "adafactor": ({"optimizer": {"name": "adafactor"}}, "keeps means over whole rows and columns"),
    "prodigy": ({"optimizer": {"name": "prodigy", "lr": 1.0}}, "estimates one learning rate from all gradients"),
    "paged": ({"optimizer": {"name": "paged_adamw8bit"}}, "pages state to host memory"),
    "streamed": (
        {"memory": {"resident_blocks": 1, "optimizer_in_backward": True}, "train": {"clip": "per_parameter"}},
        "memory.resident_blocks: 1 offloads blocks",
    ),
    "in_backward": (
        {"memory": {"optimizer_in_backward": True}, "train": {"clip": "per_parameter", "gradient_accumulation": 1}},
        "memory.optimizer_in_backward: true updates each parameter on its own",
    ),
    "exact": ({"train": {"reduce": "exact"}}, "train.reduce: exact sums whole gradients"),
    "auto": (
        {"train": {"batch_size": "auto", "global_batch": 4, "gradient_accumulation": 1}, "memory": {"budget_gib": 4}},
        "train.batch_size: auto tries out a micro-batch",
    ),
    "compile": ({"speed": {"compile": True}}, "speed.compile: true compiles blocks"),
    "fp16": ({"precision": {"weights": "fp32", "compute": "fp16"}}, "precision.compute: fp16 undoes a step"),
    "unet": (
        {"model": {"family": "sd15", "pretrained": "demo:tiny-sd15"}},
        "train.fsdp: full divides a transformer block by block",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_with_a_remedy(case: str, ground: dict[str, Any]) -> None:
    changes, words = REFUSED[case]
    data = changed(ground, case)
    for section, values in changes.items():
        whole = values.keys() & {"method", "name", "family"}
        data[section] = values if whole else {**data.get(section, {}), **values}
    with pytest.raises(ConfigError) as refused:
        validate(data, "test", needs_model=case != "unet")
    assert words in str(refused.value) and "train.fsdp" in str(refused.value) and "Use " in str(refused.value)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_parts_are_those_of_torch(processes: int) -> None:
    for shape in ((7,), (4, 6), (1, 5), (9, 2, 3)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = [*whole.chunk(processes), *[whole[:0]] * processes][:processes]
        ends = torch.tensor([0, *(chunk.numel() for chunk in chunks)]).cumsum(0)
        assert list(process_starts(shape, processes)) == ends.tolist()


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_a_shard_draws_its_part_of_the_whole(kind: torch.dtype) -> None:
    whole = torch.empty(40, dtype=kind).random_(0, 1000, generator=torch.Generator().manual_seed(5))
    for start, count in ((0, 16), (16, 16), (32, 8)):
        draws = PartGenerator(torch.Generator().manual_seed(5), ParameterRange(3, start, 40))
        mine = draws.draw(torch.empty(count // 4, 4, dtype=kind), 0, 1000)
        assert torch.equal(mine.view(-1), whole[start : start + count])


def test_state_is_joined_and_cut_in_any_way() -> None:
    chance = random.Random(4)
    whole = torch.arange(97.0)
    for _ in range(50):
        cuts = sorted({0, 97, *(chance.randrange(97) for _ in range(3))})
        pieces = [
            StatePiece(a, b, {"exp_avg": whole[a:b].view(1, -1), "step": torch.tensor(7.0)})
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        start = chance.randrange(96)
        stop = chance.randrange(start + 1, 98)
        state = join_state([p for p in pieces if p.start < stop and start < p.stop], start, stop)
        torch.testing.assert_close(state, {"exp_avg": whole[start:stop], "step": torch.tensor(7.0)}, rtol=0, atol=0)
    with pytest.raises(ValueError, match="lack"):
        join_state([StatePiece(0, 5, {"exp_avg": whole[:5]})], 0, 6)


def eight_bit(x: torch.Tensor) -> dict[str, Any]:
    """State as bitsandbytes keeps it, by its own quantisation."""
    from bitsandbytes.functional import create_dynamic_map, quantize_blockwise

    state: dict[str, Any] = {"step": 3}
    for letter, signed, values in (("1", True, x), ("2", False, x.square())):
        table = create_dynamic_map(signed=signed)
        numbers, about = quantize_blockwise(values, code=table, blocksize=256)
        state |= {f"state{letter}": numbers, f"qmap{letter}": about.code, f"absmax{letter}": about.absmax}
    return state


def test_eight_bit_state_keeps_its_bits_where_its_blocks_stay() -> None:
    x = torch.randn(4 * SMALLEST, generator=torch.Generator().manual_seed(1))
    halves = [eight_bit(half) for half in x.chunk(2)]
    pieces = [StatePiece(0, 2 * SMALLEST, halves[0]), StatePiece(2 * SMALLEST, 4 * SMALLEST, halves[1])]
    whole = join_state(pieces, 0, 4 * SMALLEST)
    reference = eight_bit(x)
    for name in ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"):
        assert torch.equal(whole[name], reference[name]), name
    again = join_state([StatePiece(0, 4 * SMALLEST, whole)], SMALLEST, 2 * SMALLEST)
    assert torch.equal(again["state1"], halves[0]["state1"][SMALLEST:]) and again["step"] == 3


def test_eight_bit_state_is_quantised_anew_where_they_do_not() -> None:
    def wide(state: dict[str, Any]) -> torch.Tensor:
        return dequantise_blocks(state["state1"], state["qmap1"], state["absmax1"])

    x = torch.randn(2 * SMALLEST + 200, generator=torch.Generator().manual_seed(2))
    cut = SMALLEST + 100
    pieces = [StatePiece(0, cut, eight_bit(x[:cut])), StatePiece(cut, len(x), eight_bit(x[cut:]))]
    kept = torch.cat([wide(piece.values) for piece in pieces])  # type: ignore[arg-type]
    whole = join_state(pieces, 0, len(x))
    assert whole["state1"].dtype == torch.uint8 and whole["absmax1"].shape == (-(-len(x) // 256),)
    blocks = torch.nn.functional.pad(kept, (0, -len(x) % 256)).view(-1, 256).abs().amax(1)
    error = (wide(whole) - kept).abs() / blocks.repeat_interleave(256)[: len(x)]
    assert error.max() < 0.04  # half of the widest gap of the table, and some
    small = join_state([pieces[0]], 50, 150)
    assert small["state1"].dtype == torch.float32 and torch.equal(small["state1"], kept[50:150])
    table = whole["qmap1"]
    numbers, scales = quantise_blocks(torch.zeros(300), table)
    assert torch.equal(dequantise_blocks(numbers, table, scales), torch.zeros(300))


# A model divided between two processes, its gradients and updates beside those of a whole one.
BY_HAND = """
import os, sys
rank, port = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
sys.path[:0] = ["tests", "tests/support", "tests/engine/fsdp"]
import torch
from torch import distributed
torch.set_num_threads(1)
distributed.init_process_group("gloo")
import test_sharding
test_sharding.by_hand(int(rank))
distributed.barrier()
distributed.destroy_process_group()
"""


class Net(torch.nn.Module):
    """Layers with uneven numbers of rows, one of which the second process has none of."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.GELU(), torch.nn.Linear(7, 9)) for _ in range(2)]
        )
        self.out, self.scale = torch.nn.Linear(9, 3), torch.nn.Parameter(torch.full((1, 3), 1.5))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * self.scale


def by_hand(rank: int) -> None:
    """Three steps of AdamW in fp32 by the paper's equations, and in bf16 by rounding a whole model's gradients."""
    from simpletune.engine.fsdp.fsdp_model import FsdpModel, local_rows
    from simpletune.engine.fsdp.rank_zero import gather_parameter
    from simpletune.engine.optim.options import AdamW
    from simpletune.engine.optim.rounding import key_draws

    if rank == 0:  # as the first process predicts its memory; it must not gather with the group of a simulation later
        with fake_tensors(), fake_processes(2):
            simulated = Net(torch.float32)
            FsdpModel(simulated, list(simulated.blocks), torch.device("cpu"))
            simulated(torch.ones(2, 9)).sum().backward()
    for dtype in (torch.float32, torch.bfloat16):
        whole, divided = Net(dtype), Net(dtype)
        fsdp = FsdpModel(divided, list(divided.blocks), torch.device("cpu"))
        option = AdamW(lr=0.01, weight_decay=0.1)
        optimizer = option.build(fsdp.held.values(), False, None, fsdp.places)
        alone = option.build(whole.parameters())
        means = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in whole.named_parameters()}
        for step in range(1, 4):
            inputs = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step)).to(dtype)
            for x in inputs:  # the mean over the processes
                (whole(x).float().square().mean() / 2).backward()
            divided(inputs[rank]).float().square().mean().backward()
            taken = fsdp.take_gradients()
            norms = fsdp.norms(taken)
            rtol, atol = (1e-5, 1e-7) if dtype == torch.float32 else (2e-2, 1e-3)
            wanted = [gradient_of(p).float().norm() for p in whole.parameters()]
            torch.testing.assert_close(norms, wanted, rtol=rtol, atol=atol)
            fsdp.clip_each(taken, norms, 0.3)
            for p in whole.parameters():
                torch.nn.utils.clip_grad_norm_([p], 0.3)
            same_gradients(fsdp, whole, rtol, atol)
            key_draws(optimizer, 5, step)
            key_draws(alone, 5, step)
            optimizer.step()
            if dtype == torch.bfloat16:
                alone.step()
            else:
                with torch.no_grad():
                    for name, p in whole.named_parameters():
                        new, *kept = adamw_step(p, gradient_of(p), means[name], step, 0.01, (0.9, 0.999), 1e-8, 0.1)
                        means[name] = (kept[0], kept[1])
                        p.copy_(new)
            for name, p in whole.named_parameters():
                mine = p.detach().reshape(-1)[fsdp.shards[name].place.start :][: fsdp.shards[name].held.numel()]
                got = fsdp.shards[name].held.detach().reshape(-1)
                if dtype == torch.bfloat16:
                    assert torch.equal(got, mine), (name, step)
                else:
                    torch.testing.assert_close(got, mine, rtol=1e-5, atol=1e-7)
                assert torch.equal(local_rows(fsdp.shards[name].whole.detach()).reshape(-1), got)
                gathered = gather_parameter(fsdp.shards[name], fsdp.group)
                torch.testing.assert_close(gathered, p.detach(), rtol=1e-5, atol=1e-7)
            optimizer.zero_grad()
            alone.zero_grad()
            whole.zero_grad()


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def same_gradients(fsdp: Any, whole: torch.nn.Module, rtol: float, atol: float) -> None:
    """Compare the clipped gradients, then give the parts exactly those of the whole model."""
    for name, p in whole.named_parameters():
        shard = fsdp.shards[name]
        mine = gradient_of(p).reshape(-1)[shard.place.start :][: shard.held.numel()]
        if shard.held.numel():
            torch.testing.assert_close(shard.held.grad.reshape(-1), mine, rtol=rtol, atol=atol)
            shard.held.grad.copy_(mine.view(shard.held.shape))


def test_gradients_norms_and_updates_by_hand(launcher: Launcher) -> None:
    with free_port() as port:
        outcome = launcher.programs(BY_HAND, ["0", port], ["1", port])
    assert outcome.codes == [0, 0], outcome.said


def test_the_memory_of_each_process_is_predicted_from_its_parts(ground: dict[str, Any]) -> None:
    """Against arithmetic: rows, two moments each, and what is gathered of the root and of one or two blocks."""
    config = validate(changed(ground, "predicted", ema=None), "test")
    reports = []
    for count in (1, 2):
        with simulate_one_of(count):
            reports.append(simulate(config))
    whole, half = reports
    sizes = {name: torch.Size(shape).numel() * 4 for name, shape in whole.trained.items()}
    own = sum(process_starts(shape, 2)[1] * 4 for shape in whole.trained.values())
    assert half.trained == whole.trained and whole.trained_bytes == sum(sizes.values())
    assert half.trained_bytes == own
    counters = whole.state_bytes - 2 * whole.trained_bytes
    assert half.state_bytes == 2 * own + counters
    blocks = [sum(size for name, size in sizes.items() if f"blocks.{number}." in name) for number in (0, 1)]
    root = sum(sizes.values()) - sum(blocks)
    gathered = half.peak.by_kind["weights"] - own
    assert root < gathered < root + 4.2 * max(blocks), "the buffer of a gather and its copies, of two blocks"
    assert half.peak.bytes < whole.peak.bytes


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later"), [(4, 4), (4, 2), (4, 1), (1, 2)])
def test_any_number_of_processes_goes_on(
    launcher: Launcher, one: Path, ground: dict[str, Any], first: int, later: int
) -> None:
    data = changed(ground, f"{first}-then-{later}")
    killed(launcher, data, first, rank=0, moment="step.begun:5=kill")
    trained(launcher, data, later, resume="auto")
    require_close(run_of(data), one)
    if first == later:
        unbroken = changed(ground, "four")
        trained(launcher, unbroken, 4)
        require_same_bits(run_of(data), run_of(unbroken))


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "adamw8bit": ({"optimizer": {"name": "adamw8bit", "lr": 0.001}}, 2e-3),
    "adamw_bf16": ({"optimizer": {"name": "adamw_bf16", "lr": 0.001}}, 2e-3),
    "schedule_free": ({"optimizer": {"name": "adamw_schedule_free", "lr": 0.001}, "ema": None}, 2e-3),
    "bf16": ({"precision": {"weights": "bf16"}}, 1.5e-2),
    "per_parameter": ({"train": {"clip": "per_parameter", "clip_norm": 0.01}}, 1e-4),
    "skip": ({"train": {"on_nonfinite": "skip"}}, 1e-4),
    "resident": ({"memory": {"checkpointing": "none"}}, 1e-4),
    "offloaded": ({"memory": {"checkpointing": "all", "offload_checkpoint_inputs": True}}, 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_options_train_what_one_process_does(launcher: Launcher, ground: dict[str, Any], case: str) -> None:
    """Two processes, killed and continued, against one; 8-bit state has other blocks, and bf16 rounds other sums."""
    changes, tolerance = OPTIONS[case]
    alone, data = (changed(ground, f"{case}-{count}", **changes) for count in (1, 2))
    trained(launcher, alone, 1)
    killed(launcher, data, 2, rank=1, moment="step.begun:4=kill")
    trained(launcher, data, 2, resume="auto")
    rows = [torch.tensor([row["loss"] for row in read_metrics(run_of(each))]) for each in (data, alone)]
    torch.testing.assert_close(*rows, rtol=tolerance, atol=1e-6)
