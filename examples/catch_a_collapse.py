# %% [markdown]
# # Catch a collapse, and heal it
#
# A VAE on text can learn to write without its latent: the loss goes on falling, the KL falls to zero, and the latents are
# noise. This is posterior collapse. Here a run is driven into it, called collapsed by the monitor while it trains, and then
# repeated with one flag that heals it. It ends in both runs beside each other, and in what their latents tell of the sequences.
#
# Nothing is fetched: the texts are drawn here, so that the truth is known. Both runs together take about a minute.

# %%
import random
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import seqvae

# %% [markdown]
# ## Texts that a decoder can write alone
#
# Each text is in one of four invented languages with syllables of their own. After the first syllable a decoder knows the
# language by itself; the most that a latent can tell it is which language is to come: ln 4 = 1.39 nats, and what else of the
# first letters it cares to hold.

# %%
SYLLABLES = ["ka mi to ra ne", "drul grok zar bum", "li vi fi si", "shao wei jing hu"]
random.seed(0)


def text(language: int) -> str:
    sounds = SYLLABLES[language].split()
    return " ".join("".join(random.choices(sounds, k=random.randint(1, 3))) for _ in range(2))


texts = [text(random.randrange(4)) for _ in range(4000)]
texts[:4]

# %% [markdown]
# ## A run that collapses
#
# The KL weight rises to 2 over the first third of the run, and nothing protects the posterior: `free_bits=0` takes away what
# the default recipe has for that.

# %%
RECIPE: dict[str, Any] = {
    "tokenizer": "characters",
    "free_bits": 0,
    "beta": 2,
    "kl_schedule": "linear",
    "kl_warmup": 0.3,
    "width": 32,
    "depth": 1,
    "latent_size": 8,
    "batch_size": 32,
    "gradient_accumulation_steps": 1,
    "max_steps": 600,
    "precision": "32-true",
    "monitor_every_n_steps": 6,
    "limit_val_batches": 0,
}
collapsed = seqvae.fit(texts, **RECIPE, run_name="collapsed")
collapsed.verdict

# %% [markdown]
# The loss shows nothing of it. The readings do: the rate is the KL in nats, the mutual information is what the latents tell of
# the sequences, and the decoder use is what it costs the decoder to get the latent of another sequence.

# %%
collapsed.readings[["step", "rate", "mutual_information", "decoder_use", "verdict"]].iloc[::12]

# %% [markdown]
# ## What to do about it
#
# A verdict comes with its reason and with advice, the most promising first.

# %%
print(collapsed.story.why)
for advice in collapsed.story.next:
    print("-", advice)

# %% [markdown]
# ## The same run, healed
#
# One flag more, and the same seed. When the monitor calls the run collapsed, the objective is changed until the latent lives,
# and then as much of the change is taken back as the latent survives.

# %%
healed = seqvae.fit(texts, **RECIPE, on_collapse="rescue", run_name="healed")
healed.verdict

# %% [markdown]
# ## What the latents tell
#
# Here are 1,000 new texts, each as the latent that a decoder would get for it: a draw from its posterior. To the collapsed run all
# texts are alike.

# %%
languages = [number % 4 for number in range(1000)]
new = [text(language) for language in languages]
rng = np.random.default_rng(0)

figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
for panel, (name, run) in zip(panels, {"collapsed": collapsed, "healed": healed}.items(), strict=True):
    posterior = run.model.encode(new)
    means, variances = np.stack(posterior["mean"]), np.stack(posterior["variance"])
    z = means + rng.normal(size=means.shape) * np.sqrt(variances)
    directions = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)[2]
    for language, sounds in enumerate(SYLLABLES):
        panel.scatter(*(z[np.equal(languages, language)] @ directions[:2].T).T, s=7, linewidth=0, label=sounds)
    panel.set(title=name, xlabel="first direction of the latent", aspect="equal", xlim=(-4, 4), ylim=(-4, 4))
panels[0].set_ylabel("second direction")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, markerscale=2, frameon=False)
figure.savefig(healed.directory / "latents.png", dpi=110)

# %% [markdown]
# ## Both runs beside each other
#
# The number at the end is the mutual information between the new texts and their latents, in nats. It has its price: the ELBO
# of the healed run is lower. By importance weighting, a tighter bound of the likelihood, it is not.

# %%
CURVES = {"rate": ("rate (KL)", "#00437a", "-"), "mutual_information": ("information", "#d55e00", "--")}
CURVES["decoder_use"] = ("decoder use", "#1d2430", "o-")
TONES = {"collapsed": "#8f3e00", "healthy": "#8ecae6"}

figure, panels = plt.subplots(
    2, 2, figsize=(8, 3.8), sharex=True, sharey="row", height_ratios=[1, 0.07], layout="constrained"
)
for (panel, strip), run in zip(panels.T, (collapsed, healed), strict=True):
    readings = run.readings
    for column, (name, colour, stroke) in CURVES.items():
        curve = readings[["step", column]].dropna()
        panel.plot("step", column, stroke, data=curve, color=colour, label=name, markersize=3, markerfacecolor="white")
    panel.set_xlim(0, 600)
    panel.spines[["top", "right"]].set_visible(False)
    for _, span in readings.groupby((readings["verdict"] != readings["verdict"].shift()).cumsum()):
        verdict, start, end = span["verdict"].iloc[0], span["step"].min(), span["step"].max() + 6
        strip.axvspan(start, end, color=TONES.get(verdict, "#dddddd"), linewidth=0)
        if end - start > 100:
            ink = "white" if verdict == "collapsed" else "black"
            name = verdict.replace("_", " ")
            strip.text((start + end) / 2, 0.45, name, color=ink, fontsize=8.5, ha="center", va="center")
    strip.set(yticks=[], xlabel="optimizer step")
    strip.spines[:].set_visible(False)

(left, right), _ = panels
left.set_ylabel("nats per sequence")
left.set_title("A posterior collapses …", color="#8f3e00", loc="left", weight="bold")
right.set_title("… and with a rescue it lives", color="#00437a", loc="left", weight="bold")
left.legend(frameon=False, loc="upper right")
caught = collapsed.readings.query("verdict == 'collapsed'")["step"].iloc[0]
for panel in (left, right):
    panel.axvline(caught, color="#8f3e00", linewidth=1.4)
left.text(caught + 8, 0.5 * left.get_ylim()[1], f"caught at step {caught}", color="#8f3e00", weight="bold")
figure.savefig(healed.directory / "healed.png", dpi=180)

evaluations = {name: run.model.evaluate(new)["rows"] for name, run in {"before": collapsed, "after": healed}.items()}
table = pd.DataFrame({name: {row["name"]: row["value"] for row in rows} for name, rows in evaluations.items()})
information = table.loc["mutual information"]
print(f"mutual information with new texts: {information['before']:.2f} nats before, {information['after']:.2f} after")
table.loc[["rate", "mutual information", "decoder use", "ELBO", "IW-NLL"]].round(2)
