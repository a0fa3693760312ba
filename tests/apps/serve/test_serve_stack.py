"""``simpletune serve`` of a run on top of other LoRAs."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image
from serving import PROMPT, generate, pixels, running
from tiny_runs import TrainOnce, run_with

from simpletune.apps.cli.main import parse
from simpletune.apps.serve import server


def test_base_and_result_have_the_loras_under_them(tiny_config: dict, copy_run: TrainOnce, tmp_path: Path) -> None:
    style = copy_run(tiny_config)
    run = run_with(tiny_config, name="child", model={"loras": [f"{style}:0.8"]}, train={"steps": 1})
    with running(server.build(parse(["serve", "--run", str(run), "--max-side", "64", "--port", "0"]))) as it:
        it.wait_ready()
        answer = it.predict(
            *({"prompt": PROMPT, "lora": name} for name in ("base", "child")), seed=3, num_inference_steps=2
        )
        assert answer.status_code == 200, answer.text
    drawn = answer.json()["predictions"]
    for text, words in zip(drawn, (["--base"], []), strict=True):
        assert pixels(text) == generate(tmp_path / "drawn.png", run, "--steps", "2", *words)
        chunk = Image.open(io.BytesIO(base64.b64decode(text))).text["simpletune"]  # type: ignore[attr-defined]
        assert json.loads(chunk)["base_loras"] == [["tiny", 0.8]]
    assert len(set(drawn)) == 2
