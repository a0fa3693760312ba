"""``simpletune import``: every key of other trainers' configurations, one by one, and whole files in their forms."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path

import peer_configs
import pytest
import yaml
from import_cases import CASES, LARGE, OLD, REFUSED, XL, XL_OT

from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.main import main
from simpletune.commands.importers import importing
from simpletune.commands.importers.common_options import OPTIMIZERS, SCHEDULES, take_alpha
from simpletune.commands.importers.config_files import read_any
from simpletune.commands.importers.importing import ImportResult, form_of, import_file
from simpletune.commands.importers.kohya import SD3_DIMS
from simpletune.commands.importers.translation import Translation, trainer_tables
from simpletune.config.load import read_json, shipped_files, validate
from simpletune.config.schema import run_name
from simpletune.models.families import FAMILIES
from simpletune.models.flux2.flux2_files import KLEIN
from simpletune.models.lora_registry import matches_layer
from simpletune.models.qwen_image.qwen_image_files import FIRST, NEWEST
from simpletune.models.sd3.sd3_lora import NAMES
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.unet.unet_files import original_modules
from simpletune.system.options import Json, UserError

ROOT = Path(__file__).resolve().parents[3]
BASES: dict[str, Json] = {
    "simpletuner": {
        "model_type": "lora", "model_family": "sd3", "base_model_precision": "no_change", "lora_type": "standard",
        "optimizer": "adamw_bf16", "pretrained_model_name_or_path": LARGE,
    },
    "kohya": {
        "network_module": "networks.lora_sd3", "network_dim": 8, "mixed_precision": "bf16", "output_name": "x",
        "pretrained_model_name_or_path": LARGE,
    },
    "kohya_ss": {
        "LoRA_type": "Standard", "network_dim": 8, "network_alpha": 8, "mixed_precision": "bf16", "epoch": 2,
        "max_resolution": "512,512", "optimizer": "AdamW8bit", "lr_warmup": 10, "learning_rate": 1e-4,
        "stop_text_encoder_training": 0, "pretrained_model_name_or_path": "runwayml/stable-diffusion-v1-5",
    },
    "ai_toolkit": {
        "job": "extension", "type": "sd_trainer", "name": "x", "network.type": "lora", "network.linear": 8,
        "model.name_or_path": LARGE, "model.is_v3": True, "train.dtype": "bf16",
    },
    "diffusers": {
        "script": "train_dreambooth_lora_sd3.py", "pretrained_model_name_or_path": LARGE, "instance_data_dir": "pics",
        "instance_prompt": "sks dog", "max_train_steps": 100, "mixed_precision": "bf16", "output_dir": "out/dog",
    },
    "onetrainer": {
        "training_method": "LORA", "model_type": "STABLE_DIFFUSION_35", "base_model_name": LARGE, "peft_type": "LORA",
        "train_dtype": "BFLOAT_16",
    },
}  # fmt: skip
FULL = {"network_dim": None, "train_text_encoder": True}  # of kohya's scripts that train the whole model
SOURCES: dict[str, Json] = {
    "simpletuner": {"id": "a", "type": "local", "instance_data_dir": "pics"},
    "kohya": {"image_dir": "pics"},
    "onetrainer": {"path": "pics"},
}


def imported(tool: str, folder: Path, settings: Json | None = None, source: Json | None = None) -> ImportResult:
    """Import a configuration of one data set with more settings; None removes one."""
    whole = {**BASES[tool], **(settings or {})}
    whole = {key: value for key, value in whole.items() if value is not None}
    if tool not in SOURCES:
        return import_file(written(tool, folder, whole))
    one = {**SOURCES[tool], **(source or {})}
    if tool == "kohya":
        names = ("resolution", "enable_bucket", "batch_size", "bucket_no_upscale")
        general = {key: one.pop(key) for key in names if key in one}
        data: object = {"datasets": [{**general, "subsets": [one]}]}
    else:
        data = [one]
    file = peer_configs.write(folder, config___json=whole, data___json=data)
    return import_file(file, folder / "data.json")


def written(tool: str, folder: Path, settings: Json) -> Path:
    """Write a configuration in its trainer's form."""
    if tool == "ai_toolkit":
        return peer_configs.write(folder, config___yaml=as_job(settings))
    if tool == "diffusers":
        words = [f'--{key}="{value}"' for key, value in settings.items() if key != "script" and value is not True]
        words += [f"--{key}" for key, value in settings.items() if value is True]
        lines = [f"accelerate launch examples/{settings['script']}", *words]
        return peer_configs.write(folder, config___sh=" \\\n  ".join(lines) + "\n")
    return peer_configs.write(folder, config___json=settings)


def as_job(settings: Json) -> str:
    """Write ai-toolkit's job, whose sections are part of the keys here, as YAML."""
    process: Json = {}
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        section = process
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
    job = {"job": process.pop("job"), "config": {"name": process.pop("name"), "process": [process]}}
    return yaml.safe_dump(job)


def at(config: Json, path: str) -> object:
    value: object = config
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return "unset"
        value = value[name]
    return value


def became(found: ImportResult, key: str) -> set[str]:
    """What became of a key, in whatever section it stood."""
    return {line.became for line in found.lines if line.key == key or line.key.endswith(f".{key}")}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of the result, which takes longer than the import; the tests of whole files have it."""
    monkeypatch.setattr(importing, "validate", lambda *_: None)


@pytest.mark.parametrize("tool", BASES)
def test_each_key(tool: str, unchecked: None, tmp_path: Path) -> None:
    known: dict[str, ImportResult] = {}
    for _, settings, source, path, value, end in (case for case in CASES if case[0] == tool):
        given = f"{settings} {source}"
        if given not in known:
            known[given] = imported(tool, tmp_path, settings, source)
        found = known[given]
        assert at(found.config, path) == value, (given, path)
        names = {key.lstrip("-").rpartition(".")[2] for key in (*settings, *source)}
        names |= {key for row in settings.get("datasets", ()) for key in row}
        names |= {key for part in (*settings.values(), *source.values()) if isinstance(part, dict) for key in part}
        if end in ("left out", "unknown"):
            left = {line.key.rpartition(".")[2] for line in found.lines if line.became == end}
            assert left & names, (given, path)
        elif end is not None:
            assert [line.became for line in found.lines if line.path == path] == [end], (given, path)


@pytest.mark.parametrize("tool", BASES)
def test_what_simpletune_does_not_train_is_refused_in_one_line_and_nothing_is_written(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "ours.json"
    for _, settings, named in (case for case in REFUSED if case[0] == tool):
        assert main(["import", str(written(tool, tmp_path, BASES[tool] | settings)), "--out", str(out)]) == 2, named
        shown = capsys.readouterr()
        (line,) = shown.err.strip().splitlines()
        assert f"{named} is not supported: simpletune trains SD 3" in line and not shown.out and not out.exists()


@pytest.mark.parametrize(
    ("tool", "settings", "expected"),
    [
        ("onetrainer", {"resolution": "768", "masked_training": True}, {"resolution": 768, "mask": "files"}),
        ("kohya", {"resolution": "768", "shuffle_caption": True}, {"resolution": 768, "shuffle_tags": True}),
        ("simpletuner", {"resolution": 768, "caption_dropout_probability": 0.2}, {"caption_dropout": 0.2}),
    ],
)
def test_options_of_the_data_stay_when_the_data_sets_are_not_here(
    tool: str, settings: Json, expected: Json, tmp_path: Path
) -> None:
    found = import_file(peer_configs.write(tmp_path, config___json=BASES[tool] | settings))
    assert found.config["data"].items() >= {"path": "data/my_pictures", "resolution": 768, **expected}.items()
    assert set(settings) <= {line.key for line in found.lines} and not found.problems


def test_a_command_line_of_kohya_s_scripts_with_a_file_of_options(tmp_path: Path) -> None:
    command = """
        # rank 8
        export BASE="runwayml/stable-diffusion-v1-5"
        BROKEN="never closed
        accelerate launch --num_cpu_threads_per_process 1 train_network.py --config_file=more.toml \\
          --pretrained_model_name_or_path=$BASE --network_dim 8 --network_args loraplus_lr_ratio=4 rank_dropout=0.1
    """
    file = peer_configs.write(tmp_path, run___sh=command, more___toml='network_module = "networks.lora"\nseed = 3\n')
    found = import_file(file)
    assert found.tool == "kohya's scripts" and found.config["model"]["pretrained"] == "runwayml/stable-diffusion-v1-5"
    assert found.config["adapter"].items() >= {"rank": 8, "b_lr_ratio": 4, "rank_dropout": 0.1}.items()
    assert found.config["train"]["seed"] == 3 and not found.problems
    (tmp_path / "more.toml").unlink()
    with pytest.raises(UserError, match="no network_module here. Give the file with its options"):
        import_file(file)


def test_a_file_without_a_command_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no configuration of SimpleTuner"):
        import_file(peer_configs.write(tmp_path, run___sh="ls --all\n"))


def test_what_the_result_lacks_comes_first_and_options_that_were_off_are_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings = {"clip_skip": 2, "cache_latents": True, "lowram": False, "weighted_captions": False, "keep_tokens": 0}
    file = peer_configs.write(tmp_path, config___json=BASES["kohya"] | settings)
    assert main(["import", str(file), "--out", str(tmp_path / "ours.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line[:10].strip() for line in lines if not line.startswith(" ")]
    assert heads == ["from", "left out", "unknown", "changed", "taken", "not needed", "off", "not here", "written"]
    assert lines[1].endswith("1 value, which the result lacks") and lines[2].startswith("  clip_skip 2: ")
    assert "  cache_latents true: latents are always cached" in lines[lines.index(lines[2]) + 1 :]
    assert lines[lines.index("off        2 options that were off") + 1] == "  lowram, weighted_captions"


NAMES_NO_METHOD: list[tuple[str, Json, str]] = [  # files, and the words that settle what trains
    ("config.toml", {"network_dim": 32, "mixed_precision": "bf16"}, 'network_module = "networks.lora"'),
    ("config.toml", {"mixed_precision": "bf16", "output_name": "x"}, 'script = "train_db.py"'),
    ("config.toml", {"mixed_precision": "bf16", "network_dim": 8, "train_text_encoder": True}, "network_module"),
    ("config.json", {"network_dim": 8, "lr_warmup": 10, "max_resolution": "512,512"}, '"LoRA_type": "Standard"'),
    ("config.json", {"lr_warmup": 10, "max_resolution": "512,512"}, '"LoRA_type": "LyCORIS/Native Fine-Tuning"'),
    ("config.json", {"model_family": "sdxl", "lora_type": "standard"}, '"model_type": "lora"'),
    ("config.json", {"model_family": "sdxl", "model_type": "lora", "lora_type": "lycoris"}, "lycoris_config"),
    ("config.json", {"model_type": "STABLE_DIFFUSION_15", "peft_type": "LORA"}, '"training_method": "FINE_TUNE"'),
    ("config.yaml", {"job": "extension", "type": "sd_trainer", "name": "x"}, "network: {type: lora}"),
    ("config.sh", {"script": "train_network.py", "network_dim": 4}, "network_module"),
    ("config.sh", {"script": "train_textual_inversion.py", "seed": 4}, "token_string names no token"),
]


@pytest.mark.parametrize(("name", "settings", "words"), NAMES_NO_METHOD, ids=range(len(NAMES_NO_METHOD)))
def test_what_names_no_method_is_refused_with_the_words_that_settle_it(
    name: str, settings: Json, words: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / name
    kind = file.suffix
    if kind == ".toml":
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    elif kind == ".yaml":
        file.write_text(as_job(settings))
    elif kind == ".json":
        file.write_text(json.dumps(settings))
    else:
        flags = [f"--{key}={value}" for key, value in settings.items() if key != "script"]
        file.write_text(" ".join(["python", settings["script"], *flags]))
    with pytest.raises(UserError, match=re.escape(words)):
        import_file(file)
    assert main(["import", str(file), "--out", str(tmp_path / "ours.json")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "ours.json").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", 'script = "sdxl_train.py"\nmixed_precision = "bf16"\n'),
        ("config.toml", 'mixed_precision = "bf16"\noutput_name = "x"\nlearning_rate_te1 = 1e-6\n'),
        ("config.sh", "python fine_tune.py --mixed_precision=bf16\n"),
        ("config.json", '{"LoRA_type": "LyCORIS/Native Fine-Tuning", "max_resolution": "512,512"}'),
        ("config.json", '{"learning_rate_te": 0, "max_resolution": "512,512", "epoch": 1}'),
        ("config.json", '{"model_type": "full", "model_family": "sdxl", "validation_guidance": 5}'),
        ("config.json", '{"training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_15"}'),
        ("config.yaml", as_job({"job": "extension", "type": "sd_trainer", "name": "x", "network": None})),
    ],
)
def test_the_whole_model_trains_where_the_file_says_so(
    name: str, content: str, unchecked: None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert import_file(tmp_path / name).config["adapter"] == {"method": "full"}


@pytest.mark.parametrize("loss", [{}, {"loss_type": "l2"}])
def test_a_setting_of_a_loss_that_is_not_used_is_not_needed(loss: Json, tmp_path: Path) -> None:
    found = imported("simpletuner", tmp_path, {"huber_c": 0.2, **loss}, {})
    assert {line.key for line in found.lists()["not needed"]} >= {"huber_c", *loss}


@pytest.mark.parametrize("run", list(peer_configs.STUDY_RUNS))
def test_the_study_s_values_come_out_as_the_configuration_that_is_shipped(run: str, tmp_path: Path) -> None:
    files = {"config___json": peer_configs.study(run), "config__multidatabackend___json": peer_configs.STUDY_DATA}
    found = import_file(peer_configs.write(tmp_path, **files))
    shipped = read_json(Path(f"sd3_medium_study_{run}"))
    assert {key: value for key, value in shipped.items() if key not in ("$schema", "about")} == found.config
    assert [source["aspect"] for source in found.config["data"]["sources"] if "aspect" in source] == ["square"]
    assert [source["repeats"] for source in found.config["data"]["sources"]] == [11, 11] and not found.problems
    assert {problem.path for problem in found.missing} == {"data.sources.0.path", "data.sources.1.path"}


def test_options_and_data_of_kohya_in_toml(tmp_path: Path) -> None:
    file = peer_configs.write(
        tmp_path,
        config___toml="""
            [model]
            pretrained_model_name_or_path = "sd3_medium.safetensors"
            [network]
            network_module = "networks.lora_sd3"
            network_dim = 16
            network_alpha = 16
            [sampling]
            sample_prompts = "prompts.txt"
            dataset_config = "data.toml"
            prior_loss_weight = 0.5
        """,
        data___toml="""
            [general]
            caption_extension = ".txt"
            keep_tokens = 1
            [[datasets]]
            resolution = 1024
            batch_size = 2
            keep_tokens = 3
              [[datasets.subsets]]
              image_dir = "pics/dog"
              num_repeats = 10
              [[datasets.subsets]]
              image_dir = "pics/reg"
              is_reg = true
              keep_tokens = 5
            [[datasets]]
            resolution = 512
              [[datasets.subsets]]
              image_dir = "pics/old"
        """,
        prompts___txt="sks dog --w 1024 --h 768 --d 7 --l 5 --s 28 --n blurred\n# no\n\na cat --w 1024 --h 1024\n",
    )
    found = import_file(file)
    first, regular, old = found.config["data"]["sources"]
    assert [source["keep_tags"] for source in (first, regular, old)] == [3, 5, 1]  # the inner one wins
    assert (first["repeats"], first["resolution"], old["resolution"]) == (10, 1024, 512)
    assert regular["regularization"] and regular["weight"] == 0.5 and "weight" not in first
    assert found.config["train"]["batch_size"] == 2 and "the largest" in " ".join(map(str, found.lines))
    assert found.config["validation"] == {
        "prompts": ["sks dog", "a cat"], "width": 1024, "height": 768, "seed": 7, "guidance": 5, "steps": 28,
        "negative_prompt": "blurred",
    }  # fmt: skip
    assert not found.problems


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "prompts.json",
            '[{"prompt": "sks dog", "width": 770, "scale": 5, "sample_steps": 28}, {"prompt": ""},'
            ' {"prompt": "a cat", "width": 768, "scale": 5, "sample_steps": 28}]',
        ),
        (
            "prompts.toml",
            "[prompt]\nwidth = 770\nscale = 5\nsample_steps = 28\n"
            '[[prompt.subset]]\nprompt = "sks dog"\n[[prompt.subset]]\nprompt = "a cat"\n',
        ),
        ("prompts.txt", "sks dog --w 770 --l 5 --s 28\na cat --w 770\n"),
    ],
)
def test_prompts_of_kohya_in_each_format(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    found = imported("kohya", tmp_path, {"sample_prompts": name})
    expected = {"prompts": ["sks dog", "a cat"], "width": 768, "guidance": 5, "steps": 28}
    assert found.config["validation"] == expected and not found.problems


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("prompts.json", b"{}", "cannot be read"),
        ("prompts.json", b"[", "cannot be read"),
        ("prompts.toml", b"[prompt", "cannot be read"),
        ("prompts.txt", b"\xff\xfe\xff", "cannot be read"),
        ("prompts.txt", b"# nothing\n", "no prompts"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_read_is_left_out(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    found = imported("kohya", tmp_path, {"sample_prompts": name})
    (line,) = [line for line in found.lines if line.key == "sample_prompts"]
    assert line.became == "left out" and why in line.why and "validation" not in found.config


def test_kohya_s_folders_without_a_data_file(tmp_path: Path) -> None:
    settings = {"train_data_dir": "train", "reg_data_dir": "reg", "resolution": "1024,1024", "train_batch_size": 4,
                "enable_bucket": True, "flip_aug": True}  # fmt: skip
    found = import_file(peer_configs.write(tmp_path, config___json=BASES["kohya"] | settings))
    first, regular = found.config["data"]["sources"]
    assert first == {"path": "train", "folder_names": "kohya", "flip": True, "resolution": 1024, "aspect": "buckets",
                     "variants": 8}  # fmt: skip
    assert regular["regularization"] and regular["path"] == "reg" and found.config["train"]["batch_size"] == 4


def test_a_folder_of_class_pictures_alone_leaves_a_place_for_the_others(tmp_path: Path) -> None:
    found = import_file(peer_configs.write(tmp_path, config___json=BASES["kohya"] | {"reg_data_dir": "reg"}))
    first, regular = found.config["data"]["sources"]
    assert (first["path"], regular["path"]) == ("data/my_pictures", "reg") and regular["regularization"]
    assert not found.problems and [line.path for line in found.lines if line.key == "the data"] == [
        "data.sources.0.path"
    ]


def test_masks_caches_and_unused_data_sets_of_simpletuner(tmp_path: Path) -> None:
    data = [
        {"id": "dogs", "instance_data_dir": "dogs", "conditioning_data": "masks"},
        {"id": "masks", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "masks"},
        {"id": "off", "instance_data_dir": "off", "disabled": True},
        {"id": "text", "dataset_type": "text_embeds", "cache_dir": "cache/text"},
    ]
    file = peer_configs.write(tmp_path, config___json=BASES["simpletuner"], data___json=data)
    found = import_file(file, tmp_path / "data.json")
    assert found.config["data"]["mask"] == "files" and found.config["data"]["mask_path"] == "masks"
    assert found.config["output"]["cache"] == "cache/text" and found.config["data"]["path"] == "dogs"
    assert {"off.disabled", "text.dataset_type", "masks.dataset_type"} <= {line.key for line in found.lines}


def test_lycoris_has_a_file_of_its_own(tmp_path: Path) -> None:
    settings = BASES["simpletuner"] | {"lora_type": "lycoris", "lycoris_config": "config/lycoris.json"}
    own = {"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 16, "bypass_mode": True}
    file = peer_configs.write(tmp_path, config___json=settings, config__lycoris___json=own)
    found = import_file(file)
    assert found.config["adapter"] == {"method": "lokr", "rank": None, "factor": 16}
    assert [line.key for line in found.lists()["not needed"]][:2] == [
        "lycoris_config.linear_alpha", "lycoris_config.bypass_mode",
    ]  # fmt: skip
    settings |= {"model_family": "sdxl", "pretrained_model_name_or_path": "a/xl"}
    for given, ours in ((0, 8), (None, 8), (2, 2)):  # LyCORIS takes 0 and null for linear_dim
        own = {"algo": "locon", "linear_dim": 8, "linear_alpha": 4, "conv_dim": given}
        file = peer_configs.write(tmp_path / f"{given}", config___json=settings, config__lycoris___json=own)
        adapter = import_file(file).config["adapter"]
        assert adapter["conv_rank"] == ours, adapter


def test_a_result_with_problems_is_written_and_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = BASES["kohya"] | {"optimizer_type": "Prodigy", "unet_lr": 1e-4, "wandb_api_key": "abcdefgh123"}
    file = peer_configs.write(tmp_path, config___json=settings)
    out = tmp_path / "ours.json"
    assert main(["import", str(file), "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert "optimizer.lr: 0.0001 would scale down the learning rate that prodigy estimates" in shown.err
    assert "left out" in shown.out and "(not shown)" in shown.out and "abcdefgh123" not in shown.out + shown.err
    assert read_json(out)["optimizer"]["name"] == "prodigy"
    assert main(["import", str(file), "--out", str(out)]) == 2 and "exists" in capsys.readouterr().err


def test_without_out_the_configuration_alone_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = peer_configs.write(tmp_path, data___json=[{"instance_data_dir": "demo:pictures"}])
    file = peer_configs.write(tmp_path, config___json=BASES["simpletuner"])
    found = import_file(file, data)
    (line,) = [line for line in found.lines if line.key == "lora_rank"]  # what is not said is the trainer's default
    assert line.default and str(line) == "lora_rank 16 (its default) -> adapter.rank 16"
    assert found.config["name"] == run_name(tmp_path.name)
    assert main(["import", str(file), "--data", str(data)]) == 0
    shown = capsys.readouterr()
    validate(json.loads(shown.out), "printed")
    for words in ("from       SimpleTuner", "taken      ", "changed    ", "off        "):
        assert words in shown.err
    assert "a" not in [line.partition(" ")[0] for line in shown.out.splitlines()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x___json", "{", "x.json:1:2: not valid JSON"),
        ("x___toml", "a = ", "x.toml: not valid TOML"),
        ("x___yaml", "a: [", "x.yaml:1:5: not valid YAML"),
        ("x___yaml", "a: &b 1\nc: *b\n", "aliases are not read"),
        ("x___yaml", "a: !!python/name:os.system x\n", "not valid YAML"),
        ("x___json", "[]", "a list of data sets"),
        ("x___json", "3", "no object"),
        ("x___json", {"a": 1}, "is no configuration of SimpleTuner"),
        ("x___json", '{"a": 1, "a": 2}', "not valid JSON"),
        ("x___json", "[" * 100_000, "not valid JSON"),
        ("x.json", b"\xff\xfe\xff", "not UTF-8"),
        ("x___json", {**BASES["onetrainer"], "optimizer": 3}, "unexpected type"),
        ("x___json", {**BASES["onetrainer"], "concepts": [3]}, "a list of objects"),
        ("x___json", json.dumps({"a": "x" * 2**20}), "bytes; a configuration has at most"),
    ],
)
def test_what_is_no_configuration(name: str, content: object, message: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        file = tmp_path / name
        file.write_bytes(content)
    else:
        file = peer_configs.write(tmp_path, **{name: content})
    with pytest.raises(UserError, match=message):
        import_file(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        import_file(tmp_path / "no.json")
    with pytest.raises(UserError, match="is a folder"):
        import_file(tmp_path)
    (tmp_path / "secret").write_text("root:x:0:0")
    settings = BASES["kohya"] | {"sample_prompts": str(tmp_path / "secret")}  # not the ending of a file of prompts
    found = import_file(peer_configs.write(tmp_path, config___json=settings))
    assert "root" not in json.dumps(found.config) and "left out" in became(found, "sample_prompts")


def test_our_own_configurations_are_not_taken_for_others() -> None:
    assert {form_of(read_json(file)) for file in shipped_files().values()} == {None}


def test_every_name_of_the_tables_exists_here(tmp_path: Path) -> None:
    for name in OPTIMIZERS:
        found = imported("kohya", tmp_path, {"optimizer_type": name, "network_module": None} | FULL)
        assert not [p for p in found.problems if p.path == "optimizer.name"], name
    for name in SCHEDULES:
        assert not imported("kohya", tmp_path, {"lr_scheduler": name}).problems, name
    known = {name for kind in (SD3, SDXL) for name in kind().files.hub_names if not kind(pretrained=name).inpaints}
    assert set(trainer_tables("simpletuner")["flavours"].values()) == known | {KLEIN, NEWEST, FIRST}
    families = {family.family for family in FAMILIES}
    of_scripts = (trainer_tables(name)["families"].values() for name in ("kohya", "diffusers", "onetrainer"))
    assert {family for each in of_scripts for family in each} <= families
    for trainer in BASES:  # values and reasons belong to an option
        tables = trainer_tables(trainer)
        options = {row.key for part in ("options", "options_data") for row in tables.get(part, ())}
        for name in ("values", "why", "otherwise"):
            assert tables.get(name, {}).keys() <= options, (trainer, name)


def test_each_of_kohya_s_25_blocks_is_the_layers_that_its_script_counts_in_it(unchecked: None, tmp_path: Path) -> None:
    """By get_block_index of sd-scripts' networks/lora.py."""

    def block(layer: str) -> int:
        match = re.search(r"(up|down)_blocks\.(\d+)\.attentions\.(\d+)\.", layer)
        if match is None:
            return 12
        index = 3 * int(match[2]) + int(match[3])
        return 1 + index if match[1] == "down" else 13 + index

    shapes = SD15().architecture.known_shapes()
    layers = Lora(targets="all_linear").modules(shapes)
    assert {block(layer) for layer in layers} == {1, 2, 4, 5, 7, 8, 12, *range(16, 25)}
    for number in range(25):
        ranks = ",".join(str(2 if index == number else 8) for index in range(25))
        given = {"network_dim": 8, "network_args": [f"block_dims={ranks}"]}
        lora = imported("kohya", tmp_path, OLD | given).config["adapter"] | {"method": "lora"}
        adapter = Lora.model_validate_json(json.dumps(lora), strict=True)
        assert list(adapter.problems(shapes)) == []
        found = {layer for layer in layers if adapter.rank_of(layer) == 2}
        assert found == {layer for layer in layers if block(layer) == number}


def test_each_of_kohya_s_23_blocks_of_sdxl_is_the_layers_that_its_script_counts_in_it(
    unchecked: None, tmp_path: Path
) -> None:
    """By get_block_index of sd-scripts' networks/lora.py: 1 + N of input_blocks, 10 + N of middle_block, 13 + N of
    output_blocks; and the same blocks' learning rates, 9 down, 3 in the middle, 9 up."""
    first = {"input": 1, "middle": 10, "output": 13}

    def block(layer: str) -> int:
        way, number = re.match(r"(input|middle|output)_blocks?\.(\d+)", original(layer)).groups()  # type: ignore[union-attr]
        return first[way] + int(number)

    modules = original_modules(SDXL().files.known_config())

    def original(layer: str) -> str:
        unit = next(unit for unit in modules if layer.startswith(f"{unit}."))
        return layer.replace(unit, modules[unit], 1)

    shapes = SDXL().architecture.known_shapes()
    layers = [layer for layer in Lora(targets="all_linear").modules(shapes) if ".attentions." in layer]
    assert {block(layer) for layer in layers} == {5, 6, 8, 9, 11, *range(13, 19)}
    for number in range(23):
        ranks = ",".join(str(2 if index == number else 8) for index in range(23))
        given = {"network_dim": 8, "network_args": [f"block_dims={ranks}"]}
        lora = imported("kohya", tmp_path, XL | given).config["adapter"] | {"method": "lora"}
        adapter = Lora.model_validate_json(json.dumps(lora), strict=True)
        assert list(adapter.problems(shapes)) == []
        found = {layer for layer in layers if adapter.rank_of(layer) == 2}
        assert found == {layer for layer in layers if block(layer) == number}


def test_a_family_without_kohya_s_blocks_leaves_their_options_out(tmp_path: Path) -> None:
    """sd3_train_network.py with networks.lora instead of networks.lora_sd3."""
    plain = {"network_module": "networks.lora", "network_dim": 8}
    assert imported("kohya", tmp_path, plain).config["adapter"]["rank"] == 8
    found = imported("kohya", tmp_path, plain | {"network_args": ["block_dims=2,4", "down_lr_weight=sine"]})
    assert "layers" not in found.config["adapter"]
    left = {line.key: line.why for line in found.lines if line.became == "left out" and "network_args" in line.key}
    assert left == dict.fromkeys(
        ("network_args.block_dims", "network_args.down_lr_weight"),
        "networks.lora counts no blocks of SD3",
    )


def test_kohya_s_kinds_of_sd3_s_layers_are_those_of_its_script() -> None:
    """By the words that networks/lora_sd3.py looks for in a layer's original name."""
    kinds = {"attn": "attn", "mlp": "mlp", "mod": "adaLN_modulation"}
    shapes = SD3().architecture.known_shapes() | {
        f"transformer_blocks.0.attn2.to_{x}.weight": (1536, 1536) for x in ("q", "out.0")
    }
    layers = Lora(targets="all_linear").modules(shapes)
    for name, pattern in SD3_DIMS.items():
        stream, kind, _ = name.split("_")
        words = f"{stream}_block", kinds[kind]
        found = {layer for layer in layers if matches_layer(pattern, layer)}
        assert found == {layer for layer in layers if all(word in NAMES.original(layer)[0] for word in words)} != set()


def test_the_documentation_has_a_line_for_every_key() -> None:
    page = (ROOT / "docs" / "reference" / "import-keys.md").read_text()
    tables = [trainer_tables(trainer) for trainer in BASES]
    keys = {row.key for table in tables for name in ("options", "options_data", "lora") for row in table.get(name, ())}
    keys |= {
        key
        for table in tables
        for name in ("left_out", "left_out_data", "no_effect", "no_effect_data")
        for key in table.get(name, ())
    }
    keys |= {key.lstrip("-") for _, settings, source, *_ in CASES for key in (*settings, *source)}
    patterns = tuple(name[:-1] for name in re.findall(r"`([\w.]+\*)`", page))
    missing = {
        key
        for key in keys
        if f"`{key}`" not in page and f"`{key.rpartition('.')[2]}`" not in page and not key.startswith(patterns)
    }
    assert missing == {"no_such_key", "nonsense", "wurst"}


@pytest.mark.parametrize(("alpha", "why"), [(8.0, "a scale of 0.5"), (16.0, ""), (32.0, "a scale of 2")])
def test_an_alpha_that_is_not_the_rank_says_what_it_scales_by(alpha: float, why: str) -> None:
    found = Translation({})
    take_alpha(found, "network_alpha", alpha, 16)
    assert found.config == {"adapter": {"alpha": alpha}}
    assert [line.why.partition(":")[0] for line in found.lines] == [why]


LYCORIS = {  # LyCORIS's arguments in JSON, and what each becomes; true is a switch, not 1
    "use_tucker": "left out", "use_scalar": "left out", "train_norm": "left out", "rs_lora": "taken",
    "bypass_mode": "not needed", "wd_on_output": "not needed", "rescaled": "left out",
}  # fmt: skip


def test_switches_of_lycoris_are_not_dropped(unchecked: None, tmp_path: Path) -> None:
    """LyCORIS #172: rs_lora changes the scale by the root of the rank."""
    settings = BASES["simpletuner"] | {"lora_type": "lycoris", "lycoris_config": "lycoris.json", "model_family": "sdxl"}
    own = {"algo": "lora", "linear_dim": 16, "linear_alpha": 16, **dict.fromkeys(LYCORIS, True)}
    found = import_file(peer_configs.write(tmp_path, config___json=settings, lycoris___json=own))
    assert found.config["adapter"]["rank_stabilized"] is True
    heads = {line.key.rpartition(".")[2]: head for head, lines in found.lists().items() for line in lines}
    assert {key: heads[key] for key in LYCORIS} == LYCORIS


@pytest.mark.parametrize("algo", ["lokr", "loha", "full"])
@pytest.mark.parametrize(
    "given", ["rank_dropout=0.1", "module_dropout=0.1", "loraplus_lr_ratio=4", "dora_wd=True", "dropout=0.1"]
)
def test_what_a_network_of_lycoris_has_and_ours_lacks_is_left_out(
    algo: str, given: str, unchecked: None, tmp_path: Path
) -> None:
    """Of kohya's own networks alike, which the GUI uses."""
    modules = ["lycoris.kohya", *([f"networks.{algo}"] if algo != "full" else [])]
    for module in modules:
        arguments = [f"algo={algo}", given] if module == "lycoris.kohya" else [given]
        found = imported("kohya", tmp_path, XL | {"network_module": module, "network_args": arguments})
        (line,) = [line for line in found.lists()["left out"] if line.key == f"network_args.{given.partition('=')[0]}"]
        assert algo in line.why


@pytest.mark.parametrize(
    ("tool", "settings", "key", "head"),
    [
        ("ai_toolkit", {"train.loss_type": "mse"}, "train.loss_type", "not needed"),
        ("ai_toolkit", {"train.loss_type": "mae"}, "train.loss_type", "left out"),
        ("kohya", {"loss_type": "l2"}, "loss_type", "not needed"),
        ("kohya", {"loss_type": "l1"}, "loss_type", "left out"),
        ("kohya", {"save_model_as": "ckpt"}, "save_model_as", "left out"),
        ("kohya_ss", {"num_processes": 1}, "num_processes", "not needed"),
        ("kohya_ss", {"num_processes": 2}, "num_processes", "left out"),
        ("simpletuner", {"resume_from_checkpoint": "latest"}, "resume_from_checkpoint", "not needed"),
        ("simpletuner", {"resume_from_checkpoint": "checkpoint-500"}, "resume_from_checkpoint", "left out"),
        ("diffusers", {"num_validation_images": 4}, "num_validation_images", "left out"),
        ("onetrainer", {"continue_last_backup": True}, "continue_last_backup", "left out"),
        ("onetrainer", {"output_model_format": "SAFETENSORS"}, "output_model_format", "not needed"),
        ("onetrainer", {"output_model_format": "CKPT"}, "output_model_format", "left out"),
    ],
)
def test_a_key_without_effect_at_one_value_is_left_out_at_others(
    tool: str, settings: Json, key: str, head: str, unchecked: None, tmp_path: Path
) -> None:
    found = imported(tool, tmp_path, settings)
    assert [each for each, lines in found.lists().items() if key in {line.key for line in lines}] == [head]


def test_lokr_trained_whole_has_no_alpha_and_lycoris_s_own_factor(unchecked: None, tmp_path: Path) -> None:
    """SimpleTuner #844: LyCORIS ignores alpha where both matrices are whole; its factor is -1 unless one is given."""
    arguments = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"], "network_alpha": 1}
    found = imported("kohya", tmp_path, XL | arguments | {"network_dim": 100000})
    assert found.config["adapter"]["rank"] is None and found.config["adapter"]["factor"] == -1
    assert "network_alpha" in {line.key for line in found.lists()["not needed"]}
    found = imported("kohya", tmp_path, XL | arguments | {"network_dim": 16})
    assert "network_alpha" in {line.key for line in found.lists()["left out"]}


@pytest.mark.parametrize(("preset", "layers"), [("attn-mlp", 3), ("attn-only", 1), ("full", None)])
def test_lycoris_s_native_fine_tuning_of_some_layers(preset: str, layers: int | None, tmp_path: Path) -> None:
    arguments = {"network_module": "lycoris.kohya", "network_args": ["algo=full", f"preset={preset}"]}
    found = imported("kohya", tmp_path, XL | arguments | {"network_dim": 8})
    assert not found.problems
    if layers is None:
        assert found.config["adapter"] == {"method": "full"}
    else:
        assert found.config["adapter"]["method"] == "partial" and len(found.config["adapter"]["layers"]) == layers


def test_a_batch_size_of_the_options_counts_where_the_data_sets_name_none(unchecked: None, tmp_path: Path) -> None:
    found = imported("kohya", tmp_path, {"train_batch_size": 4})
    assert found.config["train"]["batch_size"] == 4
    found = imported("kohya", tmp_path, {"train_batch_size": 4}, {"batch_size": 2})
    assert found.config["train"]["batch_size"] == 2
    assert "train_batch_size" in {line.key for line in found.lists()["not needed"]}


def test_both_betas_of_separate_keys_are_kept(unchecked: None, tmp_path: Path) -> None:
    found = imported("diffusers", tmp_path, {"adam_beta1": 0.8, "adam_beta2": 0.95})
    assert found.config["optimizer"]["betas"] == [0.8, 0.95]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_checkpointing": True}, {"checkpointing": "all"}),
        ({"gradient_checkpointing": "OFF"}, {"checkpointing": "none"}),
        (
            {"gradient_checkpointing": "CPU_OFFLOADED", "enable_activation_offloading": True,
             "layer_offload_fraction": 0.5},
            {"checkpointing": "all", "offload_checkpoint_inputs": True, "resident_blocks": 19},
        ),
    ],
)  # fmt: skip
def test_older_versions_of_onetrainer(given: Json, expected: Json, unchecked: None, tmp_path: Path) -> None:
    older = {"weight_dtype": "INT_8", "unet_weight_dtype": "NONE", "min_snr_gamma": 5, "train_text_encoder": True}
    found = imported("onetrainer", tmp_path, given | older)
    assert found.config["memory"] == expected and found.config["precision"]["weights"] == "int8"
    found = imported("onetrainer", tmp_path, XL_OT | given | older | {"unet_learning_rate": 3e-4})
    assert found.config["optimizer"]["lr"] == 3e-4 and found.config["objective"]["min_snr_gamma"] == 5
    assert found.config["text"]["lora"]["encoders"] == ["clip_l"]
    told = {line.key for line in found.lines}
    assert told >= {*given, *older, "unet_learning_rate"} and "unet.gradient_checkpointing" not in told


def test_a_null_of_onetrainer_s_clipping_is_none(unchecked: None, tmp_path: Path) -> None:
    file = peer_configs.write(tmp_path, config___json={**BASES["onetrainer"], "clip_grad_norm": None})
    assert import_file(file).config["train"]["clip_norm"] is None


def test_the_second_of_two_embeddings_is_left_out(unchecked: None, tmp_path: Path) -> None:
    found = imported("onetrainer", tmp_path, {"additional_embeddings": [{"placeholder": "a"}, {"placeholder": "b"}]})
    assert [line.key for line in found.lists()["left out"]] == ["additional_embeddings[1].placeholder"]


def test_a_file_of_options_without_its_ending_is_read(tmp_path: Path) -> None:
    """As sd-scripts' read_config_from_file does."""
    command = "python train_network.py --config_file=more --network_dim=8\n"
    more = 'network_module = "networks.lora"\nnetwork_dim = 4\n'
    found = import_file(peer_configs.write(tmp_path, run___sh=command, more___toml=more))
    assert found.config["adapter"]["rank"] == 8
    assert "config_file.network_dim" in {line.key for line in found.lists()["not needed"]}


def test_a_token_without_initial_words_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^init_word names no words that zz starts from. Set it$"):
        import_file(peer_configs.write(tmp_path, run___sh="python train_textual_inversion.py --token_string=zz\n"))


def test_secrets_of_nested_sections_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    secrets = {"huggingface_token": "hf_abcdef", "cloud": {"api_key": "abcdef", "user": "abcdef"}}
    file = peer_configs.write(tmp_path, config___json=BASES["onetrainer"] | {"secrets": secrets})
    assert main(["import", str(file), "--out", str(tmp_path / "ours.json")]) == 0
    shown = capsys.readouterr()
    assert "secrets.cloud.user (not shown)" in shown.out and "abcdef" not in shown.out + shown.err


NUMBERED = {
    "kohya_ss": ("lr_warmup",),
    "onetrainer": ("model_type", "peft_type"),
    "simpletuner": ("flow_schedule_shift",),
}
HOSTILE: list[tuple[str, str, str]] = [  # what trainers never write: each is refused, in words, within a second
    ("x.yaml", "- " * 100_000, "nested too deeply"),
    ("x.yaml", "a: " + "[" * 20_000, "nested too deeply"),
    ("x.yaml", "? " * 5_000, "nested too deeply"),
    ("x.yaml", "".join(f"k{n}: 1\n" for n in range(30_000)), r"x.yaml:\d+:\d+: .*more than 20,000 values"),
    ("x.yaml", f"a: {'9' * 5_000}", "x.yaml:1:4: .*is not a number of 64 bits"),
    ("x.yaml", f"a: 0x{'f' * 5_000}", "x.yaml:1:4: .*is not a number of 64 bits"),
    ("x.yaml", f"a: 1{':59' * 5_000}", "x.yaml:1:4: .*is not a number of 64 bits"),
    ("x.yaml", "a: 0x_", "x.yaml:1:4: .*is not a number of 64 bits"),
    ("x.yaml", "a: 18446744073709551616", "a: a number that does not fit in 64 bits"),
    ("x.yaml", "a:\n- b: .inf", r"a\[0\].b: inf is not a finite number"),
    ("x.yaml", "a: -.INF", "a: -inf is not a finite number"),
    ("x.yaml", "a: .nan", "a: nan is not a finite number"),
    ("x.yaml", "a: 9999-99-99\n1999-99-99: b", "is no configuration of"),
    ("x.yaml", "? [a]\n: 1", "x.yaml:1:3: not valid YAML"),
    ("x.yaml", "a: !!timestamp x", "the tag tag:yaml.org,2002:timestamp is not read"),
    ("x.yaml", "a: !!binary x", "the tag .* is not read"),
    ("x.yaml", "a: 1\n--- \nb: 1", "x.yaml:2:1: not valid YAML"),
    ("x.yaml", "a: \0", "not valid YAML"),
    ("x.yaml", "a: =", "not valid YAML"),
    ("x.yaml", "<<: 3", "not valid YAML"),
    ("x.toml", ".".join("a" * 5_000) + " = 1", "nested too deeply"),
    ("x.toml", "b = 1\n  " + " . ".join(["'a'"] * 100_000) + " = 1", "nested too deeply"),
    ("x.toml", f"[[ {'.'.join(['a'] * 100_000)}]]", "nested too deeply"),
    ("x.toml", f"a = {'[' * 100_000}", "nested too deeply"),
    ("x.toml", f"a = {'{a=' * 80}1{'}' * 80}", "nested too deeply"),
    ("x.toml", f"a = {'9' * 5_000}", "x.toml"),
    ("x.toml", f"a = 0x{'f' * 5_000}", "a: a number that does not fit in 64 bits"),
    ("x.toml", "a = 9999-99-99", "x.toml"),
    ("x.toml", "[a]\nb = [1, -inf]", r"a.b\[1\]: -inf is not a finite number"),
    ("x.toml", "a = nan", "a: nan is not a finite number"),
    ("x.toml", f"a = [{'1,' * 110_000}]", "more than 100,000 values"),
    ("x.json", f'{{"a": {"9" * 5_000}}}', "does not fit in 64 bits"),
    ("x.json", '{"a": 1e999}', "does not fit in 64 bits"),
    ("x.json", '{"a": -Infinity}', "is not a JSON number"),
    ("x.json", '{"a": ' * 80 + "1" + "}" * 80, "nested too deeply"),
    ("x.json", f"[{'1,' * 110_000}1]", "more than 100,000 values"),
    ("x.sh", "v1=xxxx\n" + "".join(f"v{n}=$v{n - 1}$v{n - 1}\n" for n in range(2, 60)), "more than 1,048,576"),
    ("x.sh", f"v={'x' * 9_000}\n" + "".join(f"v{n}=${{v}}\n" for n in range(9_000)), "more than 1,048,576 characters"),
    ("x.bat", f"set v={'x' * 50_000}\nv={'x' * 50_000}\npython %v%%v%%v% train_network.py", "at most 65,536"),
    ("x.cmd", "python train_network.py --a" + " 1" * 30_000, "has no network_module"),
    ("x.sh", f"python {'$x' * 20_000}.py", "is no configuration|script .* is not supported"),
    ("x.sh", "'" * 50_001, "is no configuration of"),
    ("x.sh", "\\ " * 30_000, "is no configuration of"),
    ("x.sh", "python train_network.py --a" + " 1" * 300_000, "a command of 600,027 characters. Use at most 65,536"),
    ("x.sh", "python train_network.py --lr=1e999 --lr", "has no network_module"),
    ("x" * 300, "", "cannot be read"),
    ("x\0", "", "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_refused_in_words_and_time(name: str, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if len(name) < 10 and "\0" not in name:
        file.write_text(content, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(UserError, match=message) as refused:
        import_file(file)
    assert time.process_time() - started < 5  # the slowest takes half a second
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("tool", BASES)
def test_no_value_ends_in_a_traceback(tool: str, tmp_path: Path) -> None:
    """Each option of each trainer's base with values that no trainer takes: translated, left out or refused."""
    values: list[object] = [[], {"a": {"b": [1]}}, 2**62, -1, 1e300, "nan", "1e400", "9" * 400, "x" * 400, "a\nb", "'"]
    for key in (*BASES[tool], *NUMBERED.get(tool, ())):
        for value in values:
            with suppress(UserError):
                imported(tool, tmp_path, {key: value})


def test_yaml_has_the_values_of_json(tmp_path: Path) -> None:
    text = "a: 2026-11-29\nb: 0x10\nc: 1_000\nd: [1.5, ~, yes, '3']\n2: e\n"
    (tmp_path / "x.yaml").write_text(text)
    assert read_any(tmp_path / "x.yaml") == {
        "a": "2026-11-29", "b": 16, "c": 1000, "d": [1.5, None, True, "3"], "2": "e",
    }  # fmt: skip


def test_no_configuration_is_too_deep_or_long_for_its_reader(tmp_path: Path) -> None:
    """What is at the limits is read."""
    (tmp_path / "x.toml").write_text(".".join(["a"] * 60) + " = 1\nb = '" + "a." * 200 + "'")
    assert isinstance(read_any(tmp_path / "x.toml"), dict)
    (tmp_path / "x.sh").write_text(f"v={'x' * 50_000}\npython train_network.py --a=$v --b 1 2 3 --b=$w")
    found = read_any(tmp_path / "x.sh")
    assert isinstance(found, dict) and (len(found["a"]), found["b"]) == (50_000, "$w")
