"""Draw docs/images/stage_peaks.svg (``make pictures``): what a card must have in each stage of a run, by family and
method, from the predictions that ship (``make predictions``).

    python -m benchmarks.stage_peaks
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from benchmarks.stored_predictions import settled
from simpletune.estimate import stored
from simpletune.estimate.job_estimate import attention_of, needed_bytes, with_workspaces
from simpletune.estimate.simulate.reports import L4, JobReport
from simpletune.runs.report.charts import image
from simpletune.system.gpus import GIB, find_card
from simpletune.system.options import Json

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "stage_peaks.svg"
SHOWN = {  # the leanest and the fastest configuration of a family and method, where several ship
    "SD 1.5 LoRA": "sd15_lora",
    "SD 1.5 full": "sd15_dreambooth_full",
    "SD 2.1 LoRA": "sd21_lora",
    "SDXL LoRA, 6 GB": "sdxl_lora_6gb",
    "SDXL LoRA, 24 GB": "sdxl_lora_24gb",
    "SDXL full, 8 GB": "sdxl_full_8gb",
    "SDXL full, 24 GB": "sdxl_full_24gb",
    "SD3 LoRA, 4 GB": "sd3_medium_lora_4gb",
    "SD3 LoRA, 24 GB": "sd3_medium_lora_24gb",
    "SD3 LoKr": "sd3_medium_lokr",
    "SD3 DoRA": "sd3_medium_dora",
    "SD3 partial": "sd3_medium_partial",
    "SD3 full, 4 GB": "sd3_medium_full_4gb",
    "SD3 full, 24 GB": "sd3_medium_full_24gb",
    "SD3.5 M LoRA, 6 GB": "sd35_medium_lora_6gb",
    "SD3.5 M LoRA, 12 GB": "sd35_medium_lora_12gb",
    "SD3.5 M full, 8 GB": "sd35_medium_full_8gb",
    "SD3.5 M full, 24 GB": "sd35_medium_full_24gb",
    "SD3.5 L LoRA, 6 GB": "sd35_large_lora_6gb",
    "SD3.5 L LoRA, 24 GB": "sd35_large_lora_24gb",
    "SD3.5 L full, 8 GB": "sd35_large_full_8gb",
    "SD3.5 L full, 24 GB": "sd35_large_full_24gb",
}
STAGES = {"text": "encode text", "latents": "encode pictures", "train": "train", "validate": "validate"}
CARDS = {6: "RTX2060", 8: "RTX4060", 12: "RTX3060-12GB", 24: "RTX4090"}  # memory in GB, as cards are sold, and a card
WIDTH, STEP = 228, 38  # pixels of the bars, and of a configuration's height: a phone shows the figure at its full size


def needs() -> list[Json]:
    """List what a card must have in each stage of each configuration, in GiB, allowances included."""
    found: list[Json] = []
    with zipfile.ZipFile(stored.FILE) as rows:
        for title, name in SHOWN.items():
            config = settled(name, ())
            text = rows.read(f"{stored.prediction_key(config, attention_of(config, L4))}.json")
            job = with_workspaces(JobReport.from_json(json.loads(text)), L4, config.speed.deterministic)
            for stage, words in STAGES.items():
                size = round(needed_bytes(job.stages[stage].bytes) / GIB, 2)
                found.append({"configuration": title, "stage": words, "GiB": size})
    return found


def chart(values: list[Json]) -> Json:
    """Describe the figure in Vega-Lite."""
    order = list(STAGES.values())
    lines = [{"GB": str(size), "GiB": round(find_card(name).bytes / GIB, 2)} for size, name in CARDS.items()]
    title = ["GiB that the card must have", f"(dashed lines are cards of {', '.join(map(str, CARDS))} GB)"]
    x = {"field": "GiB", "type": "quantitative", "title": title, "scale": {"domain": [0, 24]}}
    colours = {"domain": order, "range": ["@part3", "@part2", "@part0", "@part1"]}
    bars: Json = {
        "data": {"values": values},
        "mark": {"type": "bar", "height": {"band": 1}},
        "encoding": {
            "x": x | {"axis": {"values": [0, 4, 8, 12, 16, 20, 24], "grid": False}},
            "y": {"field": "configuration", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 200},
                  "scale": {"paddingInner": 0.25}},
            "yOffset": {"field": "stage", "type": "nominal", "sort": order},
            "color": {"field": "stage", "type": "nominal", "scale": colours,
                      "legend": {"orient": "top", "title": None, "columns": 2, "labelFontSize": 12}},
        },
    }  # fmt: skip
    rule: Json = {"data": {"values": lines}, "mark": {"type": "rule", "strokeDash": [4, 3], "color": "@ink"},
                  "encoding": {"x": x}}  # fmt: skip
    text: Json = {
        "data": {"values": lines},
        "mark": {"type": "text", "y": -6, "fontSize": 11, "color": "@ink"},
        "encoding": {"x": x, "text": {"field": "GB"}},
    }
    axis = {"labelFontSize": 12, "titleFontSize": 12}
    return {"width": WIDTH, "height": {"step": STEP, "for": "position"}, "layer": [bars, rule, text],
            "config": {"axis": axis, "font": "sans-serif"}}  # fmt: skip


if __name__ == "__main__":
    IMAGE.write_bytes(image(chart(needs()), ".svg"))
    print(IMAGE)
