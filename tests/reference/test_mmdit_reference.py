"""The hand-written MMDiT against diffusers' own, over small configurations of every shape SD3 comes in."""

import mmdit
import pytest
import tiny_pipeline
import torch

SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}
CASES = {
    "sd3": {},
    "one layer": {"num_layers": 1},
    "four layers, wider": {"num_layers": 4, "num_attention_heads": 3, "caption_projection_dim": 24},
    "full table of positions": {"pos_embed_max_size": 6},
    "sd3.5 qk-norm only": {"qk_norm": "rms_norm"},
    "dual attention only": {"dual_attention_layers": (0,)},
    "sd3.5 medium": SD35 | {"num_layers": 3},
    "sd3.5, the last block dual too": SD35,
}


@pytest.mark.parametrize("latent_size", [(8, 8), (12, 6), (4, 10)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_velocity_equals_diffusers(case: str, latent_size: tuple[int, int], tmp_path) -> None:
    torch.set_num_threads(1)
    theirs = tiny_pipeline.transformer(seed=len(case), **CASES[case])
    theirs.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(latent_size[0])
    z_t = torch.randn(2, 16, *latent_size, generator=generator)
    timestep = 1000 * torch.rand(2, generator=generator)
    prompt_embeds = torch.randn(2, 7, 24, generator=generator)
    pooled = torch.randn(2, 14, generator=generator)
    with torch.no_grad():
        expected = theirs(z_t, prompt_embeds, pooled, timestep, return_dict=False)[0]
        actual = mmdit.predict(mmdit.load(tmp_path), z_t, timestep, prompt_embeds, pooled)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6 * expected.abs().max().item())
