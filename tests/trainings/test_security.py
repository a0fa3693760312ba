"""Nothing is executed, nothing leads out of a folder, no token gets anywhere; runs of one name exclude each other."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletune.config.load import validate
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.autoencoder import STABLE_DIFFUSION, load_autoencoder
from simpletune.models.shared.parts import Part
from simpletune.models.text.clip import load_text_model
from simpletune.system.locks import exclusive
from simpletune.system.model_folder import weight_files
from simpletune.system.options import ConfigError, UserError
from simpletune.system.redact import redact
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simpletune"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("np", "load"), ("numpy", "load")}
SAFE_YAML = {"scan", "safe_load", "SafeLoader", "AliasToken", "YAMLError", "AliasEvent", "Event", "Node", "ScalarNode",
             "constructor"}  # fmt: skip
ALLOWED = {
    ("adapters/methods/hypernetwork_files.py", "torch.save"),  # export --format a1111 writes one, and nothing reads it
    ("apps/web/scans.py", "pickle"),  # of what a process that the page has started tells it through a pipe, no file
}


def forbidden(tree: ast.AST) -> list[str]:
    """What a module does that could run what a file holds."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            found.append("from yaml")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
            found += [f"yaml.{node.attr}"] if node.attr not in SAFE_YAML else []
        elif isinstance(node, ast.Call):
            call = node.func
            if isinstance(call, ast.Name) and call.id in BUILTINS:
                found.append(call.id)
            if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
                if (call.value.id, call.attr) in METHODS:
                    found.append(f"{call.value.id}.{call.attr}")
            for keyword in node.keywords:
                refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and not refused:
                    found.append(keyword.arg)
    return found


def loads_all(node: ast.AST) -> bool:
    """Whether it calls ``torch.load`` for more than tensors."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and not any(k.arg == "weights_only" and ast.literal_eval(k.value) is True for k in node.keywords)
    )


def test_nothing_is_unpickled_or_executed() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name, text = str(file.relative_to(PACKAGE)), file.read_text()
        tree = ast.parse(text)
        found += [(name, word) for word in forbidden(tree) if (name, word) not in ALLOWED]
        if "torch.load" in text:  # what the maker of the tiny SD3 reads back is its own, and tensors only
            found += [(name, "torch.load") for node in ast.walk(tree) if loads_all(node)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from yaml import load",
        "yaml.load(f)",
        "eval(x)",
        "torch.load(f)",
        "f(trust_remote_code=True)",
        "os.system(x)",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert forbidden(ast.parse(code))


def test_code_in_a_model_folder_is_not_executed(tiny_config: dict, tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipeline, folder)
    alarm = tmp_path / "alarm"
    parts = [file.parent for file in folder.glob("*/*config.json")]
    assert {"transformer", "vae", "text_encoder", "tokenizer"} <= {part.name for part in parts}
    for part in parts:
        for name in ("modeling_evil", "tokenization_evil", "setup", "__init__", "conftest"):
            (part / f"{name}.py").write_text(f"open({str(alarm)!r}, 'w')\nclass Evil: pass\n")
        for file in part.glob("*config.json"):
            value = json.loads(file.read_text())
            value["auto_map"] = {"AutoModel": "modeling_evil.Evil", "AutoTokenizer": ["tokenization_evil.Evil", None]}
            file.write_text(json.dumps(value))
    output = {**tiny_config["output"], "cache": str(tmp_path / "cache")}
    train(validate({**tiny_config, "model": {"pretrained": str(folder), "t5_length": 8}, "output": output}, "test"))
    assert not alarm.exists()


@pytest.mark.parametrize("name", ["os.system", "evil.Evil", None, ["AutoencoderKL"]])
def test_a_foreign_class_is_refused(tiny_pipeline: Path, tmp_path: Path, name: object) -> None:
    import torch

    shutil.copytree(tiny_pipeline / "vae", tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**config, "_class_name": name}))
    with pytest.raises(UserError, match="needs an AutoencoderKL"):
        load_autoencoder(Part("vae", tmp_path / "vae"), torch.float32, STABLE_DIFFUSION)


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "a/../../b.safetensors", "sub/model.safetensors", "..", "", 7]
)
def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="outside its folder|is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}', "\0" * 9])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        weight_files(tmp_path)


TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("about", f"mine: {TOKEN}"),
        ("model.pretrained", "https://me:topsecret@example.org/model"),
        ("data.path", "s3://user:pa55word@bucket/pictures"),
        ("tracking.wandb_project", "hf_" + "a" * 30),
    ],
)
def test_a_token_in_a_configuration_is_refused_and_not_repeated(tiny_config: dict, path: str, value: str) -> None:
    data = {**tiny_config}
    section, _, leaf = path.rpartition(".")
    (data.setdefault(section, {}) if section else data)[leaf] = value
    if section:
        data[section] = {**data[section], leaf: value}
    with pytest.raises(ConfigError, match=f"{path}: contains a token or a password") as caught:
        validate(data, "test")
    for secret in (TOKEN, "topsecret", "pa55word", "hf_" + "a" * 30):
        assert secret not in redact(str(caught.value))


def test_what_is_concealed_and_what_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame-open")
    monkeypatch.setenv("SHORT_TOKEN", "cat")
    monkeypatch.setenv("OTHER_CREDENTIALS", str(tmp_path))
    assert redact(f"x sesame-open y cat {tmp_path}") == f"x *** y cat {tmp_path}"
    assert redact("https://me:pw@h/p http://h:80/a@b") == "https://***@h/p http://h:80/a@b"
    assert redact("a picture of hf_ and 12:30@noon") == "a picture of hf_ and 12:30@noon"


HOLD = """
import sys, time
from pathlib import Path
from simpletune.system.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_of_one_name_exclude_each_other_until_the_first_is_dead(tiny_config: dict) -> None:
    folder = Path(tiny_config["output"]["runs"]) / "tiny"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"tiny is in use by another run \(process {holder.pid}\).*another name"):
            train(validate(tiny_config, "test"))
        assert not folder.exists()
        with exclusive(folder.with_name("other")):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert train(validate({**tiny_config, "train": {"steps": 1}}, "test")) == folder


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with exclusive(tmp_path / "run"):
            pass
    assert capsys.readouterr().out.count("without locks") == 1


SIZES = [  # a part's configuration, what is changed, what is said
    ("transformer/config.json", {"num_layers": 10**9}, "num_layers 1000000000"),
    ("transformer/config.json", {"patch_size": 0}, "patch_size 0"),
    ("transformer/config.json", {"pos_embed_max_size": 10**5}, "pos_embed_max_size 100000"),
    ("transformer/config.json", {"pos_embed_max_size": 1024, "num_attention_heads": 128}, "position table"),
    ("transformer/config.json", "[" * 5000, "nested too deeply"),
    ("transformer/config.json", "[]", "not a JSON object"),
    ("transformer/config.json", " " * 2**21, "2,097,152 bytes"),
    ("vae/config.json", {"block_out_channels": [10**6]}, "block_out_channels"),
    ("vae/config.json", {"layers_per_block": 10**8}, "layers_per_block 100000000"),
    ("text_encoder/config.json", {"hidden_size": 10**10}, "hidden_size 10000000000"),
    ("text_encoder_2/config.json", {"max_position_embeddings": 10**10}, "max_position_embeddings"),
    ("text_encoder_3/config.json", {"num_layers": 10**9}, "num_layers 1000000000"),
    ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**12}, "num_train_timesteps 1000000000000"),
]


@pytest.mark.parametrize("name, change, said", SIZES, ids=[said for _, _, said in SIZES])
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(
    name: str, change: dict | str, said: str, tiny_config: dict, tiny_pipeline: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipeline, folder)
    kept = json.loads((folder / name).read_text())
    (folder / name).write_text(change if isinstance(change, str) else json.dumps(kept | change))
    tiny_config["model"]["pretrained"] = str(folder)
    clock = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        validate(tiny_config, "test")
    assert said in str(caught.value) and name.partition("/")[0] in str(caught.value)
    assert time.perf_counter() - clock < 60  # seconds


@pytest.mark.parametrize(
    "part, change",
    [
        ("vae", {"norm_num_groups": 7}),
        ("vae", {"block_out_channels": [16, 16]}),
        ("text_encoder", {"hidden_size": 8192}),
        ("text_encoder", {"num_attention_heads": 7}),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused_in_words(
    part: str, change: dict, tiny_pipeline: Path, tmp_path: Path
) -> None:
    folder = tmp_path / part
    shutil.copytree(tiny_pipeline / part, folder)
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(kept | change))
    load: Any = partial(load_autoencoder, latents=STABLE_DIFFUSION) if part == "vae" else load_text_model
    with pytest.raises(UserError, match=part):
        load(Part(part, folder), torch.float32)


@pytest.mark.parametrize(
    "part, file, text, said",
    [
        ("tokenizer", "tokenizer_config.json", "[" * 5000, "no readable tokenizer"),
        ("tokenizer", "vocab.json", '{"a":', "no readable tokenizer"),
        ("tokenizer", "tokenizer_config.json", '{"model_max_length": 1000000000}', "model_max_length is 1000000000"),
        ("tokenizer_3", "tokenizer.json", '{"version": "1.0", "model": {}}', "no readable tokenizer"),
        ("tokenizer_3", "tokenizer.json", None, "the limit .* 67,108,864"),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_words(
    part: str, file: str, text: str | None, said: str, tiny_pipeline: Path, tmp_path: Path
) -> None:
    folder = tmp_path / part
    shutil.copytree(tiny_pipeline / part, folder)
    if text is None:
        os.truncate(folder / file, 2**40)
    else:
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=said):
        next(each for each in SD3().text.encoders if each.tokenizer == part).read_tokenizer(folder)
