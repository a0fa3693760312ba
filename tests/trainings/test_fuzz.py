"""Rubbish in: a valid result or a clean error comes out, never a traceback. SIMPLETUNE_FUZZ=5000 tries more of it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from simpletune.adapters.files.describe import describe, format_description
from simpletune.adapters.files.header import open_lora
from simpletune.adapters.files.read import read_lora
from simpletune.config.load import read_config, validate
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.data.storage.cache import FileCache
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import with_checksum
from simpletune.system.model_folder import weight_files
from simpletune.system.options import Option, UserError, member_for, option_classes, union_of
from simpletune.system.safetensors_file import read_header

TRIES = int(os.environ.get("SIMPLETUNE_FUZZ", "60"))
bounded = settings(
    max_examples=TRIES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["lora", "full", "int8", "demo:tiny-sd3", "demo:pictures", "auto", "all", "", "../..", "1e400"])
)  # fmt: skip
JSON = st.recursive(
    LEAVES, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=6), c, max_size=3), max_leaves=8
)


def fields(option: type[Option], prefix: str = "") -> list[str]:
    """Dotted paths of all options, of every member of every union."""
    found = []
    for name, field in option.model_fields.items():
        found.append(f"{prefix}{field.alias or name}")
        union = union_of(field)
        members = list(union.members.values()) if union else option_classes(field.annotation)
        for member in members:
            found += fields(
                member, f"{found[0].rpartition('.')[0]}{'.' if prefix else ''}{name}." if prefix else f"{name}."
            )
    return sorted(set(found))


PATHS = fields(TrainConfig)
VALID: dict[str, Any] = {"name": "a", "data": {"path": "demo:pictures"}, "model": {"pretrained": "demo:tiny-sd3"}}
UNSAFE = {"model.pretrained", "data.path", "model.transformer", "model.vae", "model.text_encoders"}


def clean(value: Any) -> None:
    """A valid configuration or a clean error."""
    try:
        config = validate(value, "fuzz")
    except UserError as error:
        assert str(error)
    else:
        assert TrainConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config


def test_every_option_is_among_the_paths() -> None:
    assert {"adapter.rank", "precision.double_quantisation", "train.on_nonfinite", "schedule.warmup_steps"} <= set(
        PATHS
    )
    assert member_for(TrainConfig.model_fields["adapter"], {}) is not None


@bounded
@given(st.dictionaries(st.sampled_from(sorted(TrainConfig.model_fields)) | st.text(max_size=6), JSON, max_size=5))
def test_any_json_as_a_configuration(value: dict[str, Any]) -> None:
    clean(value)


@bounded
@given(st.dictionaries(st.sampled_from(PATHS), JSON, max_size=4))
def test_a_valid_configuration_with_anything_in_some_places(changes: dict[str, Any]) -> None:
    value = copy.deepcopy(VALID)
    for path, new in changes.items():
        here: Any = value
        *parents, leaf = path.split(".")
        for parent in parents:
            here = here.setdefault(parent, {}) if isinstance(here, dict) else {}
        if isinstance(here, dict):
            here[leaf] = new
    clean(value)


@bounded
@given(
    st.lists(
        st.tuples(st.sampled_from(PATHS) | st.text(max_size=9), st.text(max_size=9) | JSON.map(json.dumps)), max_size=3
    )
)
def test_any_overrides(pairs: list[tuple[str, str]]) -> None:
    merged, _, problems = merge(VALID, [f"{path}={text}" for path, text in pairs])
    try:
        validate(merged, "fuzz", problems)
    except UserError as error:
        assert str(error)


@bounded
@given(st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()) | st.just(b"[" * 100_000))
def test_any_bytes_as_a_configuration_file(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(UserError):
        read_config(file)


SETTINGS = {"transformer.r": 2, "transformer.lora_alpha": 2, "transformer.alpha_pattern": {"to_q": 4}}
PLACE = "transformer_blocks.0."
PAIR = {"lora_A.weight": (2, 8), "lora_B.weight": (8, 2), "alpha": ()}
LOKR = {"lokr_w1": (2, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 4), "alpha": ()}
LOHA = {"hada_w1_a": (8, 2), "hada_w1_b": (2, 8), "hada_w2_a": (8, 2), "hada_w2_b": (2, 8), "alpha": ()}
UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
FILES = {  # prefix, layers, factors by the ends of their keys, and type of each
    "LoRA": ("transformer.", (f"{PLACE}attn.to_q", f"{PLACE}ff.net.2"), PAIR, torch.float32),
    "DoRA": ("unet.", (UNET,), PAIR | {"dora_scale": (8, 1), "lora_magnitude_vector": (8,)}, torch.float16),
    "DoRA by inputs": ("unet.", (UNET,), PAIR | {"dora_scale": (1, 8)}, torch.bfloat16),
    "DoKr": ("unet.", (UNET,), LOKR | {"dora_scale": (8, 1)}, torch.float32),
    "DoHa": ("lycoris_", (UNET.replace(".", "_"),), LOHA | {"dora_scale": (1, 8)}, torch.float32),
    "OFT": ("lora_unet_", (UNET.replace(".", "_"),), {"oft_blocks": (2, 4, 4), "alpha": ()}, torch.float32),
    "wrapped": ("base_model.model.unet._orig_mod.", (UNET,),
                {"lora_A.style.weight": (2, 8), "lora_B.style.weight": (8, 2)}, torch.float32),
    "fp8": ("unet.", (UNET,), PAIR, torch.float8_e4m3fn),
    "fp64": ("unet.", (UNET,), PAIR, torch.float64),
}  # fmt: skip


def lora(kind: str) -> bytes:
    prefix, layers, factors, dtype = FILES[kind]
    tensors = {
        f"{prefix}{layer}.{end}": torch.ones(shape).to(dtype) for layer in layers for end, shape in factors.items()
    }
    return save(tensors, {"lora_adapter_metadata": json.dumps(SETTINGS), "ss_network_module": "networks.lora"})


LORAS = {kind: lora(kind) for kind in FILES}


def header_of(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


KINDS = st.sampled_from(sorted(LORAS))
WORDS = sorted(
    {word for kind in LORAS for name in header_of(LORAS[kind]) for word in name.split(".")} | {"", "a" * 300}
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A LoRA file with bytes changed, cut off, or anything in its header."""
    kind, lora = draw(st.sampled_from(["bytes", "cut", "header", "settings", "keys", "random"])), LORAS[draw(KINDS)]
    if kind == "random":
        return draw(st.binary(max_size=80))
    if kind == "cut":
        return lora[: draw(st.integers(0, len(lora)))]
    if kind == "bytes":
        data = bytearray(lora)
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data)
    header = header_of(lora)
    if kind == "keys":  # words of another kind, prefix or wrapper in a name, or a name twice
        name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
        old, new = draw(st.sampled_from(name.split("."))), draw(st.sampled_from(WORDS))
        changed = draw(st.sampled_from([name.replace(old, new), f"{new}.{name}", f"{name}.{new}", new]))
        return with_header({changed if key == name else key: entry for key, entry in header.items()}, lora)
    if kind == "settings":
        known = {f"transformer.{key}" for key in ("r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora")}
        chosen = draw(st.dictionaries(st.sampled_from(sorted(known)) | st.text(max_size=4), JSON, max_size=3) | JSON)
        header["__metadata__"]["lora_adapter_metadata"] = draw(st.just(json.dumps(chosen)) | st.text(max_size=9))
        if draw(st.booleans()):  # settings count where no tensor holds an alpha
            header = {name: entry for name, entry in header.items() if not name.endswith("alpha")}
        return with_header(header, lora)
    name = draw(st.sampled_from(sorted(header)))
    inner = draw(st.sampled_from(["", "dtype", "shape", "data_offsets"]))
    value = draw(
        JSON | st.lists(st.integers(-3, 200), max_size=3) | st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "?"])
    )
    if inner and name != "__metadata__":
        header[name][inner] = value
    else:
        header[name] = value
    return with_header(header, lora)


@bounded
@given(mutated())
def test_any_bytes_as_a_lora_file(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "lora.safetensors"
    file.write_bytes(data)
    for read in (
        read_header,
        open_lora,
        read_lora,
        lambda f: format_description(describe(f)),
        lambda f: format_description(describe(f, False)),
    ):
        try:
            read(file)
        except UserError as error:
            assert str(file) in str(error)


@pytest.mark.parametrize("kind", LORAS)
def test_a_lora_that_nothing_was_done_to_is_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    file.write_bytes(with_header(header_of(LORAS[kind]), LORAS[kind]))
    assert len(read_lora(file)) == len(FILES[kind][1]) and format_description(describe(file))


@bounded
@given(st.binary(max_size=120) | JSON.map(lambda v: json.dumps({"weight_map": v}).encode()))
def test_any_bytes_as_an_index(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    try:
        weight_files(tmp_path)
    except UserError as error:
        assert str(tmp_path) in str(error)


STATE = {
    "step": 1, "config": {"name": "a"}, "manifest": [], "optimizer": {"values": {}, "shared": {}}, "torch": "2",
    "processes": 1,
    "sha256": {checkpoint.TRAINABLE: "0", checkpoint.OPTIMIZER: "0"},
}  # fmt: skip


@bounded
@given(st.binary(max_size=80) | st.dictionaries(st.sampled_from(sorted(STATE)), JSON, max_size=3) | JSON)
@example({"sha256": [checkpoint.TRAINABLE, checkpoint.OPTIMIZER]})  # a list where an object of checksums belongs
def test_anything_as_the_state_of_a_checkpoint(tmp_path: Path, value: Any) -> None:
    state = STATE | value if isinstance(value, dict) else value
    if not isinstance(value, bytes):
        value = (with_checksum(state) if isinstance(state, dict) and state else json.dumps(state)).encode()
    (tmp_path / checkpoint.STATE).write_bytes(value)
    with pytest.raises(UserError, match=checkpoint.STATE + " is damaged|trainable.safetensors is missing|is missing"):
        checkpoint.read_checkpoint(tmp_path)


@pytest.mark.parametrize("outside", ["../weights", "a/../../weights", "/etc/hostname"])
def test_a_checkpoint_names_no_file_outside_its_folder(tmp_path: Path, outside: str) -> None:
    (tmp_path / "weights").write_bytes(b"x")
    folder = tmp_path / "step"
    folder.mkdir()
    inside = {checkpoint.TRAINABLE, checkpoint.OPTIMIZER}
    for name in inside:
        (folder / name).write_bytes(b"x")

    def written(names: set[str]) -> Path:
        sums = dict.fromkeys(sorted(names), hashlib.sha256(b"x").hexdigest())
        (folder / checkpoint.STATE).write_text(with_checksum(STATE | {"sha256": sums}))
        return folder

    assert checkpoint.read_checkpoint(written(inside)).folder == folder
    with pytest.raises(UserError, match="outside the checkpoint"):
        checkpoint.read_checkpoint(written(inside | {outside}))


@bounded
@given(st.binary(max_size=120))
def test_any_bytes_as_a_cache_file(tmp_path: Path, data: bytes) -> None:
    cache = FileCache(tmp_path)
    cache.file("key").write_bytes(data)
    assert cache.lacking(["key"]) == ["key"] and "key" not in cache
