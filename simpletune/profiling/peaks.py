"""What cards can do at the most: dense bf16 products with fp32 sums, in TFLOP/s, from NVIDIA's data sheets.

Data sheets give the figure with sparsity, twice this, or both. GeForce: appendix A of the architecture's white paper.
"""

from __future__ import annotations

import re

# The first pattern that is found in the device's name counts.
PEAKS = {
    r"\bL4\b": 121.0,
    r"\bL40S\b": 362.0,
    r"\bA10\b": 125.0,
    r"\bA100\b": 312.0,
    r"\bH100 PCIe\b": 756.0,
    r"\bH100(?! NVL)\b": 989.0,
    r"\bH200(?! NVL)\b": 989.0,
    r"\bRTX A6000\b": 155.0,
    r"\bRTX 3090\b(?! Ti)": 71.0,
    r"\bRTX 4090\b(?! Laptop| D)": 165.0,
    r"\bRTX 5090\b(?! Laptop| D)": 209.0,
}


def peak_tflops(device: str) -> float | None:
    """The peak of a device by its name; None: not known."""
    return next((peak for pattern, peak in PEAKS.items() if re.search(pattern, device)), None)
