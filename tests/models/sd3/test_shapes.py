"""Parameter shapes from a config alone, against diffusers and against SD3 Medium's own list of names."""

from __future__ import annotations

import pytest
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from slow_cases import slow_but

from simpletune.adapters.methods.lora import Lora
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes

SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": list(range(13)), "pos_embed_max_size": 384}
TINY = {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128, "joint_attention_dim": 96}


@pytest.mark.parametrize("changes", slow_but([TINY], [{}, SD35, TINY]), ids=["sd3", "sd3.5", "tiny"])
def test_equals_diffusers(changes: dict) -> None:
    config = SD3().files.known_config() | changes
    with init_empty_weights():
        model = SD3Transformer2DModel.from_config(config)
    assert parameter_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("targets", "rank", "trained", "modules"),
    [("attention", 16, 9_388_032, 191), ("attention", 64, 37_552_128, 191), ("attention_image", 1, 294_912, 96)],
)
def test_lora_sizes_of_sd3_medium(targets: str, rank: int, trained: int, modules: int) -> None:
    adapter, shapes = Lora(targets=targets, rank=rank), parameter_shapes(SD3().files.known_config())
    assert (adapter.trainable(shapes), len(adapter.modules(shapes))) == (trained, modules)


def test_a_target_that_matches_nothing_is_named() -> None:
    problems = list(Lora(targets=["attn.to_q", "attn.to_z"]).problems(parameter_shapes(SD3().files.known_config())))
    assert [str(problem) for problem in problems] == [
        "adapter.targets: 'attn.to_z' matches no linear layer or convolution. Use endings such as attn.to_q, "
        "attn.to_k, attn.to_v"
    ]
