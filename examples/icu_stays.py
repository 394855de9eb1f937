# %% [markdown]
# # Stays in intensive care
#
# 4,000 stays, of each up to 48 hours of 41 variables, measured at irregular times. A VAE is trained on them without the
# outcomes. It ends in one stay with what was not measured filled in, and in how well latents alone predict who dies in
# hospital.
#
# The data are set A of the PhysioNet Computing in Cardiology Challenge 2012 (Silva et al.; ODC-By 1.0). Get `set-a.zip` and
# `Outcomes-a.txt` from <https://physionet.org/content/challenge-2012>, unpack both into a folder, and `python
# examples/get_data.py physionet2012 --published FOLDER` makes `data/physionet2012` of them; `SEQVAE_REAL_DATA` is another place
# than `data`. Training takes about two minutes.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import seqvae

data = Path(os.environ.get("SEQVAE_REAL_DATA", "data")) / "physionet2012"
outcomes = pd.read_csv(data / "outcomes.csv").set_index("ts_id")
pd.read_parquet(data / "test").head(3)

# %% [markdown]
# A row is an event: which stay, when, what, and a number. `train`, `valid` and `test` are folders; `fit` finds them, and sees
# by the columns that these are events. The outcomes are not used. 300 steps are a first look; without `max_steps` the length of
# the run follows from the data.

# %%
run = seqvae.fit(data, max_steps=300, run_name="icu_stays")
run.verdict

# %% [markdown]
# ## What was not measured
#
# `impute` returns each variable at each time of a stay: what was measured as it is, the rest as the model expects it, with its
# standard deviation. Here are five variables of the test stay that has most measurements of its rarest one, from the second
# hour on: of a patient who was just admitted nothing is known, and the deviations say so.

# %%
variables = ["HR", "SysABP", "Temp", "RespRate", "GCS"]
filled = run.model.impute(split="test", variables=variables)
counts = filled[filled["measured"]].groupby(["id", "variable"]).size().unstack(fill_value=0)
stay = counts.min(axis=1).idxmax()

figure, panels = plt.subplots(len(variables), 1, figsize=(8.5, 7), sharex=True, layout="constrained")
for panel, variable in zip(panels, variables, strict=True):
    rows = filled[(filled["id"] == stay) & (filled["variable"] == variable) & (filled["time"] >= 60)]
    hours, known = rows["time"] / 60, rows["measured"]
    panel.errorbar(
        hours[~known],
        rows["value"][~known],
        yerr=1.96 * rows["std"][~known],
        fmt="_",
        color="#00437a",
        ecolor="#8ecae6",
        label="filled in, with 95 %",
    )
    panel.plot(hours[known], rows["value"][known], "o", color="black", markersize=3, label="measured")
    panel.set_ylabel(variable)
panels[0].set_title(f"Stay {stay} of the test split, and what the model fills in", loc="left")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
panels[-1].set(xlabel="hours since admission", xticks=range(0, 49, 12))
figure.align_ylabels(panels)
figure.savefig(run.directory / "stay.png", dpi=110)

# %% [markdown]
# ## Who dies
#
# `encode` returns the posterior of each stay as a DataFrame, ready for scikit-learn: a linear classifier is fitted on the
# latents of the training stays, and scored on stays that were held out. Its rival gets the mean of each variable in place of
# the latents. The outlier score, NLL and KL of a stay together, knows nothing of deaths at all. After the whole run the latents
# alone came to 0.814 ([results](../docs/results.md#what-the-latents-know-of-a-label)).

# %%
latents = run.model.encode()
latents.index = latents["id"].astype(int)
died = outcomes["in_hospital_mortality"].reindex(latents.index).astype(bool)
events = pd.concat(pd.read_parquet(data / split) for split in ("train", "valid", "test"))
means = events.pivot_table(index="ts_id", columns="variable", values="value").reindex(latents.index)
posterior = pd.DataFrame(np.stack(latents["mean"]), index=latents.index).add_prefix("latent ")
train = latents["split"] == "train"


def score(features: pd.DataFrame) -> np.ndarray:
    """Return the odds of death of the held-out stays, by a linear classifier of the training stays."""
    classifier = make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression(C=0.03, max_iter=1000))
    return classifier.fit(features[train], died[train]).decision_function(features[~train])


scores = {
    "latents and means": score(posterior.join(means)),
    "latents": score(posterior),
    "means of the variables": score(means),
    "outlier score": (latents["nll"] + latents["rate"])[~train],
}
auroc = {name: roc_auc_score(died[~train], one) for name, one in scores.items()}

figure, axes = plt.subplots(figsize=(5.5, 5.5), layout="constrained")
for (name, one), stroke in zip(scores.items(), ["-", "-", "--", ":"], strict=True):
    axes.plot(*roc_curve(died[~train], one)[:2], stroke, label=f"{name}: {auroc[name]:.3f}")
axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8)
axes.set(
    title=f"Who dies in hospital: {died[~train].sum()} of {(~train).sum()} held-out stays",
    xlabel="share of the survivors taken for deaths",
    ylabel="share of the deaths found",
    aspect="equal",
)
axes.legend(title="area under the curve", frameon=False)
figure.savefig(run.directory / "deaths.png", dpi=110)
print(f"AUROC of death from the latents: {auroc['latents']:.3f}")
