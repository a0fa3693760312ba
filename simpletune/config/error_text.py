"""Turn Pydantic's validation errors into messages: path without union tags, value, rule, remedy."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from simpletune.system import strict_json
from simpletune.system.options import (
    Json,
    Option,
    Problem,
    documented_fields,
    item_of,
    member_for,
    option_classes,
    tag_values,
    union_of,
)
from simpletune.system.strict_json import JsonError

Complaint = Mapping[str, Any]
"""One of Pydantic's ``ErrorDetails``."""
SHOWN = 60  # characters of a value
# Names that other trainers use for our options.
ELSEWHERE = {
    "learning_rate": "optimizer.lr", "optimizer_type": "optimizer.name", "use_8bit_adam": "optimizer.name",
    "lora_rank": "adapter.rank", "network_dim": "adapter.rank", "lora_alpha": "adapter.alpha",
    "conv_dim": "adapter.conv_rank", "network_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "use_dora": "adapter.method",
    "use_rslora": "adapter.rank_stabilized", "loraplus_lr_ratio": "adapter.b_lr_ratio",
    "block_dims": "adapter.layers", "block_alphas": "adapter.layers", "rank_pattern": "adapter.layers",
    "scale_weight_norms": "adapter.max_norm", "lr_scheduler": "schedule.name",
    "lr_warmup_steps": "schedule.warmup_steps", "max_train_steps": "train.steps", "num_train_epochs": "train.epochs",
    "max_train_epochs": "train.epochs", "train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation", "max_grad_norm": "train.clip",
    "mixed_precision": "precision.compute", "base_model_precision": "precision.weights",
    "gradient_checkpointing": "memory.checkpointing", "instance_prompt": "data.prompt",
    "instance_data_dir": "data.path", "train_data_dir": "data.path",
    "pretrained_model_name_or_path": "model.pretrained", "output_dir": "output.runs",
    "checkpointing_steps": "checkpoint.every", "checkpoints_total_limit": "checkpoint.keep_last",
    "validation_prompt": "validation.prompts", "guidance_scale": "validation.guidance", "use_ema": "ema",
    "num_repeats": "data.repeats", "is_reg": "data.regularization", "prior_loss_weight": "data.weight",
    "loss_weight": "data.weight", "caption_strategy": "data.captions", "class_tokens": "data.prompt",
    "shuffle_caption": "data.shuffle_tags", "keep_tokens": "data.keep_tags",
    "caption_tag_dropout_rate": "data.tag_dropout", "caption_dropout_rate": "data.caption_dropout",
    "masked_loss": "data.mask", "masked_training": "data.mask", "conditioning_data_dir": "data.mask_path",
    "concepts": "data.sources", "subsets": "data.sources",
}  # fmt: skip
SUGGESTED = 100  # problems of one validation that get our own message
RENAMED = {  # options renamed before the first release, and other names of families
    "boundaries": "offload_checkpoint_inputs", "sd1": "sd15", "sd14": "sd15", "sd2": "sd15", "sd20": "sd15",
    "sd21": "sd15", "sd35": "sd3", "xl": "sdxl", "sdxl10": "sdxl", "pony": "sdxl", "illustrious": "sdxl",
    "noobai": "sdxl", "sharding": "fsdp", "eval_samples": "loss_samples",
}  # fmt: skip
NEEDS = {
    "bool_type": "true or false, without quotes",
    "int_type": "a whole number, without quotes",
    "int_from_float": "a whole number",
    "float_type": "a number, without quotes",
    "string_type": "text in quotes",
    "list_type": "a list [...]",
    "tuple_type": "a list [...]",
    "dict_type": "an object {{...}}",
    "model_type": "an object {{...}}",
    "model_attributes_type": "an object {{...}}",
    "none_required": "null",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_unicode": "text without a lone surrogate, which is not a character",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def problems_of(error: ValidationError, data: Json, root: type[Option], most: int = SUGGESTED) -> list[Problem]:
    """List the problems of validating ``data`` as a ``root``; several errors about one value become one problem.

    Only the first ``most`` get our own message, because suggestions are slow.
    """
    by_path: dict[str, list[Complaint]] = defaultdict(list)
    fields: dict[str, tuple[type[Option], FieldInfo | None]] = {}
    for item in error.errors(include_url=False):
        path, owner, field = find_field(item["loc"], data, root)
        if item["type"] == "union_tag_invalid":
            tag = item["ctx"]["discriminator"].strip("'")
            path = f"{path}.{tag}"
        by_path[path].append(item)
        fields[path] = (owner, field)
    worded = set(islice(by_path, most))
    return [
        Problem(path, _message(path, items, *fields[path], root) if path in worded else items[0]["msg"])
        for path, items in by_path.items()
    ]


def find_field(
    loc: tuple[int | str, ...], data: object, root: type[Option]
) -> tuple[str, type[Option], FieldInfo | None]:
    """Convert Pydantic's location to a dotted path of JSON keys, and find the option that owns the last key.

    Below a value that is no option, a string is a key if the JSON has it there, else the tag of a union's member.
    """
    owner: type[Option] = root
    option: type[Option] | None = root
    path: list[str] = []
    field: FieldInfo | None = None
    rest = list(loc)
    while rest:
        key = rest.pop(0)
        if option is not None:
            names = {f.alias or n: n for n, f in option.model_fields.items()}
            owner, field = option, documented_fields(option).get(names.get(str(key), str(key)))
            path.append(str(key))
            data = data.get(key) if isinstance(data, Mapping) else None
            if field is None:
                break
            inner: FieldInfo | None = field
        elif isinstance(key, int):
            path.append(str(key))
            data = data[key] if isinstance(data, list) and key < len(data) else None
            inner = item_of(field)
        elif isinstance(data, Mapping) and key in data:
            path.append(key)
            data, inner = data[key], None
        else:
            continue
        union, option = (None, None) if inner is None else (union_of(inner), member_for(inner, data))
        if union is not None and rest and rest[0] in union.members:
            option = union.members[str(rest.pop(0))]
    return ".".join(path), owner, field


def _message(
    path: str, items: list[Complaint], owner: type[Option], field: FieldInfo | None, root: type[Option]
) -> str:
    """State value, rule and remedy for one path."""
    kinds = {item["type"] for item in items}
    item = items[0]
    if "extra_forbidden" in kinds:
        return f"unknown field.{other_field(path, owner, root)}"
    if "missing" in kinds:
        if field is None:
            return "is required. Add it"
        sentence = " ".join((field.description or "").split()).split(". ")[0].rstrip(".")
        return f"is required: {sentence[:1].lower()}{sentence[1:]}. Add it"
    if "union_tag_invalid" in kinds:
        tags = [tag.strip(" '") for tag in item["ctx"]["expected_tags"].split(",")]
        return f"unknown value {show(item['ctx']['tag'])}.{did_you_mean(str(item['ctx']['tag']), tags)}"
    if "string_pattern_mismatch" in kinds:
        rule = "Use at most 100 letters, digits, '.', '_' and '-', and start with a letter or digit"
        return f"{show(item['input'])} does not fit. {rule}"
    if kinds == {"value_error"}:
        return str(item["ctx"]["error"])
    needs = list(dict.fromkeys(_need(each) for each in items))
    value = item["input"]
    if item["type"] in ("string_too_long", "too_long"):
        remedy = f" It has {len(value)}"
    elif item["type"] == "multiple_of" and isinstance(value, int):
        multiple = item["ctx"]["multiple_of"]
        below = value - value % multiple
        remedy = f" Use {below} or {below + multiple}"
    else:
        remedy = _remedy(value, kinds, needs)
    return f"{show(value)} does not fit. It must be {' or '.join(needs)}.{remedy}"


def _need(item: Complaint) -> str:
    """Describe the value that one error asks for."""
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"].replace(" or ", ", ")  # words in single quotes
        if "," not in expected:
            return str(expected.replace("'", '"'))
        return "one of " + expected.replace("'", "")
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] in NEEDS:
        return NEEDS[item["type"]].format(**item.get("ctx", {}))
    return item["msg"][0].lower() + item["msg"][1:]


def _remedy(value: object, kinds: set[str], needs: list[str]) -> str:
    """Suggest how to write the value, if that can be inferred."""
    if not isinstance(value, str):
        return ""
    if "literal_error" in kinds:
        options = [word.strip() for need in needs if need.startswith("one of ") for word in need[7:].split(",")]
        near = difflib.get_close_matches(value, options, n=1)
        if near:
            return f" Did you mean {near[0]}?"
    try:
        meant = strict_json.parse(value)
    except JsonError as error:
        return "" if error.line else f" {show(value)}: {error}"
    numeric = kinds & {"int_type", "float_type"} and isinstance(meant, int | float) and not isinstance(meant, bool)
    if numeric or ("bool_type" in kinds and isinstance(meant, bool)):
        return f" Write {value} instead of {show(value)}"
    return ""


def did_you_mean(word: str, known: list[str]) -> str:
    """Suggest the nearest known word, or list all of them."""
    if RENAMED.get(word) in known:
        return f" Did you mean {RENAMED[word]}?"
    near = difflib.get_close_matches(word[:SHOWN], known, n=1)
    return f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}"


def other_field(path: str, owner: type[Option], root: type[Option]) -> str:
    """Suggest a field for an unknown one: of its ``owner``, by another trainer's name, or of another section of the
    ``root``."""
    word = path.rpartition(".")[2]
    paths: dict[str, list[str]] = defaultdict(list)
    members: dict[str, list[str]] = defaultdict(list)
    for section, field in root.model_fields.items():
        union = union_of(field)
        for option in option_classes(field.annotation):
            for name, inner in option.model_fields.items():
                paths[name] += {f"{section}.{inner.alias or name}": 0}.keys() - paths[name]
                if union is not None:
                    members[f"{section}.{name}"].append(f"{section}.{union.tag} {tag_values(option, union.tag)[0]}")
    near = did_you_mean(word, [field.alias or name for name, field in owner.model_fields.items()])
    if path not in members:
        if "Did you mean" in near:
            return near
        if word in ELSEWHERE:
            return f" Did you mean {ELSEWHERE[word]}?"
    else:  # a like name of this member means something else, as min_sigma does for min_snr_gamma
        return f" Only {' and '.join(members[path])} {'has' if len(members[path]) == 1 else 'have'} it"
    found = difflib.get_close_matches(word[:SHOWN], paths, n=1, cutoff=0.8)
    return f" Did you mean {' or '.join(paths[found[0]][:3])}?" if found else near


def show(value: object) -> str:
    """Format a JSON value as in the file, shortened; a lone surrogate becomes its escape."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece
        if len(text) > SHOWN:
            text = f"{text[: SHOWN - 3]}..."
            break
    return text.encode(errors="backslashreplace").decode()
