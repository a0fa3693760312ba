"""The graphics card of this machine, the prediction of a configuration on it, and access to its model."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from simpletune.commands.doctor.hub_checks import access, login
from simpletune.commands.doctor.machine import OK, Finding, Machine
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.commands.init.choices import PROFILES, Reason, Suggestion
from simpletune.config.load import validate
from simpletune.system.console import say, silence
from simpletune.system.gpus import Card, card_named_by_driver
from simpletune.system.hub import is_hub_name
from simpletune.system.options import Json, UserError

AS_ABOVE = "as above"
SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # signs of a driver; the last one in WSL


def card_here() -> tuple[Card | None, str]:
    """Return the first graphics card that torch can use, or None and the reason. Asks torch in a child process.

    Without a sign of a driver, does not ask, because importing torch takes seconds.
    """
    if shutil.which("nvidia-smi") is None and not any(Path(sign).exists() for sign in SIGNS):
        return None, "no NVIDIA driver was found"
    with closing(ProbeProcess()) as probe:
        facts = probe.ask("torch")
    for device in facts.get("devices") or []:
        return card_named_by_driver(device["name"], device["total"], tuple(device["capability"])), ""
    return None, str(facts.get("refused") or facts.get("error") or "torch finds no card")


def fit_to_card(suggestion: Suggestion, card: Card) -> Suggestion:
    """Return the suggestion with the largest profile, or settings of a shipped configuration, whose predicted peak fits
    the card, and that prediction as a reason."""
    config, memory = suggestion.config, dict(suggestion.config.get("memory", {}))
    if (profile := memory.get("profile")) is not None:
        path = "memory.profile"
        sizes = PROFILES[: PROFILES.index(profile) + 1]
        choices = [(name, {"memory": memory | {"profile": name}}) for name in reversed(sizes)]
    else:
        path, choices = "precision, memory", [(AS_ABOVE, {}), *suggestion.smaller]
    for name, sections in choices:
        tried: Json = {key: value for key, value in (config | sections).items() if value}
        try:
            words, fits, speed = _predict(tried, card)
        except UserError as error:
            note = f"not predicted ({error}). simpletune estimate does it later"
            return replace(suggestion, notes=(*suggestion.notes, note))
        if fits:
            reason = Reason(path, name, f"predicted: {words}")
            earlier = [each for each in suggestion.reasons if each.path != path or name == AS_ABOVE]
            notes = (*suggestion.notes, *speed)
            return replace(suggestion, config=tried, reasons=(*earlier, reason), notes=notes)
    note = f"predicted not to fit even with the levers of {choices[-1][0]}: {words}. Use a smaller "
    note += "data.resolution" if "concept" not in config else "side in concept.resolutions"
    return replace(suggestion, notes=(*suggestion.notes, note))


def _predict(data: Json, card: Card) -> tuple[str, bool, list[str]]:
    """Describe the predicted peak on a card, return whether it fits, and describe the time."""
    from simpletune.config.compute import settle_compute
    from simpletune.config.modulation import settle_modulation
    from simpletune.config.resolve import require_model_rules, resolve_model_folder
    from simpletune.estimate.job_estimate import MIB, estimate
    from simpletune.estimate.job_time import job_time
    from simpletune.estimate.terminal import LIMIT_ADVICE, format_duration

    say(f"{'predict':<10} {data.get('memory', {}).get('profile') or 'memory'} on {card.name}")
    with silence():
        config = resolve_model_folder(validate(data, data["name"]))
        require_model_rules(config)
        config = settle_compute(settle_modulation(config, on_host=False), card.capability)
    found = estimate(config, card.capability)
    words = f"{found.needed_bytes() / MIB:,.0f} MiB of the card's {card.bytes / MIB:,.0f} with allowances"
    time = job_time(config, found.job, card, found.counts)
    limit, larger = time.step.limit, time.larger
    speed = [f"predicted {format_duration(time.step.seconds)} a step, limited by the {limit}"]
    speed += [LIMIT_ADVICE[limit]] if limit in LIMIT_ADVICE else []
    speed += [] if larger is None else [larger.words]
    return f"{words}, most in the stage {found.peak_stage}", found.fits(card), speed


def model_findings(model: str) -> list[Finding]:
    """Report what prevents downloading a model from the hub: no login, no licence. Downloads nothing."""
    if not is_hub_name(model):
        return []
    with closing(ProbeProcess()) as probe:
        found = [*login(Machine(probe)), *access(model)]
    if found[-1].level == OK:  # a model that anyone may download needs no login
        return []
    return [each for each in found if each.level != OK]
