"""The modulation plan against the resident path: outputs, gradients, losses, resuming, pictures, bytes, refusals."""

from __future__ import annotations

import copy
import itertools
import json
import math
import weakref
from argparse import ArgumentParser
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from blocks import predict_velocity
from diffusers import SD3Transformer2DModel
from PIL import Image
from safetensors.torch import load_file
from slow_cases import slow_but
from tiny_runs import resumed_from
from torch import Tensor, nn

from benchmarks.tiny_models import tiny_sd3
from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.generate import generate_arguments
from simpletune.commands.generate.generate import generate
from simpletune.config.load import validate
from simpletune.config.modulation import settle_modulation
from simpletune.config.prior import NoPrior
from simpletune.config.resolve import require_model_rules
from simpletune.data.demo import demo_scenes
from simpletune.engine.quant.precision import BF16, FP32, Int8, Int8Quanto, WeightPrecision
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs import checkpoint
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import read_metrics
from simpletune.stages.modulation_plan import DetachedModulation, ModulationPlan, detach_modulation, replay
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.stages.step.assignment import RankMicroBatches
from simpletune.stages.step.batch_loader import TrainingPasses
from simpletune.system.console import verbose
from simpletune.system.options import ConfigError
from simpletune.training import set_up as setting_up
from simpletune.training.set_up import set_up
from simpletune.training.train import train

CPU = torch.device("cpu")
PRECISIONS = {
    "fp32": FP32(), "fp32-bf16": FP32(compute="bf16"), "bf16": BF16(), "int8-fp32": Int8(compute="fp32"),
    "int8-bf16": Int8(), "int8-rotated": Int8(compute="fp32", rotation="hadamard"),
    "quanto-fp32": Int8Quanto(compute="fp32"), "quanto-bf16": Int8Quanto(),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A two-layer pipeline (one whole block, one last block) and pictures of several shapes."""
    root = tmp_path_factory.mktemp("modulation")
    tiny_sd3.build(root / "pipeline", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=5, dtype="fp32")
    scenes = demo_scenes.sample_scenes(6, seed=4, style="striped")
    demo_scenes.write_folder(root / "data", scenes, seed=4, pixels=64)
    for number, size in enumerate([(96, 32), (32, 96)]):
        file = root / "data" / f"00{number}.png"
        Image.open(file).resize(size).save(file)
    return root / "pipeline", root / "data"


@pytest.fixture
def config_json(inputs: tuple[Path, Path], tiny_config: dict) -> dict:
    """Several buckets, accumulation, caption dropout, checkpointing; the window ends amid the run."""
    return tiny_config | {
        "model": {"pretrained": str(inputs[0]), "t5_length": 8},
        "data": {"path": str(inputs[1]), "resolution": 32, "caption_dropout": 0.3},
        "train": {"steps": 6, "batch_size": 2, "gradient_accumulation": 2},
        "memory": {"checkpointing": "all", "modulation": "plan", "modulation_window": 4},
    }


def run_with(data: dict, resume: str | None = None, **changes: object) -> Path:
    data = copy.deepcopy(data)
    for section, values in changes.items():
        data[section] = {**data[section], **values} if isinstance(values, dict) else values
    return train(validate(data, "test"), resume)


def losses_of(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


def model_of(pipeline: Path, precision: WeightPrecision) -> nn.Module:
    return SD3(pretrained=str(pipeline)).load_denoiser(precision, CPU)


def arguments(model: nn.Module, rows: int, tokens: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    config = model.config
    return {
        "z_t": torch.randn(rows, config.in_channels, 4, 6, generator=generator),
        "sigma": torch.rand(rows, generator=generator),
        "prompt_embeds": torch.randn(rows, tokens, config.joint_attention_dim, generator=generator),
        "pooled": torch.randn(rows, config.pooled_projection_dim, generator=generator),
    }


def velocity_and_gradients(
    model: nn.Module, precision: WeightPrecision, given: dict[str, Tensor]
) -> tuple[Tensor, list]:
    with precision.autocast_on(CPU):
        velocity = predict_velocity(model, **given, dtype=precision.compute_dtype())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(velocity.float().square().mean(), trained, allow_unused=True)
    return velocity.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=pytest.mark.slow), True], ids=["kept", "checkpointed"]
)
@pytest.mark.parametrize("name", slow_but(set(PRECISIONS) - {"int8-fp32", "quanto-fp32"}, PRECISIONS))
def test_outputs_and_lora_gradients_are_those_of_the_resident_path_bit_for_bit(name, checkpointing, inputs) -> None:
    precision, adapter = PRECISIONS[name], Lora(rank=2)
    resident, planned = model_of(inputs[0], precision), model_of(inputs[0], precision)
    modulation = detach_modulation(planned, SD3Architecture.modulation, precision, CPU, 4)
    for model in (resident, planned):
        adapter.attach(model, seed=1)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3), std=0.1)
        if checkpointing:
            model.train().enable_gradient_checkpointing()
    given = arguments(resident, rows=3)
    expected = velocity_and_gradients(resident, precision, given)
    rows = modulation(1000.0 * given["sigma"], given["pooled"])
    replay(planned, rows)
    actual = velocity_and_gradients(planned, precision, given | {"pooled": None})
    assert rows.dtype == precision.encoder_dtype()
    assert torch.equal(actual[0], expected[0])
    assert len(actual[1]) == len(expected[1]) > 10
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual[1], expected[1], strict=True))


@pytest.mark.parametrize("name", ["bf16", "int8-bf16", "quanto-bf16"])
def test_the_host_pins_no_more_than_the_weights(name: str, inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own pinned memory comes in powers of two: 13.5 MiB would take 16."""
    pinned: dict[int, int] = {}

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pinned[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(Tensor, "pin_memory", None)
    precision = PRECISIONS[name]
    plain = detach_modulation(model_of(inputs[0], precision), SD3Architecture.modulation, precision, CPU, 4)
    hosted = detach_modulation(
        model_of(inputs[0], precision), SD3Architecture.modulation, precision, torch.device("cuda"), 4
    )
    known = {}
    for ours, theirs in zip((hosted.embed, *hosted.layers), (plain.embed, *plain.layers), strict=True):
        values = [(*module.named_parameters(), *module.named_buffers()) for module in (ours, theirs)]
        assert len(values[0]) == len(values[1]) > 0
        for (_, tensor), (_, expected) in zip(*values, strict=True):
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
            if type(tensor.data) is Tensor:  # quanto's cannot be pinned
                known[tensor.data_ptr()] = tensor.nbytes
    assert pinned == known and len(pinned) >= 4


def test_sd3_5_with_dual_attention() -> None:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8, num_layers=3, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=24,
        caption_projection_dim=16, pooled_projection_dim=14, pos_embed_max_size=8, dual_attention_layers=(0, 2),
        qk_norm="rms_norm",
    ).requires_grad_(False)  # fmt: skip
    model.units = ("transformer_blocks.0", "transformer_blocks.1", "transformer_blocks.2")
    given = arguments(model, rows=2)
    expected = predict_velocity(model, **given, dtype=torch.float32)
    modulation = detach_modulation(model, SD3Architecture.modulation, FP32(), CPU, 4)
    assert modulation.width == (9 + 6 + 6 + 6 + 9 + 2 + 2) * 16
    replay(model, modulation(1000.0 * given["sigma"], given["pooled"]))
    assert torch.equal(predict_velocity(model, **given | {"pooled": None}, dtype=torch.float32), expected)


PLANNED = [("fp32", 1e-6), ("fp32-bf16", 5e-3), ("bf16", 5e-3), ("int8-fp32", 1e-6), ("int8-bf16", 5e-3),
           ("quanto-fp32", 1e-6)]  # fmt: skip


@pytest.mark.parametrize("name, tolerance", slow_but([("int8-fp32", 1e-6)], PLANNED))
def test_losses_are_those_of_the_resident_path(name: str, tolerance: float, config_json: dict) -> None:
    config_json["precision"] = PRECISIONS[name].model_dump()
    config_json["train"] |= {"steps": 3}
    config_json["memory"] |= {"modulation_window": 2}
    config_json["validation"] |= {"loss_samples": 2}
    runs = [run_with(config_json, name=kind, memory={"modulation": kind}) for kind in ("plan", "resident")]
    ours, theirs = (losses_of(run) for run in runs)
    print(f"{name}: largest relative difference {max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)):.2e}")
    assert ours == pytest.approx(theirs, rel=tolerance)
    assert len(set(ours)) == len(ours) == 3
    for key in ("eval_loss_before", "eval_loss_after"):
        ours, theirs = (json.loads((run / "summary.json").read_text())[key] for run in runs)
        assert ours == pytest.approx(theirs, rel=tolerance)


@pytest.mark.parametrize("name", slow_but(["int8-bf16"], ["fp32", "bf16", "int8-bf16"]))
def test_losses_and_weights_are_bit_for_bit_where_the_rows_are_the_same(name: str, config_json: dict) -> None:
    config_json["precision"] = PRECISIONS[name].model_dump()
    config_json["train"] = {"steps": 2, "batch_size": 2}
    kinds = ({"modulation": "plan", "modulation_window": 1}, {"modulation": "resident"})
    runs = [run_with(config_json, name=kind["modulation"], memory=kind) for kind in kinds]
    assert losses_of(runs[0]) == losses_of(runs[1])
    ours, theirs = (load_file(checkpoint.checkpoint_folder(run, 2) / checkpoint.TRAINABLE) for run in runs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("done, name", slow_but([(3, "int8-bf16")], product((1, 3), ("fp32", "int8-bf16"))))
def test_resuming_amid_a_window_is_bit_for_bit(done: int, name: str, config_json: dict) -> None:
    config_json |= {"precision": PRECISIONS[name].model_dump(), "checkpoint": {"every": 1, "keep_last": "all"}}
    config_json["train"] |= {"steps": 5}
    config_json["memory"] |= {"modulation_window": 2}
    whole = run_with(config_json, name="whole")
    halves = resumed_from(whole, config_json, done)
    assert losses_of(halves) == losses_of(whole)
    ours, theirs = (load_file(checkpoint.checkpoint_folder(run, 5) / checkpoint.TRAINABLE) for run in (halves, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_windows_lie_on_multiples_and_always_hold_as_many_rows(config_json: dict, tmp_path: Path) -> None:
    run = set_up(validate(config_json, "test"), AttemptRecorder(tmp_path, 0.0))
    asked: list[int] = []
    planned = run.batches.modulations
    assert planned is not None

    class Counting(DetachedModulation):
        def __init__(self) -> None:
            self.__dict__ |= planned.modulation.__dict__

        def __call__(self, time: Tensor, pooled: Tensor | None, portions: int = 1) -> Tensor:
            asked.append(len(time))
            return super().__call__(time, pooled, portions)

    def rows_of(*steps: int) -> list[Tensor]:
        counting = ModulationPlan(Counting(), run.prepared.plan, planned.time, run.prepared.text.pooled)
        return [counting.step_modulations(step) for step in steps]

    forward = rows_of(0, 1, 2, 3, 4, 5)
    assert asked == [4 * 2 * 2] * 2
    for step in (5, 2):
        assert torch.equal(rows_of(step)[0], forward[step])
    assert asked == [4 * 2 * 2] * 4
    for micro, draws in enumerate(run.prepared.plan.micro_batch(3, micro) for micro in range(2)):
        single = planned.modulations_of(draws)
        torch.testing.assert_close(forward[3][micro], single, rtol=1e-5, atol=1e-6)
    captions = [d.caption for step, micro in itertools.product(range(6), range(2))
                for d in run.prepared.plan.micro_batch(step, micro)]  # fmt: skip
    assert "" in captions, "caption dropout is part of what is compared"
    assert len({batch.z_0.shape for step in range(6) for batch in run.batches.step(step)}) > 1, "and so are buckets"


def test_apart_every_pass_of_a_step_has_a_product_of_its_own(config_json: dict, tmp_path: Path) -> None:
    """So that its number of rows, and with it the last bits, do not depend on how many processes share a step."""
    run = set_up(validate(config_json, "test"), AttemptRecorder(tmp_path, 0.0))
    planned, plan, seen = run.batches.modulations, run.prepared.plan, set()
    assert planned is not None
    planned.modulation.layers[0].register_forward_hook(lambda _, given, out: seen.add(len(given[0])))
    found: dict[tuple[int, int], Tensor] = {}
    for rank, processes in ((0, 1), (0, 2), (1, 2)):
        passes = TrainingPasses(plan, NoPrior(), RankMicroBatches(rank, processes, exact=True))
        apart = ModulationPlan(planned.modulation, passes, planned.time, run.prepared.text.pooled, apart=True)
        for step in range(6):
            rows = apart.step_modulations(step)
            for place, own in zip(passes.places(step), rows, strict=False):
                assert torch.equal(found.setdefault((step, place), own), own)
                if place < len(plan.micros(step)):
                    single = planned.modulations_of(plan.micro_batch(step, place))
                    torch.testing.assert_close(own, single, rtol=1e-5, atol=1e-6)
    assert seen - {plan.batch_size} == {planned.modulation.window * plan.batch_size}


def held_bytes(model: nn.Module) -> int:
    """Bytes of all that a model holds, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name, size", [("fp32", 4), ("bf16", 2), ("int8-bf16", 1)])
def test_what_stays_on_the_device_is_less_by_the_modulation(name: str, size: int, inputs: tuple[Path, Path]) -> None:
    resident, planned = (model_of(inputs[0], PRECISIONS[name]) for _ in range(2))
    modulation = detach_modulation(planned, SD3Architecture.modulation, PRECISIONS[name], CPU, 4)
    shapes = parameter_shapes(resident.config)
    plain = PRECISIONS[name].compute_dtype().itemsize
    expected = 0
    for parameter, shape in shapes.items():
        module = parameter.rpartition(".")[0]
        if SD3Architecture.modulation.serves(module):
            quantised = size == 1 and module.startswith("transformer_blocks.") and len(shape) == 2
            expected += math.prod(shape) + 4 * shape[0] if quantised else math.prod(shape) * plain
    assert held_bytes(resident) - held_bytes(planned) == expected
    assert sum(held_bytes(module) for module in (modulation.embed, *modulation.layers)) == expected
    assert not [
        name for name, _ in planned.named_parameters() if SD3Architecture.modulation.serves(name.rpartition(".")[0])
    ]


def test_the_share_of_sd3_medium() -> None:
    shapes = parameter_shapes(SD3().files.known_config())
    modulations = sum(
        math.prod(s) for name, s in shapes.items() if SD3Architecture.modulation.has(name.rpartition(".")[0])
    )
    width = sum(s[0] for name, s in shapes.items() if SD3Architecture.modulation.has(name.removesuffix(".bias")))
    assert width == 286 * 1536 and 2 * width == pytest.approx(0.88e6, rel=1e-2)
    assert modulations / sum(math.prod(s) for s in shapes.values()) == pytest.approx(1 / 3, abs=2e-3)


@pytest.mark.parametrize("name", ["fp32", "int8-bf16", "quanto-bf16"])
def test_one_layer_at_a_time_is_on_the_device_and_nothing_stays(name: str, inputs: tuple[Path, Path]) -> None:
    """Host and device are both RAM here, so the only way between them is watched, and makes copies."""
    model = model_of(inputs[0], PRECISIONS[name])
    given = arguments(model, rows=3)
    modulation = detach_modulation(model, SD3Architecture.modulation, PRECISIONS[name], CPU, 4)
    expected = modulation(given["sigma"], given["pooled"])
    alive: dict[int, int] = {}
    peaks: list[int] = []

    def bring(tensor: Tensor) -> Tensor:
        copied = tensor.detach().to("cpu", copy=True)  # a clone of quanto's tensors would be dequantised
        alive[id(copied)] = tensor.numel()
        weakref.finalize(copied, alive.pop, id(copied))
        peaks.append(sum(alive.values()))
        return copied

    modulation.bring = bring  # type: ignore[method-assign]
    assert torch.equal(modulation(given["sigma"], given["pooled"]), expected)
    modules = (modulation.embed, *modulation.layers)
    sizes = [sum(t.numel() for t in (*m.parameters(), *m.buffers())) for m in modules]
    assert max(peaks) == max(sizes) < sum(sizes)
    assert not alive


def test_pictures_are_those_of_the_resident_path(inputs: tuple[Path, Path]) -> None:
    family, precision = SD3(pretrained=str(inputs[0])), FP32()
    generator = torch.Generator().manual_seed(0)
    width, pooled = (parameter_shapes(family.files.denoiser_config())[f"{name}.weight"][1]
                     for name in ("context_embedder", "time_text_embed.text_embedder.linear_1"))  # fmt: skip
    prompts = [
        Conditioning(torch.randn(7, width, generator=generator), pooled=torch.randn(pooled, generator=generator))
        for _ in "ab"
    ]
    resident, planned = model_of(inputs[0], precision), model_of(inputs[0], precision)
    modulation = detach_modulation(planned, SD3Architecture.modulation, precision, CPU, window=4)
    for guidance, steps in ((1.0, 3), (4.5, 5)):
        request = ImageRequest("", seed=1, width=32, height=48, steps=steps, guidance=guidance)
        rows = [request], [prompts[0]], [prompts[1]]
        expected = Sampler(resident, family, precision, objective=Flow()).denoise(*rows)
        actual = Sampler(planned, family, precision, modulation, objective=Flow()).denoise(*rows)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert (expected - expected.mean()).abs().max() > 0.1


def pixels(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(Image.open(file).convert("RGB").tobytes()), dtype=torch.uint8).int()


def test_a_run_draws_base_and_tuned_with_the_plan_and_generate_follows_it(config_json: dict, tmp_path: Path) -> None:
    config_json["validation"] = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 0}
    config_json["optimizer"] = {"lr": 0.1}
    config_json["train"] |= {"steps": 2}
    runs = [run_with(config_json, name=kind, memory={"modulation": kind}) for kind in ("plan", "resident")]
    for state in ("base", "step-000002"):
        ours, theirs = (pixels(run / "samples" / state / "prompt-00.png") for run in runs)
        assert (ours - theirs).abs().max() <= 1
    base, tuned = (pixels(runs[0] / "samples" / state / "prompt-00.png") for state in ("base", "step-000002"))
    assert (base - tuned).abs().max() > 4

    parser = ArgumentParser()
    generate_arguments(parser)
    for more in ([], ["--full", "--modulation", "resident"]):
        given = ["--run", str(runs[0]), "--output", str(tmp_path / "drawn.png"), "--overwrite", *more]
        assert (pixels(generate(parser.parse_args(given))) - tuned).abs().max() <= 1


def test_generate_plans_a_lora_that_updates_modulations(config_json: dict, tmp_path: Path) -> None:
    config_json["validation"] = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 0}
    config_json["train"] |= {"steps": 2}
    adapter = {"method": "lora", "rank": 2, "targets": ["norm1.linear", "time_text_embed.text_embedder.linear_1"]}
    run = run_with(config_json, adapter=adapter, optimizer={"lr": 0.1}, memory={"modulation": "resident"})
    parser = ArgumentParser()
    generate_arguments(parser)
    given = ["--run", str(run), "--output", str(tmp_path / "drawn.png"), "--modulation", "plan"]
    tuned = pixels(run / "samples" / "step-000002" / "prompt-00.png")
    assert (pixels(generate(parser.parse_args(given))) - tuned).abs().max() <= 1
    assert (pixels(run / "samples" / "base" / "prompt-00.png") - tuned).abs().max() > 4


FULL_REMEDY = "trains and exports the whole model. Use memory.modulation resident, or adapter.method lora"
TARGETS_REMEDY = "Use adapter.targets attention, or memory.modulation resident"


@pytest.mark.parametrize(
    ("adapter", "message", "why"),
    [
        ({"method": "full"}, f"adapter.method full {FULL_REMEDY}", "adapter.method full trains it"),
        ({"method": "partial"}, f"adapter.method partial {FULL_REMEDY}", "adapter.method partial trains it"),
        (
            {"targets": "all_linear"},
            f"trains transformer_blocks.0.norm1.linear and 3 more. {TARGETS_REMEDY}",
            "norm1.linear and 3 more",
        ),
        ({"targets": ["norm_out.linear", "attn.to_q"]}, f"trains norm_out.linear. {TARGETS_REMEDY}", "norm_out"),
        (
            {"targets": ["timestep_embedder.linear_1"]},
            f"trains time_text_embed.timestep_.*. {TARGETS_REMEDY}",
            "time_text_embed.timestep_",
        ),
    ],
    ids=str,
)
def test_a_plan_is_refused_and_auto_is_resident_where_the_modulation_trains(
    adapter: dict, message: str, why: str, config_json: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    config_json["adapter"] = adapter
    with pytest.raises(ConfigError, match=f"memory.modulation: plan .*{message}"):
        validate(config_json, "test")
    config_json["memory"]["modulation"] = "resident"
    validate(config_json, "test")
    require_auto(config_json, False, "resident", why, capsys)


@pytest.mark.parametrize(("on_host", "kind", "why"), [(False, "plan", "frozen"), (True, "resident", "on the CPU")])
def test_auto_plans_what_stays_frozen_on_a_gpu(on_host, kind, why, config_json, capsys) -> None:
    require_auto(config_json | {"adapter": {"method": "lora", "rank": 2}}, on_host, kind, why, capsys)


def require_auto(config_json: dict, on_host: bool, kind: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a setting it is auto, which is settled once, and said."""
    del config_json["memory"]["modulation"]
    config = validate(config_json, "test")
    assert config.memory.modulation == "auto"
    with verbose():
        settled = settle_modulation(config, on_host)
    assert settled.memory == config.memory.model_copy(update={"modulation": kind})
    said = capsys.readouterr().out
    assert f"modulation {kind} (auto: " in said and why in said
    if config.model.architecture.modulation is not None:  # a resumed run keeps what it chose, if that is a choice
        with verbose():
            assert settle_modulation(config, on_host, "resident").memory.modulation == "resident"
        assert "modulation resident (auto: as before)" in capsys.readouterr().out
        assert settle_modulation(config, on_host, "unknown").memory == settled.memory
        capsys.readouterr()
    assert settle_modulation(settled, not on_host) is settled and capsys.readouterr().out == ""


def test_refuses_the_same_for_the_demo_and_once_an_unknown_model_is_here(config_json: dict) -> None:
    demo = config_json | {"model": {"pretrained": "demo:tiny-sd3"}, "adapter": {"targets": "all_linear"}}
    with pytest.raises(ConfigError, match="memory.modulation: plan .*norm1.linear and 5 more"):
        validate(demo, "test")
    config = validate(config_json, "test").model_copy(update={"adapter": Lora(targets="all_linear")})
    with pytest.raises(ConfigError, match="memory.modulation: plan .*norm1.linear and 3 more"):
        require_model_rules(config)
    model = model_of(Path(config.model.pretrained), FP32()).requires_grad_(True)
    with pytest.raises(ValueError, match="needs frozen modulation weights; time_text_embed is trained"):
        detach_modulation(model, SD3Architecture.modulation, FP32(), CPU, 4)


def test_a_resumed_run_keeps_what_auto_has_chosen(
    config_json: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one older than auto, whose configuration says plan, stays as it was."""
    config_json["train"] |= {"steps": 2}
    whole, auto = losses_of(run_with(config_json, name="whole")), {"modulation": "auto"}
    with monkeypatch.context() as on_a_gpu:
        settle = lambda config, _, before: settle_modulation(config, False, before)  # noqa: E731
        on_a_gpu.setattr(setting_up, "settle_modulation", settle)
        folder = run_with(config_json, name="auto", memory=auto, train={"steps": 1})
    assert json.loads((folder / "chosen.json").read_text())["modulation"] == "plan"
    run_with(config_json, name="older", train={"steps": 1})
    for name in ("auto", "older"):
        capsys.readouterr()
        with verbose():
            resumed = run_with(config_json, "latest", name=name, memory=auto)  # on the CPU it would be resident
        assert "modulation plan (auto: as before)" in capsys.readouterr().out
        assert losses_of(resumed) == whole
    assert json.loads((folder / "chosen.json").read_text())["modulation"] == "plan"
    assert json.loads((folder / "config.json").read_text())["memory"]["modulation"] == "auto"
