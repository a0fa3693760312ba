"""Fill in the defaults that depend on the model's family, in a configuration as JSON."""

from __future__ import annotations

from simpletune.adapters.methods import Adapter
from simpletune.models.families import FAMILIES, family_suggested
from simpletune.models.objectives.flow import Flow
from simpletune.models.shared.family import Family
from simpletune.system.options import Json, option_classes

TARGETED = tuple(
    option.model_fields["method"].default for option in option_classes(Adapter) if "targets" in option.model_fields
)
"""The methods that have ``targets``; the first is the default one."""
FLOW: str = Flow.model_fields["name"].default


def family_defaults(family: Family) -> dict[str, dict[str, object]]:
    """Return the defaults that depend on the family, and on whether its base draws in few steps, by section and
    field."""
    words = family.words
    steps, guidance = words.steps, words.guidance
    concept: dict[str, object] = {"resolutions": [words.resolution]}
    if (few := family.few_steps) is not None:
        steps, guidance = few.steps, few.guidance
        if not family.assistants:  # under one it draws as a model of many steps
            concept |= {"drawing_steps": max(2, steps), "drawing_guidance": guidance}
    return {
        "adapter": {"targets": family.lora[0].names.usual_targets},
        "objective": {"name": family.objectives[0]},
        "data": {"resolution": words.resolution},
        "concept": concept,
        "validation": {"guidance": guidance, "negative_prompt": words.negative_prompt, "steps": steps},
    }


def forgotten_family(data: Json) -> Family | None:
    """Return the family, other than the default one, that the base's name alone suggests, if a configuration, as JSON,
    states none."""
    model = data.get("model")
    base = model.get("pretrained") if isinstance(model, dict) and "family" not in model else None
    suggested = family_suggested(base) if isinstance(base, str) else None
    return None if suggested is FAMILIES[0] else suggested


def with_objective(data: Json) -> Json:
    """Fill in the family's objective in a configuration, as JSON, that names no objective."""
    family = _family_in(data)
    return data if family is None else _fill(data, {"objective": family_defaults(family)["objective"]})


def with_family(data: Json) -> Json:
    """Fill in the family's defaults where a configuration, as JSON, sets none; validation reports what is wrong."""
    family = _family_in(data)
    if family is None:
        return data
    defaults = family_defaults(family)
    objective = data.get("objective")
    if isinstance(objective, dict) and objective.get("name") == FLOW and family.flow.shift is not None:
        uniform = {} if {"logit_mean", "logit_std"} & objective.keys() else {"sigma": "uniform"}  # as NoobAI-RF
        defaults["objective"] |= {**uniform, "shift": family.flow.shift}
    if family.architecture.modulation is None:  # a memory.profile may plan modulations
        defaults["memory"] = {"modulation": "auto"}
    adapter = data.get("adapter", {})
    if isinstance(adapter, dict) and adapter.get("method", TARGETED[0]) not in TARGETED:
        del defaults["adapter"]
    if data.get("concept") is None:
        del defaults["concept"]
    else:
        defaults["validation"]["loss_samples"] = 0
    if data.get("data") is None and data.get("concept") is not None:
        del defaults["data"]
    return _fill(data, defaults)


def _family_in(data: Json) -> Family | None:
    model = data.get("model", {})
    if not isinstance(model, dict):
        return None
    wanted = model.get("family", FAMILIES[0].family)
    family = next((family for family in FAMILIES if family.family == wanted), None)
    if family is None:
        return None
    named: Json = {name: value for name in ("pretrained", family.denoiser) if isinstance(value := model.get(name), str)}
    loras = model.get("loras")
    if isinstance(loras, list) and all(isinstance(name, str) for name in loras):
        named["loras"] = loras
    said = {"turbo": model["turbo"]} if isinstance(model.get("turbo"), bool) and hasattr(family, "turbo") else {}
    return family.model_copy(update=named | said)  # as far as its defaults depend on it


def _fill(data: Json, defaults: dict[str, dict[str, object]]) -> Json:
    """Fill in what the sections leave unset."""
    known = {name: data.get(name, {}) for name in defaults}
    filled = {name: {**defaults[name], **own} for name, own in known.items() if isinstance(own, dict)}
    if "sources" in filled.get("data", {}) or filled.get("data", {}).get("source") == "several":
        data_section = filled["data"] = known["data"]  # each source has the fields that a single one has here
        if isinstance(sources := data_section.get("sources"), list):
            each = [{**defaults["data"], **own} if isinstance(own, dict) else own for own in sources]
            filled["data"] = {**data_section, "sources": each}
    return {**data, **filled}
