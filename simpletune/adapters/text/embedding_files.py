"""Files of learned embeddings: read every layout that tools write, and write the ones that most tools read.

| keys | place | written by |
|---|---|---|
| ``clip_l``, ``clip_g``, ``t5xxl`` | input | simpletune for SD3, and without T5 for SDXL; ComfyUI's users |
| ``clip_l``, ``clip_g``, ``t5`` | input | OneTrainer, diffusers' scripts for Flux |
| one tensor, named by the token | input | simpletune for SD 1.5 and 2, diffusers |
| ``emb_params``, ``emp_params``, ``string_to_param.*`` | input | kohya, OneTrainer, A1111 |
| ``bundle_emb.NAME.`` before any of these | | OneTrainer, inside LoRA files |
| ``clip_l_out``, ``clip_g_out``, ``t5_out``, ``clip_out`` | output | simpletune, OneTrainer |

Importing this module loads no torch. Shapes: v vectors of width d for each encoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletune.models.families import FAMILIES
from simpletune.models.text_layers import BUNDLED
from simpletune.system.options import UserError, join_names
from simpletune.system.safetensors_file import read_header, require_safetensors, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

Place = Literal["input", "output"]
TOKEN, WORDS, PLACE, FAMILY = (f"simpletune_{name}" for name in ("token", "initial", "place", "family"))
COSINES = "simpletune_cosines"
"""JSON: the cosine of each vector with its value before training, by encoder."""
HASH = "modelspec.hash_sha256"
SINGLE = "clip"
"""The name of the encoder of models with only one, whose files hold a single tensor."""
INPUT_KEYS = {"clip_l": "clip_l", "clip_g": "clip_g", "t5": "t5xxl"}
KEYS: Mapping[str, tuple[str, Place]] = {
    **{key: (encoder, "input") for encoder, key in INPUT_KEYS.items()},
    "t5": ("t5", "input"),
    **{f"{encoder}_out": (encoder, "output") for encoder in (*INPUT_KEYS, SINGLE)},
    "emp_params_out": (SINGLE, "output"),
    **dict.fromkeys(("emb_params", "emp_params", "string_to_param.*", SINGLE), (SINGLE, "input")),
}
"""Encoder and place by key."""
TYPES = {"F32", "F16", "BF16"}
MOST_VECTORS = 1024
_IN_BUNDLE = re.compile(re.escape(BUNDLED) + r"(.+?)\.(string_to_param\.\*|[a-z0-9_]+)")
_DAMAGED = "Download or export it again"


@dataclass(frozen=True)
class EmbeddingFile:
    """The vectors of one token.

    Args:
        token: the token as written in prompts.
        place: ``input``: rows of the encoders' token tables; ``output``: rows of their outputs.
        vectors: [v, d] by the encoder's name (``clip_l``, ``clip_g``, ``t5``; ``clip`` for models with a single one),
            in the order of the token's positions. Encoders may differ in v.
        family: the model's family, such as ``sd3``; empty if unknown.
        words: the words that stood in the token's place before training, one for each vector; empty if unknown.
        metadata: further header strings.
    """

    token: str
    place: Place
    vectors: Mapping[str, Tensor]
    family: str = ""
    words: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """The keys, by encoder, of the tensors with one token's vectors, found from the header alone; ``bundled``: they are
    inside a LoRA file."""

    token: str
    place: Place
    keys: Mapping[str, str]
    bundled: bool = False


def is_embedding(header: Mapping[str, object]) -> bool:
    """Return whether a safetensors header belongs to an embedding file; ignores bundled embeddings."""
    names = [name for name in header if name != "__metadata__"]
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and TOKEN in metadata:
        return True
    return bool(names) and (all(name in KEYS for name in names) or _lone_key(header) is not None)


def keys_of(file: Path) -> tuple[Keys, ...]:
    """Find the embeddings in a file: one, or several bundled in a LoRA file; none for a plain LoRA. Raises UserError if
    it is a pickle or damaged, or its tensors are not embeddings."""
    require_safetensors(file)
    header = read_header(file)
    metadata: dict[str, str] = header.pop("__metadata__", None) or {}
    bundles: dict[str, dict[str, str]] = {}
    for name in header:
        if match := _IN_BUNDLE.fullmatch(name):
            bundles.setdefault(match[1], {})[match[2]] = name
    if bundles:
        return tuple(_keys(file, token, names, header, bundled=True) for token, names in bundles.items())
    if lone := _lone_key(header):
        return (_keys(file, metadata.get(TOKEN) or lone, {SINGLE: lone}, header),)
    if not any(name in KEYS for name in header):
        return ()
    if odd := [name for name in header if name not in KEYS]:
        raise UserError(f"{file} has keys of no known embedding: {join_names(odd, 5)}. {_DAMAGED}")
    return (_keys(file, metadata.get(TOKEN) or file.stem, {name: name for name in header}, header),)


def _lone_key(header: Mapping[str, object]) -> str | None:
    """Return the key of a file's only tensor if it is the token's name; None if there are others or the key has a
    meaning."""
    names = [name for name in header if name != "__metadata__"]
    if len(names) != 1 or names[0] in KEYS:
        return None
    entry = header[names[0]]
    shape = entry.get("shape", []) if isinstance(entry, dict) and entry.get("dtype") in TYPES else []
    few = len(shape) == 1 or len(shape) == 2 and shape[0] <= MOST_VECTORS
    return names[0] if few and "." not in names[0] else None


def _keys(
    file: Path, token: str, names: Mapping[str, str], header: Mapping[str, dict[str, object]], bundled: bool = False
) -> Keys:
    """Check one token's tensors, given by their short keys."""
    known = {KEYS[key]: name for key, name in names.items() if key in KEYS}
    places = {place for _, place in known}
    if len(known) < len(names):
        odd = [name for key, name in names.items() if key not in KEYS]
        raise UserError(f"{file} has keys of no known embedding: {', '.join(odd or names.values())}. {_DAMAGED}")
    if len(places) > 1:
        raise UserError(
            f"{file} holds vectors for the inputs and for the outputs of the encoders ({', '.join(names.values())}), "
            "which cannot share one place. Train one of the two"
        )
    for name in names.values():
        kind, shape = header[name]["dtype"], header[name]["shape"]
        assert isinstance(shape, list)
        if kind not in TYPES or len(shape) not in (1, 2) or 0 in shape or len(shape) == 2 and shape[0] > MOST_VECTORS:
            raise UserError(
                f"{file}: {name} is {kind} {shape}; vectors must be fp32, fp16 or bf16 in [number, width], at most "
                f"{MOST_VECTORS} of them. {_DAMAGED}"
            )
    return Keys(token, places.pop(), {encoder: name for (encoder, _), name in known.items()}, bundled)


def read_embeddings(file: Path, token: str | None = None) -> tuple[EmbeddingFile, ...]:
    """Read embeddings of any layout in fp32, one per token; from a LoRA, only the bundled ones.

    Args:
        token: the token to use in prompts; None: the file's own.

    Raises:
        UserError: as ``keys_of`` raises it; values are NaN or infinite; or ``token`` is given for several embeddings.
    """
    from safetensors import safe_open

    found = keys_of(file)
    if token is not None and len(found) > 1:
        listed = ", ".join(each.token for each in found)
        raise UserError(f"{file} holds {len(found)} embeddings ({listed}), which cannot all be {token}. Leave it out")
    read = []
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata() or {}
        for each in found:
            vectors = {}
            for encoder, key in each.keys.items():
                tensor = handle.get_tensor(key).float()
                if not tensor.isfinite().all():
                    raise UserError(f"{file}: {key} contains NaN or infinite values. Use an earlier checkpoint")
                vectors[encoder] = tensor if tensor.ndim == 2 else tensor[None]
            own = {} if each.bundled else metadata
            words = tuple(own.get(WORDS, "").split())
            family = own.get(FAMILY, "")
            read.append(EmbeddingFile(token or each.token, each.place, vectors, family, words, own))
    return tuple(read)


def write_embeddings(file: Path, embedding: EmbeddingFile) -> Path:
    """Write one token's vectors in fp32, atomically, with a header that says how tools use them. Raises UserError if
    there are no vectors, or values are NaN or infinite."""
    tensors: dict[str, Tensor] = {}
    for encoder, vectors in embedding.vectors.items():
        key = f"{encoder}_out"
        if embedding.place == "input":
            key = embedding.token if encoder == SINGLE else INPUT_KEYS[encoder]
        tensors[key] = vectors.detach().to("cpu").float().contiguous()
        if not tensors[key].isfinite().all():
            raise UserError(f"{file}: the vectors of {encoder} are NaN or infinite. Use an earlier checkpoint")
    if not tensors:
        raise UserError(f"{file}: there are no vectors to write")
    use = how_to_use(file.name, embedding.token, embedding.place, embedding.family)
    own = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        TOKEN: embedding.token,
        WORDS: " ".join(embedding.words),
        PLACE: embedding.place,
        FAMILY: embedding.family,
        "modelspec.title": file.stem,
        "modelspec.trigger_phrase": embedding.token,
        "modelspec.usage_hint": " ".join(use),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in embedding.metadata.items() if name != HASH}
    return write_safetensors(tensors, file, {**own, **kept}, HASH)


def embeddings_in(folder: Path) -> list[Path]:
    """Find a run's own embedding files in its folder or a checkpoint's, by their headers."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(UserError):  # a damaged file is reported where it is used
            if TOKEN in (read_header(file).get("__metadata__") or {}):
                found.append(file)
    return found


def read_cosines(metadata: Mapping[str, str]) -> dict[str, list[float]]:
    """Read from a header how far vectors have moved, by encoder; empty if damaged, as it is only informative."""
    try:
        found = json.loads(metadata.get(COSINES, "{}"))
        return {str(name): [float(each) for each in cosines] for name, cosines in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def how_to_use(name: str, token: str, place: str, family: str) -> Iterator[str]:
    """Yield sentences on how tools use an embedding file of this name for a model of a family, such as ``sd3``."""
    model = next((each for each in FAMILIES if each.family == family), None)
    encoders = () if model is None else model.text.encoders
    stem = name.removesuffix(".safetensors")
    yield f"simpletune: write {token} into the prompt, with --embedding {name}."
    if place == "output":
        yield "These are outputs of the text encoders, which no other tool reads."
        return
    yield f"ComfyUI: copy the file to models/embeddings and write embedding:{stem} into the prompt."
    if model is None or not model.words.pipeline.reads_embeddings:
        title = "this model" if model is None else model.lora[0].names.title
        yield f"diffusers: its pipeline of {title} loads no embeddings."
        return
    yield f"A1111 and Forge: copy it to embeddings and write {stem} into the prompt."
    if len(encoders) == 1:
        yield f'diffusers: pipeline.load_textual_inversion("{name}"), and write {token} into the prompt.'
    for encoder in encoders if len(encoders) > 1 else ():
        parts = f"text_encoder=pipeline.{encoder.model}, tokenizer=pipeline.{encoder.tokenizer}"
        tensor = f'safetensors.torch.load_file("{name}")["{encoder.name}"]'
        yield f'diffusers, for {encoder.title}: pipeline.load_textual_inversion({tensor}, "{token}", {parts}).'
