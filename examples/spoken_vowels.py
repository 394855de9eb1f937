# %% [markdown]
# # Spoken vowels
#
# Nine men say the same two vowels, 640 times in all. A VAE is trained on what they said, without the speakers. Do its latents
# tell the speakers apart? It ends in a map of the latents, the way from one voice to another, and the accuracy of a linear
# classifier.
#
# An utterance is 7 to 29 frames of 12 linear prediction coefficients (JapaneseVowels: Kudo, Toyama and Shimbo 1999; UCI, CC BY
# 4.0). `python examples/get_data.py japanese_vowels` puts it into `data/japanese_vowels`; `SEQVAE_REAL_DATA` is another place
# than `data`. Training takes about a minute.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.decomposition import PCA

import seqvae

data = Path(os.environ.get("SEQVAE_REAL_DATA", "data")) / "japanese_vowels"
utterances = {split: pd.read_parquet(data / f"{split}.parquet") for split in ("train", "valid", "test")}
utterances["train"].head(3)

# %% [markdown]
# A row is an utterance: a list of frames, each a list of 12 numbers. That is all that `fit` wants; lengths may differ.
#
# The defaults would leave some 5 nats in the latent, which is best for the likelihood. Here it is to describe a voice, so it
# gets room: `target_kl=20` steers the KL to 20 nats. Run this cell again, and the finished run is opened in place of being
# repeated.

# %%
run = seqvae.fit(data, target_kl=20, latent_size=32, run_name="spoken_vowels")
run.verdict

# %% [markdown]
# The verdict is the monitor's: the latent carries something, and the decoder uses it. `run` alone in a cell shows the whole
# report.
#
# ## From one voice to another
#
# `interpolate` decodes latents between those of two sequences: here of two speakers of the test split.

# %%
test = utterances["test"].reset_index(drop=True)
first, last = int(test["label"].idxmin()), int(test["label"].idxmax())
way = run.model.interpolate(first, last, split="test", steps=5)
coefficients = [name for name in way.columns if name.startswith("frames")]

shown = [np.stack(test["frames"][first])]
shown += [place[coefficients].to_numpy() for _, place in way.groupby("place")]
shown += [np.stack(test["frames"][last])]
voices = [f"recorded:\nspeaker {test['label'][end]}" for end in (first, last)]
titles = [voices[0], "decoded", "", "…", "", "decoded", voices[1]]

every_frame = np.concatenate([np.stack(frames) for frames in utterances["train"]["frames"]])
mean, deviation = every_frame.mean(axis=0), every_frame.std(axis=0)
figure, panels = plt.subplots(
    1, 7, figsize=(10, 3), sharey=True, layout="constrained", width_ratios=[len(frames) for frames in shown]
)
for panel, frames, title in zip(panels, shown, titles, strict=True):
    picture = panel.imshow(((frames - mean) / deviation).T, vmin=-2.5, vmax=2.5, cmap="cividis", aspect="auto")
    panel.set(title=title, xticks=[0, len(frames) - 1], xticklabels=[1, len(frames)])
panels[0].set(ylabel="coefficient", yticks=range(12), yticklabels=range(1, 13))
panels[3].set_xlabel("frame")
figure.colorbar(picture, ax=panels, label="standard deviations", extend="both", pad=0.01)
figure.savefig(run.directory / "between_voices.png", dpi=110)

# %% [markdown]
# ## Where the speakers lie
#
# `encode` returns the posterior of each sequence as a DataFrame. The map shows utterances that were held out of training, in
# the plane in which their means differ most; neither the model nor the plane knows the speakers. The number below it does: a
# linear classifier, fitted to the latents of the training utterances, names the speakers of the held-out ones. Its rival gets
# the means of the 12 coefficients in place of the latents.

# %%
latents = run.model.encode(split="valid+test")
speakers = pd.concat([utterances["valid"]["label"], utterances["test"]["label"]]).to_numpy()
pca = PCA(2)
plane = pca.fit_transform(np.stack(latents["mean"]))
first_share, second_share = pca.explained_variance_ratio_

probe = run.model.evaluate(split="valid+test", probe="label", iw_sequences=0)["probe"]
accuracy = {row["features"]: row["score"][0] for row in probe["rows"]}

figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
for speaker, mark in zip(range(1, 10), "osv^D<P>X", strict=True):
    axes.scatter(*plane[speakers == speaker].T, s=22, marker=mark, linewidth=0, label=f"speaker {speaker}")
axes.set(
    title=f"Voices by their latents: a linear classifier names {accuracy['latents']:.1%} of them",
    xlabel=f"first principal component ({first_share:.0%} of the variance)",
    ylabel=f"second ({second_share:.0%})",
    aspect="equal",
)
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
figure.savefig(run.directory / "speakers.png", dpi=110)
print(
    f"speakers named by the latents: {accuracy['latents']:.1%}, by the means of the coefficients: {accuracy['means']:.1%}"
)
