"""The discrete diffusion objective in float64, from the papers (part of the independent reference).

A timestep is an angle phi with cos(phi)^2 = abar: z_t = cos(phi) z_0 + sin(phi) noise, and its derivative by phi is
v = cos(phi) noise - sin(phi) z_0 (arXiv:2202.00512, appendix D). A squared error of the noise or of v is one of z_0
times a factor, and min-SNR weights the error of z_0 by min(SNR, gamma) (arXiv:2303.09556).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def angles(config: Mapping[str, Any], zero_snr: bool = False) -> Array:
    """phi of every timestep from the betas; zero_snr rescales them (arXiv:2305.08891, algorithm 1)."""
    count = config["num_train_timesteps"]
    if config["beta_schedule"] == "linear":
        betas = np.linspace(config["beta_start"], config["beta_end"], count)
    else:
        betas = np.square(np.linspace(np.sqrt(config["beta_start"]), np.sqrt(config["beta_end"]), count))
    if zero_snr:
        betas = rescaled(betas)
    log_abar = np.cumsum(np.log1p(-betas, where=betas < 1, out=np.full(count, -np.inf)))
    return np.arccos(np.exp(log_abar / 2))


def rescaled(betas: Array) -> Array:
    """The paper's algorithm: from betas over the cumulative product's root back to betas."""
    root = np.sqrt(np.cumprod(1 - betas))
    root = (root - root[-1]) / (root[0] - root[-1]) * root[0]
    abar = root**2
    return 1 - np.append(abar[0], abar[1:] / abar[:-1])


@dataclass(frozen=True)
class Ddpm:
    """The objective at the angles [b] of a batch; arrays are [b, c, h, w]."""

    phi: Array
    v: bool
    gamma: float | None = None

    @property
    def _cos(self) -> Array:
        return np.cos(self.phi)[:, None, None, None]

    @property
    def _sin(self) -> Array:
        return np.sin(self.phi)[:, None, None, None]

    def noised(self, z_0: Array, noise: Array) -> Array:
        return self._cos * z_0 + self._sin * noise

    def target(self, z_0: Array, noise: Array) -> Array:
        return self._cos * noise - self._sin * z_0 if self.v else noise

    def weights(self) -> Array:  # [b]
        """min(SNR, gamma) times the squared derivative of z_0 by the prediction: sin for v, tan for the noise."""
        if self.gamma is None:
            return np.ones_like(self.phi)
        by_prediction = np.sin(self.phi) if self.v else np.tan(self.phi)
        return np.minimum(np.tan(self.phi) ** -2.0, self.gamma) * by_prediction**2

    def loss(self, prediction: Array, target: Array) -> float:
        rows = np.square(prediction - target).mean(axis=(1, 2, 3))
        return float(np.mean(self.weights() * rows))
