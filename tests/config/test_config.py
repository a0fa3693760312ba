"""Configuration: strict, explained, all problems at once, and quick."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from simpletune.apps.cli import main as cli_main
from simpletune.apps.cli.evaluate import evaluate_arguments
from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.apps.cli.lora import merge_arguments
from simpletune.apps.cli.main import main
from simpletune.config import load
from simpletune.config.error_text import problems_of
from simpletune.config.load import read_config, read_saved, shipped_files, validate
from simpletune.config.overrides import merge
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.config.validation import Validation
from simpletune.data.demo import SHIPPED
from simpletune.system import redact
from simpletune.system.options import (
    ConfigError,
    Option,
    UserError,
    documented_fields,
    first_lines,
    join_names,
    option_classes,
)

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = {"name": "x", "model": {"pretrained": "demo:tiny-sd3"}, "data": {"path": "demo:pictures"}}


def merged(changes: dict) -> dict:
    result = json.loads(json.dumps(MINIMAL))
    for key, value in changes.items():
        result[key] = {**result[key], **value} if isinstance(result.get(key), dict) else value
    return result


class Weights(Option):
    by_name: dict[str, int | list[bool]]


def test_a_path_has_every_key_of_the_json_and_no_tag() -> None:
    data = {"by_name": {"a": [True, "x"], "b": 3, "c": {}}}
    with pytest.raises(ValidationError) as caught:
        Weights.model_validate(data)
    found = [problem.path for problem in problems_of(caught.value, data, Weights)]
    assert found == ["by_name.a", "by_name.a.1", "by_name.c"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"t5": "true"}}, 'model.t5: "true" .*Write true instead of "true"'),
        ({"optimizer": {"lr": "1e-4"}}, 'optimizer.lr: "1e-4" .*Write 1e-4 instead of "1e-4"'),
        ({"train": {"seed": True}}, "train.seed: true does not fit. It must be a whole number"),
        ({"train": {"steps": 1.5}}, "train.steps: 1.5 .*a whole number"),
        ({"adapter": {"rnk": 3}}, "adapter.rnk: unknown field. Did you mean rank?"),
        ({"train": {"sharding": "full"}}, "train.sharding: unknown field. Did you mean fsdp?"),
        ({"validation": {"eval_samples": 4}}, "validation.eval_samples: unknown field. Did you mean loss_samples?"),
        ({"trian": {}}, "trian: unknown field. Did you mean train?"),
        ({"precision": {"weights": "int9"}}, 'weights: unknown value "int9". Did you mean int8?'),
        ({"adapter": {"method": "full", "rank": 3}}, "adapter.rank: unknown field"),
        ({"train": {"batch_size": 0}}, "train.batch_size: 0 .*at least 1"),
        ({"data": {"resolution": 1000}}, "data.resolution: 1000 is not a multiple of 16, which SD3 needs. Use 992 or"),
        ({"data": {"resolution": 40}}, "data.resolution: 40 is not a multiple of 16, which SD3 needs. Use 32 or 48"),
        ({"data": {"on_error": "skpi"}}, "data.on_error: .*one of stop, skip. Did you mean skip?"),
        ({"objective": {"shift": "x"}}, "objective.shift: .*a number, without quotes or one of auto, resolution"),
        ({"name": "a/b"}, 'name: "a/b" does not fit. Use at most 100 letters, digits'),
        ({"train": {"steps": 1, "epochs": 1}}, "train.epochs: steps and epochs are both set"),
        ({"train": {"steps": 5}, "schedule": {"warmup_steps": 5}}, "schedule.warmup_steps: 5 warm-up"),
        (
            {"adapter": {"method": "full"}, "precision": {"weights": "int8"}},
            "precision.weights: int8 weights are frozen",
        ),
        ({"data": {"path": "/nowhere"}}, "data.path: /nowhere does not exist"),
        ({"model": {"pretrained": "/nowhere"}}, "model.pretrained: /nowhere is neither a folder"),
        ({"data": {"path": "demo:cats"}}, "data.path: unknown demo demo:cats. Use demo:style"),
        ({"data": {"path": ""}}, "data.path: '' is empty. Give the folder"),
        ({"data": {"source": "table", "path": " "}}, "data.path: ' ' is empty. Give"),
        ({"version": 2}, "version: 2 does not fit. It must be 1"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1: is required"),
        ({"train": None}, "train: null does not fit. It must be an object"),
        (
            {"speed": {"deterministic": True, "attention": "cudnn"}},
            "speed.attention: cudnn adds up gradients in any order",
        ),
    ],
    ids=str,
)
def test_says_value_rule_and_remedy(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(merged(changes), "x.json")


def test_minimal_is_valid_and_defaults_are_complete() -> None:
    config = validate(MINIMAL, "x.json")
    written = config.model_dump(mode="json", by_alias=True)
    assert TrainConfig.model_validate_json(json.dumps(written), strict=True) == config
    expected = {"rank": 16, "alpha": None, "targets": "attention", "dropout": 0.0, "dtype": "fp32"}
    expected |= {"conv_rank": None, "conv_alpha": None}
    expected |= {"rank_stabilized": False, "rank_dropout": 0.0, "module_dropout": 0.0, "max_norm": None, "start": None}
    assert written["adapter"] == {"method": "lora", "layers": [], "b_lr_ratio": 1.0} | expected
    assert validate(merged({"adapter": {"rank": 3}}), "x.json").adapter.rank == 3, "tags may be left out"
    with pytest.raises(ValueError, match="frozen"):
        config.name = "y"  # type: ignore[misc]


def test_all_problems_come_at_once() -> None:
    changes = {
        "adapter": {"rnk": 3}, "precision": {"weights": "int9", "compute": "fp32"}, "data": {"path": "/nowhere"},
        "train": {"steps": 1, "epochs": 2, "seed": -1},
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        validate(merged(changes), "x.json")
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"adapter.rnk", "precision.weights", "data.path", "train.seed", "train.epochs"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "x", "name": "y"}', 'the key "name" appears twice in one object. Keep one of them'),
        ('{"name": "x",}', "c.json:1:14: not valid JSON"),
        ('{"train": {"steps": NaN}}', "NaN is not a JSON number. Write a finite number"),
        ("[1]", "a list, but a configuration is a JSON object"),
        ("[" * 100_000, "c.json: it is nested too deeply. Use at most 64 levels"),
        ("[" * 65 + "]" * 65, "nested too deeply"),
        ("[" * 64 + "]" * 64, "a list"),
    ],
)
def test_bad_json(text: str, message: str, write_config) -> None:
    with pytest.raises(UserError, match=message):
        read_config(write_config(text, "c.json"))


def test_missing_file_suggests_a_neighbour(write_config) -> None:
    file = write_config(MINIMAL, "portrait.json")
    with pytest.raises(UserError, match="potrait.json does not exist. Did you mean .*portrait.json"):
        read_config(file.with_name("potrait.json"))


def test_overrides_are_read_by_the_fields_type() -> None:
    for override, value in (
        ("name=123", "123"),
        ("train.steps=123", 123),
        ("optimizer.lr=1e-5", 1e-5),
        ("model.t5=false", False),
        ("data.prompt=null", None),
        ("data.prompt=a dog = good", "a dog = good"),
        ("objective.shift=auto", "auto"),
        ("objective.shift=2.5", 2.5),
        ('adapter.targets=["attn.to_q"]', ["attn.to_q"]),
        ("adapter.targets=all_linear", "all_linear"),
        ("checkpoint.every=null", None),
    ):
        data, _, problems = merge(MINIMAL, [override])
        assert not problems
        found = validate(data, "x.json").model_dump(mode="json")
        for part in override.partition("=")[0].split("."):
            found = found[part]
        assert found == value and type(found) is type(value), override


def test_changing_a_tag_drops_the_fields_that_are_gone_and_keeps_what_both_have() -> None:
    for section, override, kept, notices in (
        (
            {"adapter": {"method": "lora", "rank": 4, "alpha": 2.0}},
            "adapter.method=full",
            {"adapter": {"method": "full"}},
            ["adapter.method=full: dropped rank, alpha, which full does not have"],
        ),
        (
            {"precision": {"weights": "int8", "compute": "fp32"}},
            "precision.weights=fp32",
            {"precision": {"weights": "fp32", "compute": "fp32"}},
            [],
        ),
    ):
        result, said, _ = merge(merged(section), [override])
        assert kept.items() <= result.items() and said == notices


def path_of(data: dict, path: str) -> str:
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return str(data)


def test_every_path_is_read_as_users_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = {
        "data.path": "~/dog", "data.mask_path": "'~/masks'", "output.runs": "~/runs", "output.cache": '"~/a cache"',
        "output.profiles": "~/profiles", "output.prices": "~/prices.json", "model.pretrained": "~/m.safetensors",
        "model.transformer": "~/t", "model.unet": "~/u", "model.vae": "~/v", "model.text_encoders": "~/e",
        "adapter.start": "~/a.safetensors:0.8", "model.loras.0": "~/l.safetensors", "data.sources.1.path": "~/more",
    }  # fmt: skip
    data: dict = {"model": {"loras": ["~/l.safetensors"]}, "data": {"sources": [{}, {}]}}
    for path, text in texts.items():
        *sections, key = path.split(".")
        place = data
        for part in sections:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if isinstance(place, dict):
            place[key] = text
    read, problems = load.with_typed_paths(data)
    assert not problems and {path for _, _, path in load.path_fields(data)} == set(texts)
    for path, text in texts.items():
        assert path_of(read, path) == text.strip("'\"").replace("~", str(tmp_path))
    said = {  # texts that are a path by what the schema says of them
        f"{section}.{name}"
        for section in load.PATHS
        for member in option_classes(TrainConfig.model_fields[section].annotation)
        for name, field in documented_fields(member).items()
        if "str" in str(field.annotation) and "Literal" not in str(field.annotation)
        and re.match(r"Path|Folder|JSON file|A Hub name|Replaces|LoRAs? t|\w+ to start from", field.description or "")
    }  # fmt: skip
    assert said == {f"{section}.{key}" for section, keys in load.PATHS.items() for key in keys}


def test_overrides_reach_folders_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my dog").mkdir()
    (tmp_path / "my dog" / "0.jpg").touch()
    config, _ = read_config(Path("demo"), ["data.path=~/my dog", "data.prompt=a dog", "output.runs=~/runs"])
    assert (config.data.path, config.output.runs) == (f"{tmp_path}/my dog", f"{tmp_path}/runs")
    quoted, _ = read_config(Path("demo"), [f"data.path='{tmp_path}/my dog'", "data.prompt=a dog"])
    assert quoted.data.path == f"{tmp_path}/my dog"
    with pytest.raises(ConfigError) as caught:
        read_config(Path("demo"), [r"data.path=C:\Users\me", "output.runs=D:/r"])
    assert [each.path for each in caught.value.problems] == ["data.path", "output.runs"]
    assert all(" is a path of Windows, which this machine" in each.message for each in caught.value.problems)


def test_words_of_an_unquoted_prompt_are_one_problem_that_quotes_it() -> None:
    _, _, problems = merge(MINIMAL, ["data.prompt=a", "photo:", "sks", "dog", "train.steps=3", "x"])
    rule = "is not an override. Write key.path=value, as in train.steps=100. A value with spaces is quoted: "
    assert [str(each) for each in problems] == [
        f"photo: sks dog: {rule}'data.prompt=a photo: sks dog'",
        f"x: {rule}'train.steps=3 x'",
    ]


def test_what_is_no_configuration_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lora = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    header = {f"{lora}.{end}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]}
              for at, end in enumerate(("lora_down.weight", "lora_up.weight"))}  # fmt: skip
    for name, tensors in (
        ("my lora.safetensors", header),
        ("model.safetensors", {"a.weight": header[f"{lora}.lora_down.weight"]}),
    ):
        text = json.dumps(tensors).encode()
        Path(name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * len(tensors)))
    Path("dog").mkdir()
    Path("dog/00.JPG").write_bytes(b"\xff\xd8\xff\0")
    Path("x.ckpt").write_bytes(b"PK\3\4")
    Path("sd.toml").write_text("a = 1")
    Path("dog.zip").write_bytes(b"PK\3\4")
    for name, told in (
        ("dog/00.JPG", r"00.JPG is not a configuration, but a picture. Give its folder, as in .*simpletune train dog$"),
        ("my lora.safetensors", "a LoRA. Draw with it: .*generate --lora 'my lora.safetensors'. Train it fur"),
        ("model.safetensors", "a file of weights. .* train sd15_lora model.pretrained=model.safetensors"),
        ("x.ckpt", "a pickle of weights. Convert it: .*python -c .*weights_only=True.* x.ckpt x.safetensors"),
        ("sd.toml", "another format. .*simpletune import sd.toml"),
        ("dog.zip", "an archive. Unpack it"),
        ("dgo", "dgo does not exist. Did you mean dog?"),
        ("qqqqqqq", "qqqqqqq does not exist. .* or, for train, init and data, a folder of pictures"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            load.read_json(Path(name))
    with pytest.raises(ConfigError) as caught:
        read_config(Path("sdxl_lora_8gb"), ["data.path=demo:style", "model.pretrained=my lora.safetensors"])
    (only,) = caught.value.problems
    assert only.path == "model.pretrained" and "It seems to be a LoRA. Draw with it: " in only.message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: unknown field. Did you mean steps?"),
        ("trian.steps=3", "trian.steps: trian is not a section. Did you mean train?"),
        ("steps", "steps: is not an override. Write key.path=value"),
        ("train.steps=abc", 'train.steps: "abc" does not fit'),
        ("optimizer.name=[]", "optimizer.name: "),
        ("name=" + "[" * 5000, "name: "),
        ("train.steps=" + "[" * 5000, "train.steps: "),
        ("optimizer.lr=1e400", "1e400 does not fit in 64 bits"),
        ("optimizer.lr=-Infinity", "-Infinity is not a JSON number"),
        ("train.steps=" + "9" * 4000, "does not fit in 64 bits"),
    ],
    ids=lambda words: words[:24],
)
def test_wrong_and_hostile_overrides_are_problems_with_their_path(override: str, message: str) -> None:
    data, _, problems = merge(MINIMAL, [override])
    with pytest.raises(ConfigError) as caught:
        validate(data, "x.json", problems)
    assert message in str(caught.value) and caught.value.problems[0].path == override.partition("=")[0]


SECTIONS = [*TrainConfig.model_fields, "method", "rank", "path", "steps", "lr", "weights", "compute", "$schema"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SECTIONS) | st.text(max_size=5), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), JSON, max_size=6))
def test_any_json_gives_a_config_or_a_clean_error(data: dict) -> None:
    try:
        config = validate(data, "fuzz.json")
    except ConfigError as error:
        assert error.problems
        assert all(problem.message for problem in error.problems)
    else:
        assert isinstance(config, TrainConfig)


def test_check_exits_2_without_traceback_within_a_screen(write_config, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, count in (
        ({"adapter": {"rnk": 1}, "train": {"steps": "3"}}, 2),
        ({f"x{n}": 1 for n in range(50)}, 50),
    ):
        assert main(["check", str(write_config(merged(changes)))]) == 2
        shown = capsys.readouterr().err
        assert f"{count} problems" in shown and "Traceback" not in shown and len(shown.splitlines()) < 24
    assert shown.endswith("\n  and 34 more\n")


def test_the_schema_documents_every_field() -> None:
    schema = TrainConfig.model_json_schema(by_alias=True)
    missing = [
        f"{name}.{field}"
        for name, option in schema["$defs"].items()
        for field, value in option["properties"].items()
        if "description" not in value
    ]
    assert not missing


def test_the_schema_of_editors_is_that_of_the_classes() -> None:
    assert json.loads((ROOT / "configs" / "schema.json").read_text()) == TrainConfig.model_json_schema(by_alias=True)


@pytest.mark.parametrize("file", shipped_files().values(), ids=lambda file: file.name)
def test_every_config_loads_and_says_what_it_is_for(file: Path) -> None:
    data = json.loads(file.read_text())
    assert (file.parent / data["$schema"]).samefile(ROOT / "configs" / "schema.json")
    needs_images = "concept" not in data and not data["data"].get("path", "").startswith("demo:")
    made_here = data.get("model", {}).get("pretrained", "").startswith("runs/")  # by make tiny-sd3 and the like
    tiny = f"model.pretrained=demo:tiny-{data.get('model', {}).get('family', 'sd3')}"
    overrides = ["data.path=demo:pictures"] * needs_images + [tiny] * made_here
    part = next((part for part in ("transformer", "unet") if data.get("model", {}).get(part)), None)
    if part is not None:  # the result of a first stage, which is not there
        with pytest.raises(ConfigError, match=rf"1 problem\n *model.{part}: .*Check the path"):
            read_config(file, overrides)
        overrides.append(f"model.{part}=null")
    config, _ = read_config(file, overrides)
    assert len(data["about"]) > 30 and config.name == data["name"]


@pytest.mark.parametrize(
    ("file", "overrides", "stays"),
    [
        ("demo", ["name=other", "output.runs=elsewhere", "validation.every=10", "profile.max_traces=0"], True),
        ("demo", ["data.path=demo:subject"], False),
        ("demo", ["train.steps=60"], False),
        ("demo", ["adapter.rank=2"], False),
        ("demo", ["model.t5_length=16"], False),
        ("sd3_medium_lora_8gb", ["data.path=PICTURES", "data.prompt=a photo of sks dog"], True),
        ("sd3_medium_lora_8gb", ["data.path=PICTURES", "data.resolution=512"], False),
    ],
)
def test_about_goes_with_what_it_speaks_of(file: str, overrides: list[str], stays: bool, tiny_images: Path) -> None:
    words = [word.replace("PICTURES", str(tiny_images)) for word in overrides]
    config, _ = read_config(Path(file), words)
    assert bool(config.about) == stays
    assert read_config(Path(file), [*words, "about=mine"])[0].about == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate --seeds 0", "--seeds: 0 is not a whole number of at least 1"),
        ("generate --size 100x64", "--size: 100x64 is not WIDTHxHEIGHT in multiples of 8, such as 1024x768"),
        ("generate --resident-blocks -1", "--resident-blocks: -1 is not a whole number of at least 0"),
        ("generate --vae-tile 500", "--vae-tile: 500 is not a multiple of 64 of at least 128, such as 512"),
        ("generate --strength 1.5", "--strength: 1.5 is not a number greater than 0 and at most 1"),
        ("generate --strength much", "--strength: much is not a number greater than 0 and at most 1"),
        ("generate --guidance much", "--guidance: much is not a number of at least 1, which is no guidance"),
        ("evaluate runs/x --seed 1.5", "--seed: 1.5 is not a whole number from -2^63 to 2^64 - 1"),
        ("plan demo --device L4 --reserve nan", "--reserve: nan is not a number of GiB of at least 0"),
        ("control runs/x --stop --wait nan", "--wait: nan is not a number of seconds of at least 0"),
        ("lora mix a:1 --density 0 --out x", "--density: 0 is not a number greater than 0 and at most 1"),
        ("lora export x --format kohia", "--format: unknown value kohia. Did you mean kohya?"),
        ("generate --base --full", "--full: not allowed with argument --base"),
        ("data x.json --pictures 3000", "--pictures: 3000 is not a whole number from 0 to 2000"),
        ("lora resize x --rank 0 --out y", "--rank: 0 is not a whole number of at least 1"),
        ("report run --price 0", "--price: 0 is not a price in dollars per hour, above 0 and below 10000"),
        ("serve --port 70000", "--port: 70000 is not a port from 0 to 65535"),
        ("check x.json --fast", "unknown argument --fast"),
        ("generate -prompt x", "unknown argument -prompt. Did you mean --prompt?"),
        ("generate --stregnth=2", "unknown argument --stregnth=2. Did you mean --strength?"),
        ("lora inspect x a.b=c", "unknown argument a.b=c"),
        ("lora extract a b", "--out is missing"),
        ("train", "CONFIG is missing"),
        ("trian demo", "unknown verb trian. Did you mean train?"),
        ("--verson", "unknown argument --verson. Did you mean --version?"),
    ],
)
def test_a_command_line_that_cannot_be_read_says_one_thing(words: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    verb = re.match(r"(lora )?\w+", words)
    place = "" if words == "trian demo" or verb is None else f" {verb[0]}"
    expected = f"error: {message}{'' if message.endswith('?') else '.'} See simpletune{place} --help\n"
    assert stopped.value.code == 2 and capsys.readouterr().err == expected


TRIED = (
    "nan inf -inf 1e39 0.99 0.5 0 -3 1 1.0 1.5 4.5 1000 1001 -9223372036854775808 -9223372036854775809 x "
    f"18446744073709551615 18446744073709551616 {'9' * 5000}"
).split()
VERBS = [(generate_arguments, []), (compare_arguments, []), (evaluate_arguments, ["runs/x"])]


@pytest.mark.parametrize("field", ["guidance", "steps", "seed"])
def test_numbers_on_the_command_line_have_the_bounds_of_the_configuration(field: str, capsys) -> None:
    for text, (add, words) in product(TRIED, VERBS):
        try:
            Validation.model_validate({field: float(text) if field == "guidance" else int(text)})
            allowed = True
        except ValueError:
            allowed = False
        assert takes(add, [*words, f"--{field}={text}"], capsys) == allowed, (add, text[:30])


def test_a_strength_is_a_number_with_which_weights_stay_finite(capsys) -> None:
    options = [(*VERBS[0], "scale"), (*VERBS[1], "scale"), (*VERBS[2], "strengths"),
               (merge_arguments, ["x", "--out", "y"], "scale")]  # fmt: skip
    for text, (add, words, option) in product(TRIED, options):
        allowed = text in ("0.99", "0.5", "0", "-3", "1", "1.0", "1.5", "4.5", "1000", "1001")
        assert takes(add, [*words, f"--{option}={text}"], capsys) == allowed, (add, text[:30])


def takes(add: Callable[[argparse.ArgumentParser], None], words: list[str], capsys) -> bool:
    """Whether a verb takes its words; otherwise it must say what is allowed."""
    parser = argparse.ArgumentParser()
    add(parser)
    try:
        parser.parse_args(words)
        return True
    except SystemExit:
        assert " is not a " in capsys.readouterr().err
        return False


@pytest.mark.parametrize(
    ("interruption", "code", "said"),
    [(KeyboardInterrupt, 130, "\nstopped; finished work is kept\n"), (BrokenPipeError, 0, "")],
)
def test_what_interrupts_a_verb_is_no_traceback(interruption, code, said, capfd, monkeypatch) -> None:
    """Ctrl-C, and a pipe whose reader has seen enough: what Python still writes at its end then goes nowhere."""

    def interrupted(args: argparse.Namespace) -> None:
        raise interruption

    kept = os.dup(1)
    monkeypatch.setitem(cli_main.VERBS, "web", (interrupted, lambda parser: None))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(fileno=lambda: 1))
    try:
        assert main(["web"]) == code
        os.write(1, b"the rest")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr() == ("" if interruption is BrokenPipeError else "the rest", said)


def test_a_model_whose_description_is_none_of_sd3_is_a_problem_of_the_configuration(
    tiny_config: dict, tiny_pipeline: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pipeline, tmp_path / "model")
    described = tmp_path / "model" / "transformer" / "config.json"
    whole = json.loads(described.read_text())
    tiny_config["model"]["pretrained"] = str(tmp_path / "model")
    del whole["num_layers"]
    for text, message in (
        (json.dumps(whole), "model.pretrained: the transformer's config.json lacks 'num_layers'. Name an SD3"),
        ("{", r"model.pretrained: .*config.json cannot be read .* It describes the transformer"),
    ):
        described.write_text(text)
        with pytest.raises(ConfigError, match=message):
            validate(tiny_config, "test")
    shutil.rmtree(tmp_path / "model" / "vae")
    with pytest.raises(ConfigError, match=r"model.pretrained: .* has no vae/ folder"):
        validate(tiny_config, "test")


def test_long_lists_are_cut_and_say_how_many_they_leave_out() -> None:
    for names, text, lines in (
        ([], "", []),
        (["a"], "a", ["a"]),
        (["a", "b"], "a, b", ["a", "b"]),
        (["a", "b", "c", "d"], "a, b and 2 more", ["a", "b", "and 2 more"]),
    ):
        assert join_names(names, most=2) == text
        assert first_lines(names, most=2) == lines


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("steps=30", "train.steps or prior.steps or validation.steps"),
        ("learning_rate=0.1", "optimizer.lr"),
        ("lora_rank=4", "adapter.rank"),
        ("adapter.block_dims=4", "adapter.layers"),
        ("adapter.learning_rate=1", "optimizer.lr"),
        ("adapter.rnk=4", "rank?"),
        ("repeat=2", "data.repeats"),
    ],
)
def test_a_field_of_another_section_or_trainer_is_recognised(
    given: str, meant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", "demo", given]) == 2  # as an override, and below in a file
    assert f"Did you mean {meant}" in capsys.readouterr().err
    key, _, value = given.partition("=")
    if "." not in key:
        config = {"name": "x", "data": {"path": "demo:pictures"}, key: float(value)}
        (tmp_path / "c.json").write_text(json.dumps(config))
        assert main(["check", str(tmp_path / "c.json")]) == 2
        assert f"Did you mean {meant}" in capsys.readouterr().err


def test_one_mistake_is_one_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photo.png").touch()
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(20))
    for words, said in (
        (["check", "demo", f"model.pretrained={tmp_path}"], f"{tmp_path} contains no part of a model"),
        (["check", str(tmp_path)], f"{tmp_path} is a folder"),
        (["check", "demo", "data.path=pics"], f"pics does not exist in {Path.cwd()}"),
        (["check", "demo", "model.vae=demo:nothing"], "model.vae: unknown demo demo:nothing"),
        (["check", "demo", f"model.transformer={tmp_path / 'x.gguf'}"], "x.gguf is a GGUF file"),
        (["check", "demo", "model.transformer=no.safetensors"], "model.transformer: no.safetensors does not exist"),
    ):
        assert main(words) == 2
        printed = capsys.readouterr().err.splitlines()
        assert said in printed[-1] and len(printed) <= 2


def test_parts_of_the_tiny_model_serve_another() -> None:
    """So that a single file can be tried with it."""
    config, _ = read_config(Path("demo"), ["model.text_encoders=demo:tiny-sd3", "model.vae=demo:tiny-sd3"])
    model = resolve_model_folder(config).model
    assert model.text_encoders == model.vae == model.pretrained == str(SHIPPED)


HEAD = '{"name": "a", "data": {"path": "demo:pictures"}, "model": {"pretrained": "demo:tiny-sd3"}, '
HOSTILE = {  # a file's text, and what is said of it
    "8 million prompts": (
        lambda: f'{HEAD}"validation": {{"prompts": [{"1," * 8_000_000}1]}}}}',
        "at most 1,048,576",
    ),
    "prompts": (lambda: f'{HEAD}"validation": {{"prompts": [{"1," * 400_000}1]}}}}', "more than 10,000 values"),
    "9,000 prompts": (lambda: f'{HEAD}"validation": {{"prompts": [{"1," * 9_000}1]}}}}', "9,001 problems"),
    "unknown names": (
        lambda: json.dumps({"name": "a", **{f"gradient_accumulation{n}_checkpoint" * 2: 0 for n in range(9000)}}),
        "9,001 problems",
    ),
    "names of a section": (
        lambda: HEAD + '"train": ' + json.dumps({f"gradient_accumulatiom{n}": 0 for n in range(9000)}) + "}",
        "9,000 problems",
    ),
    "values of a tag": (lambda: HEAD + '"adapter": {"method": ' + json.dumps("l" * 900_000) + "}}", "adapter.method"),
    "depth": (lambda: '{"name": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
    "depth in text": (lambda: HEAD + '"train": {"steps": "' + "[" * 5000 + '"}}', "train.steps"),
    "infinity": (lambda: HEAD + '"optimizer": {"lr": 1e400}}', "1e400 does not fit in 64 bits"),
    "digits": (lambda: HEAD + '"train": {"steps": ' + "9" * 4000 + "}}", "does not fit in 64 bits"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_words_in_little_time(case: str, tmp_path: Path) -> None:
    make, said = HOSTILE[case]
    file = tmp_path / "config.json"
    file.write_text(make())
    clock = time.process_time()
    with pytest.raises(UserError) as caught:
        read_config(file)
    assert said in str(caught.value) and len(str(caught.value)) < 8000
    assert time.process_time() - clock < 60  # seconds; what was quadratic took minutes


def test_for_many_prompts_the_environment_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(HEAD + '"validation": {"prompts": ' + json.dumps(["a red star"] * 9000) + "}}")
    reads, honest = [], redact.secrets_in_environment
    monkeypatch.setattr(redact, "secrets_in_environment", lambda: reads.append(1) or honest())
    config, _ = read_config(file)
    assert config.validation.prompts is not None and len(config.validation.prompts) == 9000
    assert 0 < len(reads) < 10


def all_options(option: type[Option]) -> Iterator[type[Option]]:
    """An option and those in its fields, every member of every union."""
    yield option
    for field in option.model_fields.values():
        for member in option_classes(field.annotation):
            yield from all_options(member)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
def test_no_number_of_any_option_may_be_other_than_finite(value: str) -> None:
    tried = set()
    for option in all_options(TrainConfig):
        for name, field in option.model_fields.items():
            if "float" not in str(field.annotation):
                continue
            key = field.alias or name
            given = f"[{value}, {value}]" if re.search("tuple|list", str(field.annotation)) else value
            with pytest.raises(ValidationError) as caught:
                option.model_validate_json(f'{{"{key}": {given}}}')
            kinds = {error["type"] for error in caught.value.errors() if error["loc"][0] == key}
            assert "finite_number" in kinds, (option, name)
            tried.add(name)
    assert {"lr", "guidance", "clip_norm", "max_aspect"} <= tried


def test_the_configuration_of_an_older_run_has_the_familys_objective() -> None:
    """Before there were families with other objectives, ``objective`` had no name; runs keep such configurations."""
    old = {
        "name": "old",
        "model": {"family": "sd3"},
        "data": {"source": "folder", "path": "x"},
        "objective": {"shift": 2.0},
    }
    config = read_saved(json.dumps(old))
    assert (config.objective.name, config.objective.shift) == ("flow", 2.0)
    unet = read_saved(json.dumps(old | {"model": {"family": "sd15"}, "objective": {}}))
    assert unet.objective.name == "ddpm"
    assert read_saved(json.dumps({key: old[key] for key in ("name", "data")})).objective.name == "flow"


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 40.0 GiB for an array"), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)"),
])  # fmt: skip
def test_full_memory_of_the_machine_is_said_with_its_numbers(error: Exception, capsys, monkeypatch) -> None:
    def fails(args: argparse.Namespace) -> None:
        raise error

    monkeypatch.setitem(cli_main.VERBS, "web", (fails, lambda parser: None))
    assert main(["web"]) == 5
    said = capsys.readouterr().err
    assert re.search(r"^error: this machine's memory is full.*; this process has used up to \d+\.\d GiB\. End", said)
    assert all(number in said for number in re.findall(r"\d{5,}|40.0 GiB", str(error)))


def test_another_runtime_error_keeps_its_traceback(monkeypatch) -> None:
    def fails(args: argparse.Namespace) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setitem(cli_main.VERBS, "web", (fails, lambda parser: None))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["web"])


@pytest.mark.parametrize("path", ["data.path", "data.mask_path", "model.pretrained", "model.text_encoders"])
def test_a_path_longer_than_any_file_s_is_a_problem_of_its_field(path: str, tiny_images: Path) -> None:
    section, leaf = path.split(".")
    data: dict = {"name": "x", "data": {"path": str(tiny_images), "mask": "files"}, "model": {}}
    data[section][leaf] = "x" * 5000
    with pytest.raises(ConfigError, match=rf"{path}: x+\.\.\. has 5,\d+ characters") as refused:
        validate(data, "x.json")
    assert len(str(refused.value)) < 1000
