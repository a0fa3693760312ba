"""What is said about cards that cannot do bf16, or that the torch build does not know; no GPU needed."""

from __future__ import annotations

import os
import platform
import subprocess
import warnings
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from PIL import Image

from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.system.devices import choose_device, prepare_environment
from simpletune.system.options import UserError
from simpletune.training import accelerator
from simpletune.training.accelerator import make_accelerator

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120", "compute_120"]
CUDA_12 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """Pretends that there is a card."""

    def card(name: str, capability: tuple[int, int], built_for: list[str]) -> None:
        memory = type("Properties", (), {"total_memory": 16 * 2**30})
        for function, answer in (
            ("is_available", True), ("get_device_name", name), ("get_device_capability", capability),
            ("get_arch_list", built_for), ("current_device", 0),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, function, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)

    return card


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100", (7, 0))])
def test_no_bf16_on_older_cards(name: str, capability: tuple[int, int], card) -> None:
    card(name, capability, CUDA_12)
    sm = "sm_" + "".join(map(str, capability))
    message = f"bf16 needs a card of sm_80 or newer, but {name} is {sm}. .*Use precision.compute=auto"
    with pytest.raises(UserError, match=message):
        choose_device("auto", "bf16", False)
    for compute in ("auto", "fp16", "fp32"):
        assert choose_device("auto", compute, False)[1] == f"{name} ({sm}, 16.0 GiB)"


@pytest.mark.parametrize(
    ("capability", "built_for", "message"),
    [
        ((7, 0), CUDA_13, r"this GPU is sm_70, but torch .* is built for sm_75, .*Install a CUDA 12.6 build"),
        ((6, 1), CUDA_13, "SIMPLETUNE_TORCH_INDEX=https://download.pytorch.org/whl/cu126"),
        ((12, 0), CUDA_12, "is sm_120, .*nstall a newer torch"),
    ],
)
def test_a_build_without_the_card(capability: tuple[int, int], built_for: list[str], message: str, card) -> None:
    card("card", capability, built_for)
    with pytest.raises(UserError, match=message):
        choose_device("cuda", "fp32", False)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1)])
def test_cards_that_a_build_runs_on(capability: tuple[int, int], card) -> None:
    card("card", capability, CUDA_13)
    assert choose_device("cuda", "bf16", False)[0].type == "cuda"


def test_cudnn_leaves_the_choice_of_attention(card, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    card("card", (9, 0), CUDA_13)
    choose_device("cuda", "bf16", False)
    assert enabled == [False]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("release", ["6.8.0-generic", "5.15.1-microsoft-standard-WSL2"])
def test_expandable_segments_are_tried_under_wsl_and_given_up_where_they_fail(
    release: str, fails: bool, card, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[object] = []
    settings: list[str] = []

    def run(command: list[str], **options: object) -> None:
        tried.append(command)
        if fails:
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    card("card", (8, 9), CUDA_13)
    choose_device("cuda", "bf16", False)
    choose_device("cuda", "bf16", False)
    wsl = "microsoft" in release
    assert len(tried) == (0 if not wsl else 1 if fails else 2)
    assert settings == (["expandable_segments:False"] if wsl and fails else [])
    assert os.environ["PYTORCH_ALLOC_CONF"] == (settings or ["expandable_segments:True"])[0]
    assert capsys.readouterr().out.count("expandable segments fail here (WSL)") == len(settings)


def test_check_says_what_happens_on_such_cards(tiny_config) -> None:
    note = "T4, V100 and RTX 20 lack it: use auto"
    tiny_config["precision"] = {"weights": "int8", "compute": "bf16"}
    assert note not in explain(validate(tiny_config, "on the CPU"))
    tiny_config["device"] = "auto"
    assert note in explain(validate(tiny_config, "bf16"))
    tiny_config["precision"]["compute"] = "fp32"
    assert note not in explain(validate(tiny_config, "fp32"))
    tiny_config["precision"]["compute"] = "auto"
    said = explain(validate(tiny_config, "auto"))
    assert note not in said and "products in bf16 (fp16 on a card without bf16)" in said
    full = tiny_config | {"adapter": {"method": "full"}, "precision": {"weights": "bf16"}}
    assert "lack it: use precision.weights=fp32" in explain(validate(full, "full"))


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """accelerate keeps its device for the whole process: forget it before the test and after it."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("later", ["cpu", "cuda"])
def test_a_later_run_of_a_process_uses_its_own_device(later: str, card, tiny_config: dict, monkeypatch) -> None:
    """In both orders: accelerate alone would keep the first device without a word, or refuse the CPU."""
    card("NVIDIA L4", (8, 9), CUDA_13)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    earlier = "cuda" if later == "cpu" else "cpu"
    for device in (earlier, later, later):
        made, _ = make_accelerator(validate(tiny_config | {"device": device}, device))
        assert made.device.type == device


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("grouped", [False, True])
def test_accelerate_may_not_choose_another_device(grouped: bool, tiny_config: dict, monkeypatch) -> None:
    """A reset would leave the group of processes, so another device is refused for one of several."""
    config = validate(tiny_config, "gpu")
    if grouped:
        Accelerator(cpu=True)
        monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    else:
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(accelerator, "choose_device", lambda *_: (torch.device("cuda", 0), "a card"))
    with pytest.raises(UserError, match="device: .*cuda.* cpu.*ACCELERATE_USE_CPU"):
        make_accelerator(config)


def test_a_large_picture_warns_nobody_before_it_is_refused_by_its_name() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        prepare_environment()
        Image._decompression_bomb_check((10_000, 10_000))
    assert not said
