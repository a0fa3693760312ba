"""Measure one row of ``host`` on a simulated card in this process: its overrides as JSON, a line of JSON out."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import memory
from benchmarks.diffusers_training import TARGETS
from benchmarks.host import REPLAYED, STEPPED, STEPS, Row, overrides_of
from simpletune.adapters.methods.lora import Lora
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import replace_attribute
from simpletune.engine.quant import int8_products
from simpletune.estimate.timing.host_probes import core_seconds
from simpletune.system.devices import prepare_environment
from simpletune.system.environment import LIBRARIES
from simpletune.system.options import Json

Step = Callable[[], object]
CUDA = torch.device("cuda")
WARM = 4
SHARED: dict[tuple[object, ...], tuple[int, ...]] = {}
"""Shapes of convolutions' outputs, so that the stand-in for cuDNN costs the host no more than an operator of torch."""


class Ours:
    """Simpletune's step."""

    def __init__(self, row: Row, contender: str):
        from simpletune.stages.load import empty_base
        from simpletune.stages.step.replay import graphs_of
        from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
        from simpletune.stages.step.train_step import assemble

        config = memory.config_of(overrides_of(row, contender))
        side = config.resolution
        model = empty_base(config.model, config.memory, config.precision, CUDA, [(side, side)])
        self.core = assemble(config, model, SingleProcess(CUDA))
        self.core.graphs = graphs_of(self.core)
        self._batches = SyntheticBatches(config, self.core, device=CUDA)
        model.train()

    def __call__(self) -> None:
        self.core.step(self._batches.step(0))


def theirs(config: TrainConfig, wide: bool) -> Step:
    """A plain step with diffusers' model and PEFT's LoRA, whose factors are in fp32 if ``wide``.

    Args:
        config: gives model, resolution, batch, rank and named targets, and whether blocks are checkpointed.
        wide: factors and their optimizer states in fp32.
    """
    from diffusers import SD3Transformer2DModel, UNet2DConditionModel
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    family, side, batch = config.model, config.resolution, int(config.train.batch_size)
    is_unet = family.family == "sd15"
    with CUDA:
        kind: Any = UNet2DConditionModel if is_unet else SD3Transformer2DModel
        model = kind.from_config(dict(family.files.known_config()))
    model.requires_grad_(False).to(torch.bfloat16)
    if config.memory.checkpointing != "none":
        model.enable_gradient_checkpointing()
    assert isinstance(config.adapter, Lora)
    named, rank = config.adapter.targets, config.adapter.rank
    targets = named if isinstance(named, list) else ["to_q", "to_k", "to_v", "to_out.0"] if is_unet else TARGETS
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets))
    if wide:
        cast_training_params(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    model.train()
    shape = batch, *family.autoencoder.shape(side, side)
    z, t = torch.zeros(shape, dtype=torch.bfloat16, device=CUDA), torch.zeros(batch, device=CUDA)
    text = torch.zeros(batch, family.text.tokens, family.text.width, dtype=torch.bfloat16, device=CUDA)
    more = {} if is_unet else {"pooled_projections": text.new_zeros(batch, family.text.pooled_width)}

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            found = model(z, timestep=t, encoder_hidden_states=text, return_dict=False, **more)[0]
        loss = F.mse_loss(found.float(), z.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def seconds_of(step: Step) -> float:
    """Processor seconds of one step, of all threads."""
    started = time.process_time()
    step()
    torch.cuda.synchronize()
    return time.process_time() - started


class Causes:
    """Seconds of each cause, without those of the causes within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[float] = []  # of each running cause, the seconds of those within it

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - started
                self.seconds[cause] = self.seconds.get(cause, 0.0) + spent - self._open.pop()
                if self._open:
                    self._open[-1] += spent

        return run

    @contextmanager
    def watching(self, core: Any) -> Iterator[None]:
        """Time causes within this context. ``core``: the step, whose clipping and update are timed."""
        from triton.runtime.jit import JITFunction

        from simpletune.adapters.methods import lora_layers
        from simpletune.engine.kernels import adaln, rms_norm, rotary, swiglu
        from simpletune.engine.memory import recompute

        places: list[tuple[str, Any, str]] = [
            ("lora", lora_layers._OneUpdate, "forward"), ("products", torch.nn.Linear, "forward"),
            ("recompute", recompute._Pass, "save"), ("recompute", recompute._Pass, "load"),
            ("launch", JITFunction, "run"),
            *(("optimizer", core.variant, name) for name in ("norms", "clip", "update", "constrain")),
        ]  # fmt: skip
        with ExitStack() as stack:
            for cause, owner, name in places:
                stack.enter_context(replace_attribute(owner, name, self.timed(cause, getattr(owner, name))))
            for function in (lora_layers._Added, lora_layers._Updated, lora_layers._Cast):
                for name in ("forward", "backward"):
                    own = staticmethod(self.timed("lora", getattr(function, name)))
                    stack.enter_context(replace_attribute(function, name, own))
            for calls in (adaln.CALLS, rms_norm.CALLS, rotary.CALLS, swiglu.CALLS):
                before = dict(calls)
                calls.update({name: self.timed("operators", call) for name, call in calls.items()})
                stack.callback(calls.update, before)
            yield


def causes_of(core: Any, step: Step) -> Json:
    """Seconds of a step by cause, from the step that took the least of several."""
    best: Json = {}
    for _ in range(STEPS):
        causes = Causes()
        with causes.watching(core):
            spent = seconds_of(step)
        if not best or spent < best["all"]:
            best = causes.seconds | {"all": spent}
    known = {name: round(best.get(name, 0.0), 4) for name in ("lora", "recompute", "operators", "launch", "optimizer")}
    return known | {"rest": round(best["all"] - sum(known.values()), 4)}


def launches_of(step: Step) -> int:
    """How many kernels a step launches, without cuBLAS's."""
    count = ctypes.CDLL(None).dry_count
    count.restype = ctypes.c_longlong
    names = (b"cudaLaunchKernel", b"cudaLaunchKernelExC", b"cuLaunchKernel", b"cuLaunchKernelEx")
    before = sum(map(count, names))
    step()
    return int(sum(map(count, names)) - before)


def stand_in(library: torch.library.Library) -> None:
    """Replace convolutions, which cuDNN cannot run here, by their outputs' memory."""

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        key = (x.shape, weight.shape, *map(str, rest))
        if key not in SHARED:
            SHARED[key] = torch.ops.aten.convolution.default(x.to("meta"), weight.to("meta"), None, *rest).shape
        return torch.empty(SHARED[key], dtype=x.dtype, device=x.device)

    def backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        wanted = rest[-1]
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None

    library.impl("convolution", convolution, "CUDA")
    library.impl("convolution_backward", backward, "CUDA")


def measure(row: Row) -> Json:
    """Take the contenders' steps in turn."""
    plain = memory.config_of(overrides_of(row, "bf16"))
    steps: dict[str, Step] = {
        name: Ours(row, name) if name in STEPPED else theirs(plain, wide=name == "diffusers_fp32")
        for name in row.contenders
    }
    for step in steps.values():
        for _ in range(WARM):
            step()
    gc.collect()
    gc.freeze()  # the collector would visit every module of four models in each step
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name in REPLAYED.keys() & steps.keys():
        graphs = steps[name].core.graphs  # type: ignore[attr-defined]
        assert graphs is not None and graphs.off is None, f"{name}: {graphs and graphs.off}"
    core = core_seconds()
    for _ in range(STEPS):
        for name, step in steps.items():
            found[name].append(seconds_of(step))
        core = min(core, core_seconds())
    versions = {"torch": torch.__version__} | {name: version(name) for name in LIBRARIES if name != "torch"}
    return (
        {name: round(min(seconds), 4) for name, seconds in found.items()}
        | causes_of(steps["bf16"].core, steps["bf16"])  # type: ignore[attr-defined]
        | {"core": core, "launches": launches_of(steps["bf16"]), "versions": versions}
    )


if __name__ == "__main__":
    prepare_environment()
    torch.backends.cudnn.enabled = False
    operators = torch.library.Library("aten", "IMPL")
    stand_in(operators)
    # Its trial compares values, which this card does not compute.
    int8_products.find_failure = lambda *_: None  # type: ignore[assignment]
    print(json.dumps(measure(Row(*map(tuple, json.loads(sys.argv[1]))))), flush=True)
