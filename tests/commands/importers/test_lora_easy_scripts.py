"""``simpletune import`` of presets of LoRA_Easy_Training_Scripts, whose sections hold options of kohya's scripts."""

from __future__ import annotations

import random
import tomllib
from contextlib import suppress
from pathlib import Path

import peer_configs
import pytest

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.system.options import Json, UserError

PRESET: Json = {
    "subsets": [
        {"image_dir": "pics", "num_repeats": 15, "keep_tokens": 1, "shuffle_caption": True, "name": "dog"},
        {"image_dir": "reg", "num_repeats": 2, "is_reg": True, "caption_extension": ".txt"},
    ],
    "train_mode": {"train_mode": "lora"},
    "general_args": {
        "args": {
            "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0", "sdxl": True, "seed": 42,
            "mixed_precision": "bf16", "gradient_checkpointing": True, "max_train_steps": 1000, "cache_latents": True,
        },
        "dataset_args": {"resolution": 768, "batch_size": 4},
    },
    "network_args": {"args": {"network_dim": 64, "network_alpha": 16.0, "min_timestep": 0, "max_timestep": 1000}},
    "optimizer_args": {
        "args": {
            "optimizer_type": "AdamW8bit", "learning_rate": 1e-4, "lr_scheduler": "cosine", "warmup_ratio": 0.05,
            "optimizer_args": {"weight_decay": "0.1", "betas": "0.9,0.99"},
        }
    },
    "saving_args": {"args": {"output_dir": "out/${replace}", "output_name": "my_${replace}", "easy_name": "dog"}},
    "bucket_args": {"dataset_args": {"enable_bucket": True}},
}  # fmt: skip


def imported(folder: Path, *changes: tuple[str, object]) -> ImportResult:
    """Import the preset with keys of sections changed; None removes one."""
    settings = tomllib.loads(as_toml(PRESET))
    for path, value in changes:
        *sections, leaf = path.split(".")
        section = settings
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            del section[leaf]
        else:
            section[leaf] = value
    return import_file(peer_configs.write(folder, preset___toml=as_toml(settings)))


def as_toml(settings: Json, prefix: str = "") -> str:
    """Write TOML: values first, then tables and lists of tables."""
    lines, tables = [], []
    for key, value in settings.items():
        if isinstance(value, dict):
            tables.append(f"[{prefix}{key}]\n{as_toml(value, f'{prefix}{key}.')}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            tables += [f"[[{prefix}{key}]]\n{as_toml(each)}" for each in value]
        else:
            text = repr(value).replace("'", '"') if not isinstance(value, bool) else str(value).lower()
            lines.append(f"{key} = {text}\n")
    return "".join(lines) + "".join(tables)


def test_a_lora_preset_becomes_a_lora_with_its_values(tmp_path: Path) -> None:
    found = imported(tmp_path)
    config = found.config
    assert found.tool.startswith("LoRA_Easy_Training_Scripts") and "kohya" in found.tool and not found.problems
    assert config["adapter"] == {"targets": "all_linear", "method": "lora", "rank": 64, "alpha": 16.0}
    assert config["model"]["family"] == "sdxl" and config["precision"] == {"weights": "bf16", "compute": "bf16"}
    assert (config["name"], config["output"]["runs"]) == ("my_dog", "out/dog")
    assert config["train"].items() >= {"steps": 1000, "seed": 42, "batch_size": 4}.items()
    assert config["optimizer"].items() >= {"name": "adamw8bit", "weight_decay": 0.1, "betas": [0.9, 0.99]}.items()
    assert config["schedule"] == {"name": "cosine", "warmup_steps": 50}
    first, second = config["data"]["sources"]
    assert (first["path"], first["repeats"], first["resolution"], first["aspect"]) == ("pics", 15, 768, "buckets")
    assert first["keep_tags"] == 1 and second["regularization"]
    keys = {line.key for line in found.lines if not line.default}
    assert {"warmup_ratio", "train_mode", "easy_name", "subsets[0].name", "subsets[1].is_reg"} <= keys
    assert not {key for key in keys if key.startswith(("network_module", "lr_warmup_steps", "datasets"))}


def test_what_a_preset_leaves_out_has_the_gui_s_defaults_not_kohya_s(tmp_path: Path) -> None:
    text = """
        [general_args.args]
        pretrained_model_name_or_path = "runwayml/stable-diffusion-v1-5"
        [network_args.args]
    """
    found = import_file(peer_configs.write(tmp_path, preset___toml=text)).config
    assert found["adapter"].items() >= {"method": "lora", "rank": 32, "alpha": 16.0}.items()
    assert found["train"].items() >= {"epochs": 1, "seed": 23}.items() and "steps" not in found["train"]
    assert (found["optimizer"]["lr"], found["schedule"]["name"]) == (1e-4, "cosine")
    assert found["precision"]["compute"] == "fp16" and found["data"]["resolution"] == 512


NETWORK = "network_args.args.network_args"
SCHEDULERS = "LoraEasyCustomOptimizer"


@pytest.mark.parametrize(
    ("changes", "path", "value"),
    [
        ([(f"{NETWORK}.algo", "lokr"), (f"{NETWORK}.factor", "8")], "adapter.method", "lokr"),
        ([(f"{NETWORK}.algo", "lokr"), (f"{NETWORK}.factor", "8")], "adapter.factor", 8),
        ([(f"{NETWORK}.algo", "locon"), (f"{NETWORK}.dora_wd", True)], "adapter.method", "dora"),
        ([(f"{NETWORK}.conv_dim", 8), (f"{NETWORK}.conv_alpha", 4.0)], "adapter.conv_rank", 8),
        ([(f"{NETWORK}.block_dims", [64] * 11 + [8] + [64] * 11)], "adapter.layers",
         [{"pattern": "mid", "rank": 8}]),
        ([("network_args.args.fa", True)], "adapter.method", "lora"),
        ([("network_args.args.network_train_unet_only", "true")], "text", None),
        ([("network_args.args.network_train_unet_only", "false")], "text.lora.rank", 64),
        ([("general_args.args.max_train_steps", None), ("general_args.args.max_train_epochs", 3)], "train.epochs", 3),
        ([("optimizer_args.args.lr_scheduler_type", f"{SCHEDULERS}.CosineAnnealingWarmRestarts.CosineAnnealingWarm"
           "Restarts"), ("optimizer_args.args.lr_scheduler_num_cycles", 3)], "schedule.cycles", 3),
        ([("optimizer_args.args.lr_scheduler_type", f"{SCHEDULERS}.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts"),
          ("optimizer_args.args.lr_scheduler", "rex_annealing_warm_restarts_(RAWR)")], "schedule.name", "rex"),
        ([("train_mode.train_mode", "textual_inversion"), ("textual_inversion_args.args.token_string", "sks"),
          ("textual_inversion_args.args.init_word", "dog")], "text.embeddings.token", "sks"),
    ],
)  # fmt: skip
def test_each_choice_of_the_gui(changes: list[tuple[str, object]], path: str, value: object, tmp_path: Path) -> None:
    found = imported(tmp_path, *changes)
    at: object = found.config
    for name in path.split("."):
        at = at.get(name) if isinstance(at, dict) else None
    assert at == value and not found.problems


def test_what_the_result_lacks_of_the_gui_s_own_is_said(tmp_path: Path) -> None:
    rex = f"{SCHEDULERS}.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts"
    found = imported(
        tmp_path,
        ("network_args.args.fa", True),
        ("optimizer_args.args.lr_scheduler_type", rex),
        ("optimizer_args.args.lr_scheduler_num_cycles", 2),
        ("optimizer_args.args.lr_scheduler_args", {"gamma": 0.9, "min_lr": 1e-6, "d": 0.8, "other": 1}),
    )
    left = {line.key: line.why for line in found.lines if line.became == "left out" and not line.same}
    assert left["fa"].startswith("LoRA-FA") and left["lr_scheduler_num_cycles"] == "REX falls once here"
    assert left["lr_scheduler_args.min_lr"] == "the learning rate falls to 0 here"
    assert [line.key for line in found.lists()["unknown"]] == ["lr_scheduler_args.other"]
    assert {"lr_scheduler_args.gamma", "lr_scheduler_args.d"} <= left.keys()


@pytest.mark.parametrize(
    ("changes", "key", "head"),
    [
        ([("train_mode.other", 1)], "train_mode.other", "unknown"),
        ([("bucket_args.other.deep", 1)], "bucket_args.other.deep", "unknown"),
        ([("version", 3)], "version", "unknown"),
        ([(f"{NETWORK}.conv_dim", "")], "network_args.conv_dim", "off"),
        ([(f"{NETWORK}.algo", "lokr")], "train_mode", "taken"),
        ([("network_args.args.network_module", "networks.lora")], "train_mode", "taken"),
        ([("train_mode.train_mode", "textual_inversion"), ("textual_inversion_args.args.token_string", "sks"),
          ("textual_inversion_args.args.init_word", "dog")], "train_mode", "taken"),
        ([("optimizer_args.args.lr_warmup_steps", 9)], "lr_warmup_steps", "not needed"),
        ([("optimizer_args.args.lr_scheduler_type", "x.Other")], "lr_scheduler_type", "left out"),
        ([("optimizer_args.args.lr_scheduler_type", f"{SCHEDULERS}.CosineAnnealingWarmRestarts")], "lr_scheduler",
         "not needed"),
        ([("optimizer_args.args.lr_scheduler_type", f"{SCHEDULERS}.CosineAnnealingWarmRestarts")],
         "lr_scheduler_type", "taken"),
        ([("optimizer_args.args.lr_scheduler_args", {"gamma": 1})], "lr_scheduler_args.gamma", "left out"),
        ([("general_args.args.dataset_config", "x.toml")], "dataset_config", "not needed"),
        ([], "resolution", "taken"),
    ],
)  # fmt: skip
def test_each_key_of_a_preset_stands_in_one_list(
    changes: list[tuple[str, object]], key: str, head: str, tmp_path: Path
) -> None:
    lists = imported(tmp_path, *changes).lists()
    assert [each for each, lines in lists.items() if key in {line.key for line in lines}] == [head]


def test_data_sets_of_the_preset_are_not_needed_beside_a_file_of_them(tmp_path: Path) -> None:
    data = peer_configs.write(tmp_path, data___json={"datasets": [{"subsets": [{"image_dir": "others"}]}]})
    found = import_file(peer_configs.write(tmp_path, preset___toml=as_toml(PRESET)), data)
    assert found.config["data"]["path"] == "others"
    assert {line.key for line in found.lists()["not needed"]} >= {
        "subsets[0].image_dir", "subsets[1].is_reg", "resolution", "enable_bucket",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("flux_args.args.ae", "ae.sft")], r"flux_args ae \(Flux\) is not supported"),
        ([("anima_args.args.qwen3", "x")], r"anima_args qwen3 \(Anima\) is not supported"),
        ([(f"{NETWORK}.unit", 4)], "network_module networks.dylora is not supported"),
        ([(f"{NETWORK}.algo", "ia3")], "algo=ia3"),
        ([("train_mode.train_mode", "wurst")], "train_mode wurst is not supported"),
        ([("train_mode.train_mode", "textual_inversion")], "token_string names no token"),
        ([("train_mode.train_mode", "textual_inversion"), ("textual_inversion_args.args.token_string", "sks")],
         "init_word names no words that sks starts from"),
        ([("network_args.args.network_train_text_encoder_only", True)], "the text encoders alone"),
    ],
)  # fmt: skip
def test_what_is_not_trained_is_refused_by_name(
    changes: list[tuple[str, object]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        imported(tmp_path, *changes)


def test_no_damaged_preset_ends_in_a_traceback(tmp_path: Path) -> None:
    draw = random.Random(3)
    values: list[object] = [{"a": {"b": [1]}}, [], [1, "x"], -1, 1e300, "nan", "x" * 300, False, 2**62, "a=b"]
    paths = ["subsets", "train_mode", "general_args", "optimizer_args.args", f"{NETWORK}.block_dims", NETWORK,
             "general_args.dataset_args", "saving_args.args.easy_name", "optimizer_args.args.lr_scheduler_type",
             "optimizer_args.args.warmup_ratio", "train_mode.train_mode", "optimizer_args.args.optimizer_args",
             "optimizer_args.args.lr_scheduler_args", "optimizer_args.args.lr_scheduler_num_cycles"]  # fmt: skip
    for path in paths:
        for value in values:
            with suppress(UserError):
                imported(tmp_path, (path, value))
    text = as_toml(PRESET)
    for _ in range(150):
        damaged = list(text)
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.choice((0, 1, 30))] = draw.choice('[]{}=".,#\n 1é')
        (tmp_path / "preset.toml").write_text("".join(damaged), encoding="utf-8")
        with suppress(UserError):
            import_file(tmp_path / "preset.toml")
