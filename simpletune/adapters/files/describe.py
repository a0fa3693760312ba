"""Describe a file as data and as text, for ``simpletune lora inspect``, without torch.

Reads only the header of models; of LoRA and embeddings also the values, for NaN, zeros and norms.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.files.compatibility import embedding_verdicts, verdicts
from simpletune.adapters.files.detect_model import models_of_text_width, some_unet
from simpletune.adapters.files.header import (
    LISTED,
    LoraHeader,
    TensorEntry,
    natural_sort_key,
    not_read,
    open_lora,
    require_tensors,
    tensor_bytes,
)
from simpletune.adapters.files.keys import DORA, LORA, OFT, is_whole
from simpletune.adapters.files.keys import TITLES as LAYOUT_TITLES
from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.adapters.methods.hypernetwork_structure import is_hypernetwork, structure_of, widths_of
from simpletune.adapters.text.embedding_files import FAMILY, WORDS, is_embedding, keys_of, read_cosines
from simpletune.models.families import denoiser_in
from simpletune.models.shared.lora_layout import OFT_BLOCKS
from simpletune.models.shared.recognise import kind_of, parts_in
from simpletune.models.text_layers import layers_by_title, style_of
from simpletune.system.model_folder import weight_files
from simpletune.system.options import Json, UserError, join_names, plural
from simpletune.system.safetensors_file import TYPES, content_hash, fp8_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BASE_KEYS = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture", "modelspec.title", "base_model")
LONG = 60  # characters of a metadata value
CHUNK = 2**22  # bytes
HASH, THUMBNAIL = "modelspec.hash_sha256", "modelspec.thumbnail"
PLACES = {"input": "inputs of the text encoders", "output": "outputs of the text encoders"}
SETTINGS = ("r", "lora_alpha", "alpha", "use_rslora", "use_dora")


def find_weight_file(path: Path) -> Path:
    """Find the weight file at a path: the path itself, or a run's result or a model's weights inside a folder."""
    if not path.is_dir():
        return path
    if (path / OUTPUT).is_file():
        return path / OUTPUT
    return weight_files(denoiser_in(path) or path)[0]


def describe(file: Path, values: bool = True) -> Json:
    """Describe a safetensors file as plain data for JSON; ``kind`` is ``lora``, ``embeddings``, ``hypernetwork`` or
    ``model``. ``values``: scan a LoRA's values for NaN and for zero factors. Raises UserError if the file is damaged,
    empty, or a pickle file, which is never opened."""
    header = LoraHeader(file)
    require_tensors(header)
    about = {"file": str(file), "bytes": file.stat().st_size, "tensors": len(header.names)}
    about["types"] = dict(Counter(entry["dtype"] for entry in header.entries.values()))
    embeddings = _embeddings(header, values)
    hashed: Json = {}
    if values and HASH in header.metadata and (embeddings or header.is_lora):
        hashed["hash_matches"] = header.metadata[HASH].lower() == content_hash(header.file)
    if embeddings and not header.is_lora:
        return about | {"kind": "embeddings", "embeddings": embeddings, "metadata": _short(header.metadata), **hashed}
    if is_hypernetwork(header.names):
        return about | {"kind": "hypernetwork", **_hypernetwork(header)}
    if not header.is_lora:
        return about | {"kind": "model", **_model(header)}
    found: Json = {}
    if values:
        scanned = _scan_values(header.file, header.entries)
        found["not_finite"] = {name: count for name, (count, _) in scanned.items() if count}
        zero = {name for name, (_, is_zero) in scanned.items() if is_zero}
        found["zero_updates"] = sum(not zero.isdisjoint(module.factors.values()) for module in header.all_modules)
        found |= hashed
    bundled = {"bundled": embeddings} if embeddings else {}
    lora = _lora(header, damaged=bool(found.get("not_finite")))
    if values and not lora["incomplete"] and not found["not_finite"] and lora["tools"][-1]["loads"] == "yes":
        found["oft_strengths"] = oft_strengths(header)
    return about | {"kind": "lora", **lora, **found, **bundled}


def _embeddings(header: LoraHeader, values: bool) -> list[Json]:
    """Describe the embeddings in a file, each with its vectors and the tools that read it."""
    found: list[Json] = []
    if not header.bundled and not is_embedding({**header.entries, "__metadata__": header.metadata}):
        return []
    known = read_cosines(header.metadata)
    for each in keys_of(header.file):
        vectors = {}
        for encoder, key in each.keys.items():
            *count, width = header.shapes[key]
            norms = _row_norms(header.file, header.entries[key]) if values else []
            number = count[0] if count else 1
            about = {"key": key, "vectors": number, "width": width, "norms": norms}
            vectors[encoder] = {**about, "cosines": known.get(encoder, [])[:number]}
        family = header.metadata.get(FAMILY, "")
        tools = [vars(verdict) for verdict in embedding_verdicts(each, header.file.name, family)]
        words = header.metadata.get(WORDS, "").split() if not each.bundled else []
        found.append({"token": each.token, "place": each.place, "words": words, "encoders": vectors, "tools": tools})
    return found


def _scan_values(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, tuple[int, bool]]:
    """Scan the floating-point tensors of a file: by name how many values are NaN or infinite, and whether all are zero.
    Reads 4 MiB at a time."""
    import numpy as np

    found = {}
    with open(file, "rb") as handle:
        start = 8 + int.from_bytes(handle.read(8), "little")
        for name, entry in entries.items():
            of = TYPES.get(entry["dtype"])
            if of is None or not of.exponent:
                continue
            begin, end = entry["data_offsets"]
            handle.seek(start + begin)
            not_finite, zero = 0, True
            while begin < end:
                chunk = np.frombuffer(handle.read(min(CHUNK, end - begin)), dtype=f"<u{of.bytes}")
                begin += chunk.nbytes
                # all bits of the exponent are ones, in every type except the 8-bit one without infinities
                not_finite += int(((chunk & of.exponent) == of.exponent).sum())
                zero = zero and not (chunk & of.magnitude).any()
            found[name] = (not_finite, zero)
    return found


def _numbers(file: Path, entry: TensorEntry) -> NDArray[np.float64]:
    """Read a floating-point tensor of a file."""
    import numpy as np

    data, kind = tensor_bytes(file, entry), entry["dtype"]
    if kind == "BF16":
        values = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    elif kind.startswith("F8_"):
        table = np.array([fp8_value(byte, kind) for byte in range(256)])
        values = table[np.frombuffer(data, dtype="u1")]
    else:
        values = np.frombuffer(data, dtype={"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind])
    return values.astype(np.float64).reshape(entry["shape"])


def _row_norms(file: Path, entry: TensorEntry) -> list[float]:
    """Compute the Euclidean norm of each row of a tensor; one norm for a vector."""
    import numpy as np

    rows = _numbers(file, entry).reshape(-1, entry["shape"][-1])
    return [float(norm) for norm in np.sqrt((rows * rows).sum(axis=1))]


def oft_strengths(header: LoraHeader) -> Json | None:
    """Measure OFT's rotations where ComfyUI limits them more than the trainer did: ||B - B^T||, which both limit by
    alpha, by module; None: nowhere."""
    import numpy as np

    found = {}
    for module in header.modules.values():
        limit = header.oft_limit(module)
        if module.kind != OFT or limit is None or limit == module.alpha:
            continue
        blocks = _numbers(header.file, header.entries[module.keys[OFT_BLOCKS]])
        norm = float(np.linalg.norm(blocks - blocks.transpose(0, 2, 1)))
        ours, comfy = min(norm, limit), min(norm, module.alpha or 0)
        if comfy < ours:
            found[module.name] = {"trained": ours, "ComfyUI": comfy}
    return found or None


def format_strengths(strengths: Json) -> str:
    """Format ``oft_strengths`` as a sentence."""
    trained, comfy = ([each[by] for each in strengths.values()] for by in ("trained", "ComfyUI"))
    factors = [one / other for one, other in zip(trained, comfy, strict=True)]
    return (
        f"|B - B^T| of {plural(len(strengths), 'module')} is {_range(trained)} as trained, limited to alpha x outputs "
        f"(sd-scripts, LyCORIS), and {_range(comfy)} in ComfyUI, which limits it to alpha: "
        f"{_range(factors)} times weaker"
    )


def _range(values: Sequence[float]) -> str:
    ends = f"{min(values):.3g}", f"{max(values):.3g}"
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _model(header: LoraHeader) -> Json:
    kind = kind_of(header.shapes)
    block = re.compile(r"(?:model\.diffusion_model\.)?(?:joint|transformer)_blocks\.(\d+)\.")  # not a U-Net's
    numbers = [int(found.group(1)) for name in header.names if (found := block.match(name))]
    return {
        "family": str(kind or "unknown"),
        "blocks": max(numbers) + 1 if numbers else None,
        "with": parts_in(header.shapes),
        "keys": header.names[:LISTED],
        "metadata": _short(header.metadata),
    }


def _hypernetwork(header: LoraHeader) -> Json:
    structure, widths = structure_of(header.file, header.metadata, header.shapes), widths_of(header.shapes)
    bent = structure.layer_norm and structure.activation != "linear"
    comfyui = ["wrongly, because it activates the last layer too, where a layer norm follows"] if bent else []
    exported = "after simpletune lora export --format a1111"
    known = (models_of_text_width(width) for width in widths)
    models = next((list(found.values()) for found in known if found), [])
    return {
        "family": models[0] if len(models) == 1 else some_unet(models),
        "widths": widths,
        "structure": asdict(structure),
        "parameters": sum(structure.parameters(width) for width in widths),
        "tools": [
            {"tool": "A1111", "loads": "no", "notes": [f"{exported}, from models/hypernetworks"]},
            {"tool": "ComfyUI", "loads": "no", "notes": [f"{exported}, by its node HypernetworkLoader", *comfyui]},
            {"tool": "diffusers", "loads": "no", "notes": ["has no hypernetworks"]},
            {"tool": "simpletune", "loads": "yes", "notes": ["at any strength"]},
        ],
        "metadata": _short(header.metadata),
    }


def _lora(header: LoraHeader, damaged: bool) -> Json:
    (family, shown, names), settings = header.family, header.settings or {}
    encoders = names[0].encoders if names else ()
    whole = [m for m in header.all_modules if is_whole(m.keys)]
    text = [layer for module in header.text_modules.values() for layer in module.layers]
    refusal = None
    try:
        open_lora(header.file)
    except UserError as error:
        refusal = str(error).removeprefix(f"{header.file}").lstrip(": ").removeprefix("is ")
    refusal = refusal or ("values are NaN or infinite" if damaged else None)
    block = re.compile(r"^(.*\.(attentions|resnets|downsamplers|upsamplers)\.\d+\.)?(transformer_blocks\.\d+\.)?")
    places = (block.sub("", layer) for module in header.modules.values() for layer in module.layers)
    base = {key: header.metadata[key] for key in BASE_KEYS if key in header.metadata}
    if match := re.search(r'"(?:transformer|pretrained)":"([^"]+)"', header.metadata.get("simpletune_config", "")):
        base["simpletune_config"] = match.group(1)
    layout_title = "unknown layout"
    if header.layout is not None:
        name, prefix = header.layout.name, header.layout.prefix
        layout_title = f"{LAYOUT_TITLES.get(name, name)} ({prefix}*)" if prefix else "diffusers' names without a prefix"
    elif not header.modules and header.text:
        style = style_of(header.text[0])
        layout_title = f"{LAYOUT_TITLES.get(style, style)} (text encoders)"
    return {
        "method": ", ".join(header.methods)
        or ("DoRA" if settings.get("use_dora") and header.named_kinds == [LORA] else " and ".join(header.named_kinds)),
        "layout": header.layout_name,
        "layout_title": layout_title,
        "family": family,
        "family_shown_by": shown,
        "modules": len(header.modules),
        "layers": sum(len(module.layers) for module in header.modules.values()),
        "ranks": _counted(
            str(header.rank(m) if m.kind in (LORA, DORA) else header.size(m) or "unknown") for m in whole
        ),
        "targets": dict(sorted(Counter(places).items())),
        "alpha": _alpha(header),
        "scales": _counted(f"{header.scale(module):g}" for module in whole),
        "parameters": sum(math.prod(header.shapes[key]) for m in whole for key in m.factors.values()),
        "base": base,
        "text_encoders": layers_by_title(text, encoders),
        "caution": header.caution,
        "not_read": not_read(header),
        "unmatched": header.unmatched,
        "incomplete": header.halves,
        "tools": [vars(verdict) for verdict in verdicts(header, refusal, damaged)],
        "metadata": _short(header.metadata),
    }


def _alpha(header: LoraHeader) -> Json:
    """Describe where the file specifies alpha, and its values."""
    tensors = _counted(f"{m.alpha:g}" for m in header.all_modules if m.alpha is not None)
    settings = {k: v for k, v in (header.settings or {}).items() if k in SETTINGS}
    for name in ("rank_pattern", "alpha_pattern"):
        if patterns := (header.settings or {}).get(name):
            settings[name] = plural(len(patterns), "layer")
    where = [w for w, present in (("tensors", bool(tensors)), ("header", bool(settings))) if present]
    return {"where": " and ".join(where) or "nowhere", "tensors": tensors, "header": settings}


def _counted(items: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda item: natural_sort_key(item[0])))


def _short(metadata: Mapping[str, str]) -> dict[str, str]:
    short = {k: v if len(v) <= LONG else f"{v[:LONG]}... ({len(v)} characters)" for k, v in metadata.items()}
    if metadata.get(THUMBNAIL, "").startswith("data:"):
        kind, _, data = metadata[THUMBNAIL].removeprefix("data:").partition(",")
        short[THUMBNAIL] = f"{kind.partition(';')[0]}, {3 * len(data) // 4:,} bytes"
    return dict(sorted(short.items()))


def format_description(about: Json) -> str:
    """Format a description for a terminal."""
    size = f"{plural(about['bytes'], 'byte')}, {plural(about['tensors'], 'tensor')} ({', '.join(about['types'])})"
    lines = [("file", f"{about['file']}, {size}")]
    if about["kind"] == "model":
        lines.append(("what", about["family"]))
        if about["blocks"]:
            lines.append(("blocks", str(about["blocks"])))
        if about["with"]:
            lines.append(("with", ", ".join(about["with"])))
        lines.append(("keys", ", ".join(about["keys"]) + (" ..." if about["tensors"] > LISTED else "")))
    elif about["kind"] == "embeddings":
        lines += _embedding_lines(about["embeddings"])
    elif about["kind"] == "hypernetwork":
        lines += _hypernetwork_lines(about)
    else:
        lines += _lora_lines(about)
    for number, (key, value) in enumerate(about["metadata"].items()):
        lines.append(("metadata" if number == 0 else "", f"{key}: {value}"))
    return "\n".join(f"{title:<11}{text}" for title, text in lines)


def _lora_lines(about: Json) -> Iterator[tuple[str, str]]:
    yield "what", f"{about['method']}, {about['layout_title']}, {plural(about['parameters'], 'parameter')}"
    yield "for", f"{about['family']} ({about['family_shown_by']})"
    if about["caution"]:
        yield "caution", about["caution"]
    if about["not_read"]:
        yield "names", f"read without {join_names(about['not_read'], LISTED)}"
    if about["base"]:
        yield "base", ", ".join(f"{key}: {value}" for key, value in about["base"].items())
    if about["targets"]:
        targets = ", ".join(f"{name} ({count})" for name, count in about["targets"].items())
        yield "layers", f"{about['layers']} in {about['modules']} modules: {targets}"
    yield "rank", _listed(about["ranks"], "module")
    alpha, parts = about["alpha"], []
    if alpha["tensors"]:
        parts.append(f"in tensors: {_listed(alpha['tensors'], 'module')}")
    if alpha["header"]:
        parts.append("in the header: " + ", ".join(f"{key} {value}" for key, value in alpha["header"].items()))
    yield "alpha", "; ".join(parts) or "not specified: every tool applies scale 1"
    yield "scale", _listed(about["scales"], "module")
    if about.get("oft_strengths"):
        yield "OFT", format_strengths(about["oft_strengths"])
    if "hash_matches" in about:
        yield (
            "hash",
            "matches the tensors"
            if about["hash_matches"]
            else "differs from the hash of the tensors: the file is damaged or was changed",
        )
    for verdict in about["tools"]:
        yield verdict["tool"], "; ".join([verdict["loads"], *verdict["notes"]])
    if about["text_encoders"]:
        yield "text", ", ".join(f"{plural(n, 'layer')} of {title}" for title, n in about["text_encoders"].items())
    yield from _embedding_lines(about.get("bundled", ()))
    if about["unmatched"]:
        yield "unmatched", join_names(about["unmatched"], LISTED)
    for name, count in list(about.get("not_finite", {}).items())[:LISTED]:
        yield "NaN", f"{name}: {count:,} values are NaN or infinite"
    if about.get("zero_updates"):
        yield (
            "zero",
            f"{about['zero_updates']} of {about['modules']} modules are zero: untrained, or truncated to zero",
        )


def _hypernetwork_lines(about: Json) -> Iterator[tuple[str, str]]:
    structure = about["structure"]
    multiples = ", ".join(f"{multiple:g}" for multiple in structure["layer_structure"])
    parts = [f"hypernetwork of structure {multiples}", f"activation {structure['activation']}"]
    parts += ["layer norm"] if structure["layer_norm"] else []
    parts += [f"dropout {structure['dropout']:g} in training"] if structure["dropout"] else []
    yield "what", f"{', '.join(parts)}, {plural(about['parameters'], 'parameter')}"
    yield "for", f"{about['family']} (attention inputs of width {', '.join(map(str, about['widths']))})"
    for verdict in about["tools"]:
        yield verdict["tool"], "; ".join([verdict["loads"], *verdict["notes"]])


def _embedding_lines(embeddings: Sequence[Json]) -> Iterator[tuple[str, str]]:
    """Describe each token; for each encoder, the key and the vectors."""
    for each in embeddings:
        words = f", in place of {' '.join(each['words'])!r}" if each["words"] else ""
        yield "token", f"{each['token']}{words}"
        yield "place", PLACES[each["place"]]
        for encoder, about in each["encoders"].items():
            norms = f", norms {', '.join(f'{norm:.3g}' for norm in about['norms'][:LISTED])}" if about["norms"] else ""
            far = ", ".join(f"{cosine:.3f}" for cosine in about["cosines"][:LISTED])
            cosines = f", cosine with the first value {far}" if far else ""
            yield "vectors", f"{encoder}: {about['vectors']} of {about['width']} ({about['key']}){norms}{cosines}"
        for verdict in each["tools"]:
            yield verdict["tool"], "; ".join([verdict["loads"], *verdict["notes"]])


def _listed(counts: Mapping[str, int], what: str) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return join_names([f"{value} ({plural(count, what)})" for value, count in counts.items()], LISTED)
