# %% [markdown]
# # The monitor in a foreign module
#
# The monitor needs nothing of our models, our data or our training: it is a callback for any LightningModule with a Gaussian
# posterior. Here is one for images of handwritten digits, as somebody else might have written it; two additions tell the
# monitor what it has to know. It ends in two runs beside each other, of which one loses its latent, and in what the monitor
# read of both.
#
# The digits are 1,797 images of 8 by 8 pixels that come with scikit-learn (Alpaydin and Kaynak 1998; UCI, CC BY 4.0). Both runs
# together take about a minute.

# %%
from pathlib import Path
from typing import Any

import lightning
import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

from seqvae import PosteriorMetricsMonitor
from seqvae.monitors import StepOutputs

# %% [markdown]
# ## A module of somebody else

# %%


class DigitVAE(lightning.LightningModule):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        (x,) = batch
        mean, log_sigma = self.encoder(x).chunk(2, dim=1)
        q = Normal(mean, log_sigma.exp())
        kl = kl_divergence(q, Normal(0.0, 1.0)).sum(dim=1)
        return {"loss": (self.distortion(x, q.rsample()) + self.beta * kl).mean(), "q": q}

    def distortion(self, x: Tensor, z: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


# %% [markdown]
# ## What the monitor has to know
#
# A function picks the posterior out of what `training_step` returns. A method `nll_given_z` gives the negative log-likelihood
# of each image for any latent: by it the monitor sees whether the decoder uses what the latent holds.

# %%


def read_outputs(module: DigitVAE, outputs: dict[str, Any], batch: list[Tensor]) -> StepOutputs:
    q = outputs["q"]
    return StepOutputs(posterior_mean=q.loc, posterior_logvar=2 * q.scale.log(), kl_weight=module.beta)


class WatchedVAE(DigitVAE):
    def nll_given_z(self, batch: list[Tensor], z: Tensor) -> Tensor:
        return self.distortion(batch[0], z)


# %% [markdown]
# ## Two runs, one of which is ill
#
# The second counts the KL 64 times. That is what happens where the likelihood is a mean over 64 pixels by mistake, and the KL a
# sum.

# %%
digits = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16)
modules, verdicts, readings = {}, {}, {}
for beta in (1, 64):
    torch.manual_seed(0)
    folder = Path("runs") / f"digits_beta_{beta}"
    monitor = PosteriorMetricsMonitor(
        update_frequency=20, plot_frequency=800, log_dir=folder, read_outputs=read_outputs
    )
    trainer = lightning.Trainer(
        max_epochs=30,
        callbacks=[monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    modules[beta] = WatchedVAE(beta)
    trainer.fit(modules[beta], DataLoader(digits, batch_size=64, shuffle=True, drop_last=True))
    verdicts[beta] = monitor.verdict
    readings[beta] = pd.read_json(folder / "posterior.jsonl", lines=True)

# %% [markdown]
# The monitor has said so while it trained, and what to try. Its readings are in `posterior.jsonl`, its figures in `plots`.
#
# ## What the monitor read, and what it is about
#
# On the left the mutual information between images and latents. On the right what each decoder makes of 24 latents from the
# prior: to the second all latents are alike, and it draws the mean of all digits.

# %%
z = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
colours = {1: "#00437a", 64: "#8f3e00"}

figure = plt.figure(figsize=(9.5, 3.6), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])
axes = left.subplots()
for beta, rows in readings.items():
    axes.plot(
        rows["step"], rows["mutual_information"], color=colours[beta], label=f"KL weight {beta}: {verdicts[beta].name}"
    )
axes.set(xlabel="optimizer step", ylabel="mutual information, nats", ylim=(-0.1, None))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
for part, (beta, module) in zip(right.subfigures(1, 2), modules.items(), strict=True):
    part.suptitle(f"samples, KL weight {beta}", color=colours[beta], fontsize=10)
    with torch.no_grad():
        images = module.decoder(z).sigmoid().unflatten(1, (8, 8))
    for panel, image in zip(part.subplots(6, 4).flat, images, strict=True):
        panel.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        panel.set_axis_off()
figure.savefig(Path("runs") / "digits.png", dpi=110)
information = {beta: float(rows["mutual_information"].iloc[-1]) for beta, rows in readings.items()}
print(f"mutual information at the end: {information[1]:.2f} nats with KL weight 1, {information[64]:.2f} with 64")
