# %% [markdown]
# # New molecules
#
# A VAE reads molecules as text (SMILES strings) and then writes new ones. It ends in drawings of what lies between two
# molecules, in drawings of new ones, and in the share of what it writes that is a molecule at all, by RDKit.
#
# The strings are from MOSES (Polykovskiy et al. 2020; MIT): drug-like molecules, of which 200,000 are enough here. `python
# examples/get_data.py moses_smiles` puts them into `data/moses_smiles`; `SEQVAE_REAL_DATA` is another place than `data`. RDKit
# and tokenizers come with `pip install ".[examples]"`. Training takes about two minutes.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from rdkit import Chem, rdBase
from rdkit.Chem.Draw import MolToImage
from tokenizers import Tokenizer, decoders, models, trainers

import seqvae

rdBase.DisableLog("rdApp.*")  # it complains of each string that is no molecule, and we count those
data = Path(os.environ.get("SEQVAE_REAL_DATA", "data")) / "moses_smiles"
splits = {split: pd.read_parquet(data / f"{split}.parquet", columns=["smiles"]) for split in ("train", "valid", "test")}
splits["train"] = splits["train"].head(200_000)
splits["train"].head(3)

# %% [markdown]
# ## Tokens
#
# `tokenizer="characters"` would do. Pieces of strings are better: byte pair encoding finds 512 frequent ones, up to whole
# rings, so that a molecule is 8 tokens long in place of 36 characters, and a ring that is one token cannot be left open.

# %%
tokenizer = Tokenizer(models.BPE())
tokenizer.decoder = decoders.Fuse()
pieces = trainers.BpeTrainer(vocab_size=512, special_tokens=[], show_progress=False)
tokenizer.train_from_iterator(splits["train"]["smiles"], pieces)
tokenizer.save("smiles_tokenizer.json")
tokenizer.encode("CC(=O)Oc1ccccc1C(=O)O").tokens  # aspirin

# %% [markdown]
# ## Training
#
# `fit` takes data frames, here one for each split. Nothing is seen twice, so there is nothing to memorise and `dropout=0`.
# `free_bits=0.2` lets a molecule cost 0.2 nats in each of 16 latent dimensions before the KL counts.

# %%
run = seqvae.fit(
    splits,
    tokenizer="smiles_tokenizer.json",
    dropout=0,
    free_bits=0.2,
    tokens_per_batch=2000,
    gradient_accumulation_steps=1,
    max_steps=1500,
    limit_val_batches=0.2,
    run_name="molecules",
)
run.verdict

# %% [markdown]
# ## From one molecule to another
#
# `interpolate` decodes latents between those of two molecules of the test split. What is no molecule keeps its place, with the
# string that was written: a picture must not flatter.

# %%


def draw(panel: Axes, smiles: str, title: str = "") -> None:
    molecule = Chem.MolFromSmiles(smiles)
    if molecule is not None and smiles:
        panel.imshow(MolToImage(molecule, size=(300, 220)))
    else:
        lines = "\n".join(smiles[start : start + 18] for start in range(0, min(len(smiles), 72), 18))
        panel.text(0.5, 0.5, f"no molecule:\n{lines}", ha="center", va="center", fontsize=6, color="#8f3e00")
    panel.set_title(title, fontsize=9)
    panel.set_axis_off()


way = run.model.interpolate(0, 1, split="test", steps=6)["text"]
ends = splits["test"]["smiles"][:2]
figure, panels = plt.subplots(2, 4, figsize=(9, 4), layout="constrained")
titles = ["from this one", *(f"decoded, {step} of 6" for step in range(1, 7)), "to this one"]
for panel, smiles, title in zip(panels.flat, [ends[0], *way, ends[1]], titles, strict=True):
    draw(panel, smiles, title)
figure.savefig(run.directory / "between.png", dpi=110)

# %% [markdown]
# ## New ones
#
# `sample` decodes latents from the prior. Of 2,000 strings we count those that RDKit reads (valid), the different molecules
# among these (unique), and those of them that were not trained on (novel). Below a temperature of 1 the decoder takes likely
# tokens more often than it believes in them: more of what it writes is valid, and it repeats itself sooner.
#
# A decoder that ignores its latent writes molecules, too: so look at the mutual information as well. At temperature 1 a larger
# model comes to 87 % valid molecules after an hour ([results](../docs/results.md#new-molecules)).

# %%
trained_on = set(splits["train"]["smiles"])
samples, counts = {}, {}
for temperature in (0.2, 0.4, 0.6, 0.8, 1.0):
    samples[temperature] = run.model.sample(2000, temperature=temperature)["text"]
    molecules = [Chem.MolFromSmiles(smiles) for smiles in samples[temperature] if smiles]
    written = pd.Series([Chem.MolToSmiles(molecule) for molecule in molecules if molecule is not None])
    different = written.drop_duplicates()
    counts[temperature] = {
        "valid": len(written) / 2000,
        "unique": len(different) / len(written),
        "novel": 1 - different.isin(trained_on).mean(),
    }
shares = pd.DataFrame(counts).T
information = run.readings["mutual_information"].iloc[-1]

figure = plt.figure(figsize=(10, 4.4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 2.1])
axes = left.subplots()
for name, mark in {"valid": "o-", "unique": "s--", "novel": "^:"}.items():
    axes.plot(shares.index, shares[name], mark, label=name if name == "valid" else f"of these {name}")
axes.set(xlabel="temperature of the decoder", ylabel="share", ylim=(0, 1.03), xticks=shares.index)
axes.legend(frameon=False, loc="lower left")
for panel, smiles in zip(right.subplots(4, 5).flat, samples[0.6], strict=False):
    draw(panel, smiles)
right.suptitle("The first 20 samples at temperature 0.6, good or bad", fontsize=10)
figure.savefig(run.directory / "samples.png", dpi=150)
print(f"valid at temperature 1: {shares['valid'][1.0]:.1%}; mutual information: {information:.1f} nats")
shares.round(3)
