"""Every key of an imported file, and of those that it names, stands in exactly one printed list.

The keys, with a default and another value each, are those of the trainers' own argument parsers and configuration
classes, at the commits that keys/*.json name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import peer_configs
import pytest
from import_cases import INVERSION, MEDIUM, XL_BASE
from test_import import BASES, as_job

from simpletune.commands.importers import importing
from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.commands.importers.translation import UNTRANSLATED
from simpletune.system.options import Json, UserError

KEYS: dict[str, Json] = {
    file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "keys").glob("*.json")
}
SDXL = {"network_module": "networks.lora", "network_dim": 8, "pretrained_model_name_or_path": XL_BASE}
SD3 = SDXL | {"network_module": "networks.lora_sd3", "pretrained_model_name_or_path": MEDIUM}
LYCORIS = SDXL | {"network_module": "lycoris.kohya"}
XL_OT = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": XL_BASE, "training_method": "LORA"}
Case = tuple[str, dict[str, object]]  # a key, and the files with it, by their names as peer_configs.write has them


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "validate", lambda *_: None)


def keys_of(value: object, section: str = "") -> Iterator[str]:
    """Each key of a file that stands for no section, with its sections."""
    if isinstance(value, dict) and (value or not section):
        for key, each in value.items():
            yield from keys_of(each, f"{section}.{key}" if section else key.lstrip("-"))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for each in value:
            yield from keys_of(each, section)
    else:
        yield section


def lists_of(found: ImportResult, key: str) -> set[str]:
    """The lists with a key, as its last sections name it; a trainer's default is not the file's."""
    lines = [
        (head, line)
        for head, lines in found.lists().items()
        for line in lines
        if line.key == key or line.key.endswith(f".{key}")
    ]
    return {head for head, line in lines if not line.default} or {head for head, _ in lines}


def both(tool: str, part: str = "keys") -> Iterator[tuple[str, object]]:
    """Each key of a trainer with its default and with another value."""
    for key, (default, other, *_) in KEYS[tool][part].items():
        yield key, default
        yield key, other


def kohya() -> Iterator[Case]:
    given = {"token_string": {"token_string": "<a>", "init_word": "dog"}}
    for base in (SDXL, SD3):
        for key, value in both("kohya"):
            yield key, {"config___json": base | {key: value} | (given.get(key, {}) if value else {})}
        for key, value in both("kohya", "network"):
            yield f"network_args.{key}", {"config___json": base | {"network_args": [f"{key}={value}"]}}
    for algo in ("locon", "lokr", "loha", "full", "diag-oft"):
        for key, value in both("lycoris"):
            arguments = [f"algo={algo}", f"{key}={value}"] if key != "algo" else [f"algo={value}"]
            yield f"network_args.{key}", {"config___json": LYCORIS | {"network_args": arguments}}
    for key, value in both("kohya", "data"):
        if value is not None:
            for at in range(3):  # TOML has no null
                subset = {"image_dir": "pics", **({key: value} if at == 0 else {})}
                dataset = {"resolution": 512, "subsets": [subset], **({key: value} if at == 1 else {})}
                data = {"datasets": [dataset], **({"general": {key: value}} if at == 2 else {})}
                section = ("datasets[0].subsets[0]", "datasets[0]", "general")[at]
                files = {"config___json": SDXL | {"dataset_config": "data.json"}, "data___json": data}
                yield f"{section}.{key}", files


def lora_easy_scripts() -> Iterator[Case]:
    """Options in sections, arguments in tables, data sets in the same file; the GUI's own keys."""
    lora = {"args": {"pretrained_model_name_or_path": XL_BASE}}
    rex = {"lr_scheduler_type": "custom.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts"}
    given = {"token_string": {"token_string": "<a>", "init_word": "dog"}}
    own = [(key, value) for key in ("fa", "easy_name", "save_toml", "tag_occurrence") for value in ("", "true")]
    own += [("warmup_ratio", 0.1), ("lr_scheduler_type", "other.Schedule"), ("lr_scheduler_args", {"gamma": 1})]
    for key, value in [*both("kohya"), *own]:
        if value is None:  # TOML has no null
            continue
        for mode in ("lora", "textual_inversion"):
            more = given["token_string"] if mode != "lora" else {}
            args = {"args": {"max_train_steps": 100, **more, key: value}}
            yield key, {"config___json": {"general_args": lora, "train_mode": {"train_mode": mode}, "extra_args": args}}
    for key, value in both("kohya", "network"):
        arguments = {"args": {"network_args": {key: value}}}
        yield f"network_args.{key}", {"config___json": {"general_args": lora, "network_args": arguments}}
    for key, value in both("lycoris"):
        arguments = {"args": {"network_args": {"algo": "locon", key: value}}}
        yield f"network_args.{key}", {"config___json": {"general_args": lora, "network_args": arguments}}
    for key, value in both("kohya", "data"):
        if value is not None:
            subset: Json = {"image_dir": "pics"}
            yield f"subsets[0].{key}", {"config___json": {"general_args": lora, "subsets": [subset | {key: value}]}}
            shared: Json = {"general_args": lora, "bucket_args": {"dataset_args": {"resolution": 512, key: value}}}
            if key not in ("image_dir", "is_reg", "custom_attributes"):  # which subsets alone have
                yield key, {"config___json": shared}
                yield key, {"config___json": shared | {"subsets": [subset]}}
    for key in ("min_lr", "gamma", "d", "lr_scheduler", "lr_scheduler_num_cycles", "lr_warmup_steps", "warmup_ratio"):
        inner = key in ("min_lr", "gamma", "d")
        args = {**rex, "warmup_ratio": 0.1, "max_train_steps": 100}
        args |= {"lr_scheduler_args": {key: 0.5}} if inner else {key: "linear" if key == "lr_scheduler" else 2}
        name = f"lr_scheduler_args.{key}" if inner else key
        yield name, {"config___json": {"general_args": lora, "optimizer_args": {"args": args}}}


def kohya_ss() -> Iterator[Case]:
    for key, value in both("kohya_ss"):
        for kind in ("Standard", "LyCORIS/LoKr"):
            more = {"init_word": "dog"} if key == "token_string" else {}
            yield key, {"config___json": {**BASES["kohya_ss"], "LoRA_type": kind, **more, key: value}}


def simpletuner() -> Iterator[Case]:
    base = BASES["simpletuner"] | {"data_backend_config": "data.json"}
    data: list[Json] = [{"id": "a", "type": "local", "instance_data_dir": "pics"}]
    lycoris = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 1}
    for key, value in both("simpletuner"):
        if key == "data_backend_config":
            continue
        files = {"config___json": {**base, key: value}, "data___json": data}
        yield key, files | ({"config__lycoris_config___json": lycoris} if value == "lycoris" else {})
    for key, value in both("simpletuner", "data"):
        yield key, {"config___json": base, "data___json": [{**data[0], key: value}]}
    for key, value in both("lycoris"):
        chosen = base | {"lora_type": "lycoris", "lycoris_config": "lycoris.json", "model_family": "sdxl"}
        yield (
            f"lycoris_config.{key}",
            {"config___json": chosen, "data___json": data, "lycoris___json": {**lycoris, key: value}},
        )


def onetrainer() -> Iterator[Case]:
    known = KEYS["onetrainer"]
    for base in (XL_OT, BASES["onetrainer"], XL_OT | {"training_method": "FINE_TUNE"}):
        for key, value in both("onetrainer"):
            yield key, {"config___json": {**base, key: value}}
        for section, kind in known["sections"].items():
            for key, value in both("onetrainer", kind):
                yield f"{section}.{key}", {"config___json": {**base, section: {key: value}}}
    for base in (XL_OT, XL_OT | {"training_method": "EMBEDDING"}):
        for key, value in both("onetrainer", "TrainEmbeddingConfig"):
            yield key, {"config___json": {**base, "additional_embeddings": [{key: value}]}}
    for part, section in (("concept", ""), ("concept_image", "image"), ("concept_text", "text")):
        for key, value in both("onetrainer", part):
            concept = {"path": "pics", **({section: {key: value}} if section else {key: value})}
            yield key, {"config___json": XL_OT | {"concept_file_name": "c.json"}, "c___json": [concept]}
    for key, value in both("onetrainer", "sample"):
        samples = [{"prompt": "a dog", key: value}]
        yield key, {"config___json": XL_OT | {"sample_definition_file_name": "s.json"}, "s___json": samples}


def ai_toolkit() -> Iterator[Case]:
    base = BASES["ai_toolkit"]
    for key, value in both("ai_toolkit"):
        more = {"embedding.trigger": "a"} if key.startswith("embedding.") and value else {}
        yield key, {"config___yaml": as_job(base | more | {key: value})}
    for key, value in both("ai_toolkit", "data"):
        yield f"datasets[0].{key}", {"config___yaml": as_job(base | {"datasets": [{"folder_path": "a", key: value}]})}
    for key, value in both("ai_toolkit", "sample"):
        samples = [{"prompt": "a dog", key: value}]
        yield f"samples.{key}", {"config___yaml": as_job(base | {"sample.samples": samples})}


def diffusers() -> Iterator[Case]:
    for key, (default, other, scripts) in KEYS["diffusers"]["keys"].items():
        for script in scripts:
            own = INVERSION if "inversion" in script else {"instance_data_dir": "pics", "instance_prompt": "a dog"}
            for value in (default, other):
                if value is not None and value is not False:
                    words = {**own, "pretrained_model_name_or_path": MEDIUM, key: value}
                    flags = " ".join(
                        f"--{name}" if word is True else f"--{name}='{word}'"
                        for name, word in words.items()
                        if name != "script" and word is not None
                    )
                    yield key, {"config___sh": f"python {script} {flags}\n"}


TRAINERS = {
    each.__name__: each for each in (kohya, lora_easy_scripts, kohya_ss, simpletuner, onetrainer, ai_toolkit, diffusers)
}


def problems_of(case: Case, folder: Path) -> Iterator[str]:
    """What an import says wrongly or not at all of the keys of its files."""
    key, files = case
    file = peer_configs.write(folder, **files)
    try:
        found = import_file(file)
    except UserError as error:
        if key.rpartition(".")[2] not in str(error):
            yield f"{key}: refused by another name: {error}"
        return
    names = {line.key for line in found.lines}
    own = [name for name in names if f".{name}".endswith(f".{key}") or f".{key}." in f".{name}" or f"{key}[" in name]
    told = [lists_of(found, name) for name in own]
    if not told or any(len(each) != 1 or "unknown" in each for each in told):
        yield f"{key}: {dict(zip(own, told, strict=True))}"
    for content in files.values():
        for name in keys_of(content) if isinstance(content, dict | list) else ():
            leaf = name.rpartition(".")[2]
            if not lists_of(found, leaf) and not any(f".{leaf}." in f".{each}" for each in names):
                yield f"{key}: {name} is in no list"
    for line in found.lines:
        if line.why == UNTRANSLATED and line.listed != "off":
            yield f"{key}: {line}"


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tool", TRAINERS)
def test_each_key_at_its_default_and_at_another_value(tool: str, step: int, tmp_path: Path) -> None:
    cases = list(TRAINERS[tool]())
    keys = list(dict.fromkeys(key for key, _ in cases))[::step]
    wrong = [problem for case in cases if case[0] in keys for problem in problems_of(case, tmp_path)]
    assert not wrong, "\n".join(wrong)
