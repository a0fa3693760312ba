"""What several trainers share of adapters: a LoRA's alpha, and LyCORIS's arguments."""

from __future__ import annotations

from simpletune.commands.importers.translation import Translation, boolean, number, whole_number
from simpletune.system.options import Json


def take_alpha(found: Translation, key: str, alpha: float | None, rank: int | None) -> None:
    """Translate a LoRA's alpha, if it is known."""
    if alpha is None:
        return
    why = ""
    if rank and alpha != rank:
        why = f"a scale of {alpha / rank:g}: with alpha = rank, the same updates need a lower learning rate"
    found.take(key, "adapter.alpha", alpha, why)


def take_lycoris(found: Translation, key: str, own: Json) -> None:
    """Translate LyCORIS's arguments: algo, linear_dim or dim, linear_alpha or alpha, factor, and others."""
    algo = str(own.get("algo", "lora")).lower()
    methods = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "full": "full", "diag-oft": "oft"}
    method = methods.get(algo)
    if method is None:
        return found.leave(key, f"algo={algo}: simpletune has {', '.join(methods)}")
    if method == "lora" and boolean(own.get("dora_wd", False)):
        method = "dora"
    found.take(key, "adapter.method", method)
    rank = own.get("linear_dim", own.get("dim"))
    if rank is not None and method in ("lora", "dora", "loha"):
        found.take(key, "adapter.rank", whole_number(rank))
    if method == "lokr":
        whole = rank is not None and (whole_number(rank) > 1024 or boolean(own.get("full_matrix", False)))
        if whole:
            found.take(key, "adapter.rank", None, "a rank above the matrix's dimensions trains it whole")
        elif rank is not None:
            found.take(key, "adapter.rank", whole_number(rank))
        if own.get("factor") is not None:
            found.take(key, "adapter.factor", whole_number(own["factor"]))
        if boolean(own.get("decompose_both", False)):
            found.take(key, "adapter.decompose_both", True)
    alpha = own.get("linear_alpha", own.get("alpha"))
    if alpha is not None and method in ("lora", "dora"):
        found.take(key, "adapter.alpha", number(alpha))
    elif alpha is not None and method in ("lokr", "loha") and alpha != rank:
        found.leave(key, f"alpha {alpha}: it equals the rank here; scale optimizer.lr instead")
    known = {"algo", "linear_dim", "dim", "linear_alpha", "alpha", "factor", "decompose_both", "dora_wd", "full_matrix"}
    for name in own:
        if name not in known and own[name] not in (False, None, "False", 1, 1.0):
            found.leave(key, f"{name}={own[name]}: no such option here, or adapter.targets")
