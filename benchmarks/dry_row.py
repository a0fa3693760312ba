"""Measure rows of ``dry`` on a simulated card in this process: JSON lists of rows in, a line of JSON for each row out.

The process ends after a row that leaves memory allocated, so every row starts clean; the caller starts it again.
"""

from __future__ import annotations

import gc
import json
import sys
from importlib.metadata import version
from typing import Any

from benchmarks import memory
from benchmarks.dry_rows import Row
from simpletune.config.schema import TrainConfig
from simpletune.system.devices import prepare_environment
from simpletune.system.environment import LIBRARIES
from simpletune.system.options import Json

STEPS = 3  # the optimizer's state exists after the first


def config_of(row: Row) -> TrainConfig:
    """Return a row's configuration."""
    return memory.config_of(row.overrides)


def predict(row: Row, capability: tuple[int, int]) -> Json:
    """Predict a row on fake tensors."""
    from simpletune.estimate.simulate.simulate import simulate
    from simpletune.estimate.simulate.simulate_stages import simulate_stage

    config = config_of(row)
    if row.stage == "train":
        peak = simulate(config, capability=capability).peak
    else:
        peak = simulate_stage(config, row.stage, capability)
    return {
        "predicted_mib": round(peak.bytes / 2**20, 1),
        "by_kind_mib": {kind: round(size / 2**20, 1) for kind, size in peak.by_kind.items()},
        "at": f"{peak.phase} {peak.module}".strip(),
    }


def measure(row: Row) -> Json:
    """Run a row's stage on CUDA.

    Returns:
        Peaks of torch's allocator in MiB, and the attention kernel that torch chooses for training.
    """
    import torch

    config = config_of(row)
    attention = chosen_attention(config, row.stage)
    torch.cuda.reset_peak_memory_stats()
    left = {"text": text, "latents": latents, "train": train, "validate": validate}[row.stage](config)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    if left is not None and left[0].graphs is not None:
        outside, driver = beside_the_pool(*left)
        allocated, reserved = allocated + outside + driver, reserved + driver
    del left
    return {
        "allocated_mib": round(allocated / 2**20, 1),
        "reserved_mib": round(reserved / 2**20, 1),
        "attention": attention,
        "versions": {"torch": torch.__version__} | {name: version(name) for name in LIBRARIES if name != "torch"},
    }


def chosen_attention(config: TrainConfig, stage: str) -> str:
    """The kernel that torch chooses for a stage's type and head width, or the one that the run requests."""
    import torch

    from simpletune.stages.step.attention import AttentionCall, choose_kernel

    asked = config.speed.attention
    width = 512 if stage == "latents" else config.model.architecture.attentions(config.image_size())[0].width
    if asked != "auto" and stage == "train":
        return asked
    shape = AttentionCall(1, 2, 64, 64, width, stage == "train", stage)
    return choose_kernel("auto", shape, torch.device("cuda"), config.precision.product_dtype())


def text(config: TrainConfig) -> None:
    """Encode prompts with each encoder, as ``simulate_stages.text_snapshots`` does."""
    import torch

    from simpletune.models.text.encoder import BATCH, Tokens

    device, dtype = torch.device("cuda"), config.precision.encoder_dtype()
    for encoder in config.model.text.encoders:
        part = config.model.files.known_part(encoder.model)
        opened = encoder.open_empty(part, dtype, device)
        ids = torch.zeros((2 * BATCH, encoder.longest(part.config())), dtype=torch.int64)
        for _ in opened.encode(Tokens(ids), BATCH):
            pass
        del opened


def empty_vae(config: TrainConfig) -> Any:  # a diffusers autoencoder
    """The run's autoencoder on the card."""
    from simpletune.stages.load import empty_autoencoder

    return empty_autoencoder(config).to("cuda")


def latents(config: TrainConfig) -> None:
    """Encode two pictures, because the first one's attention allocates cuBLAS's workspace."""
    import torch

    side, vae = config.resolution, empty_vae(config)
    with torch.no_grad():
        for _ in range(2):
            config.model.autoencoder.encode(vae, torch.zeros(1, 3, side, side, device="cuda"))


def train(config: TrainConfig) -> tuple[Any, Any]:  # the core and its batches
    """Take a few training steps."""
    import torch

    from simpletune.stages.load import empty_base
    from simpletune.stages.step.replay import graphs_of
    from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
    from simpletune.stages.step.train_step import assemble

    device, side = torch.device("cuda"), config.resolution
    transformer = empty_base(config.model, config.memory, config.precision, device, [(side, side)])
    core = assemble(config, transformer, SingleProcess(device))
    batches = SyntheticBatches(config, core, device=device)
    transformer.train()
    torch.cuda.reset_peak_memory_stats()
    core.graphs = graphs_of(core)
    for step in range(STEPS - 1):
        core.step(batches.step(step))
    if core.graphs is not None:
        torch.cuda.reset_peak_memory_stats()
    core.step(batches.step(STEPS - 1))
    return core, batches


def beside_the_pool(core: Any, batches: Any) -> tuple[int, int]:
    """Return bytes that a run with graphs takes beyond torch's peak, which is that of the capture: what the rest of a
    step takes beside the graphs' pool, and the driver's."""
    import torch

    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    core.step(batches.step(STEPS))
    free, total = torch.cuda.mem_get_info()
    outside = torch.cuda.max_memory_allocated() - held
    driver = total - free - torch.cuda.memory_reserved()
    core.graphs.drop()
    free, total = torch.cuda.mem_get_info()
    return outside, driver - (total - free - torch.cuda.memory_reserved())


def validate(config: TrainConfig) -> None:
    """Draw a validation picture with the training state still allocated."""
    import torch

    from simpletune.estimate.simulate.simulate_stages import ShapesOnlyModel
    from simpletune.stages.latent_cache import free_memory
    from simpletune.stages.sample import ImageRequest, Sampler

    core, batches = train(config)
    option, batch = config.validation, batches.batch(1)
    prompt = config.model.text.blank(batch.conditioning.embeds.dtype)
    core.model.eval()
    free_memory(torch.device("cuda"))  # as a run does
    vae = empty_vae(config)
    torch.cuda.reset_peak_memory_stats()
    request = ImageRequest("", 0, "", *config.image_size(), option.steps, option.guidance)
    model = ShapesOnlyModel(config.model)
    sampler = Sampler(core.model, model, config.precision, core.modulation, objective=config.objective)
    with torch.no_grad():
        z = sampler.denoise([request], [prompt], [prompt])
        config.model.autoencoder.decode(vae, z)


def main(rows: list[Row]) -> None:
    """Measure rows and print their figures, until one leaves memory behind."""
    import torch

    from benchmarks.dry_operations import replace_cudnn

    library = replace_cudnn()
    for row in rows:
        try:
            found = measure(row)
        except torch.OutOfMemoryError as error:
            found = {"failed": str(error).split(".")[0]}
        print(json.dumps(found), flush=True)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if torch.cuda.memory_allocated() or "failed" in found:
            break
    del library


if __name__ == "__main__":
    prepare_environment()
    main([Row(**fields) for fields in json.loads(sys.argv[1])])
