"""``make tiny-sdxl-flow``: train the bundled tiny Stable Diffusion XL on by rectified flow, then a LoRA on the result.

Nothing of it ships; it shows that such a base draws with the flow's solver, and that a LoRA on it trains. Finished
steps are skipped; an interrupted training resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tiny_models import make_tiny_sd3

BASE, LORA = Path("configs/more/tiny_sdxl_flow.json"), Path("configs/demo_sdxl.json")
IMAGES = 1_536


def make(runs: Path, overrides: list[str]) -> None:
    """Run every step that has not been completed yet.

    Args:
        runs: folder of the runs and of the pictures, as in the configuration.
        overrides: ``key.path=value`` overrides of both configurations, for a shorter trial.
    """
    images = runs / "tiny-sdxl-flow-pictures"
    if not images.exists():
        make_tiny_sd3.write_images(images, IMAGES, seed=7)
    base, lora = runs / "tiny-sdxl-flow", runs / "tiny-sdxl-flow-lora"
    make_tiny_sd3.train(BASE, base, [*overrides, f"data.path={images}"])
    of_flow = ["objective.name=flow", f"model.unet={base / 'unet'}", f"name={lora.name}", "device=cpu"]
    make_tiny_sd3.train(LORA, lora, [*overrides, *of_flow])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the tiny Stable Diffusion XL on by rectified flow")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for a trial")
    arguments = parser.parse_args()
    make(arguments.runs, arguments.overrides)
