"""The headline numbers of `seqvae evaluate`, each computed a second way on the real data: one unpadded sequence at a time, in
plain torch, with noise of its own."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributions import Normal

import seqvae
from seqvae.config.inference import DataChoices
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.estimates import mean_of, posterior_statistics
from seqvae.inference.evaluate import weighted_nll
from seqvae.inference.model import Model, open_data
from seqvae.inference.streaming import paired_batches

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]

SETS: dict[str, dict[str, Any]] = {
    "moses_smiles": {"tokenizer": "characters"},
    "japanese_vowels": {},
    "physionet2012": {},
}
SEQUENCES, DRAWS = 100, 20


class Trained(NamedTuple):
    """A short training, and its data."""

    model: Model
    data: SequenceDataModule


@pytest.fixture(scope="module", params=sorted(SETS))
def trained(request, real_data, tmp_path_factory) -> Trained:
    directory = tmp_path_factory.mktemp(request.param)
    run = seqvae.fit(
        str(real_data / request.param),
        max_steps=100,
        precision="32-true",
        output_dir=str(directory),
        cache_dir=str(directory / "cache"),
        disable_metrics_monitoring=True,
        **SETS[request.param],
    )
    return Trained(run.model, open_data(run.model, DataChoices()))


def alone(trained: Trained, sequence: int) -> tuple[Any, Normal]:
    """Return a sequence in a batch of its own, without padding, and its posterior."""
    batch = trained.data.split("valid").gather(np.array([sequence]))
    posterior = trained.model.network.encode(batch)
    return batch, Normal(posterior.mean.double(), (0.5 * posterior.logvar.double()).exp())


@torch.no_grad()
def test_elbo_and_iw_nll_are_those_of_unpadded_sequences(trained):
    weighted = weighted_nll(trained.model, trained.data, ["valid"], DRAWS, SEQUENCES, seed=0)
    torch.manual_seed(1)
    prior = Normal(torch.zeros((), dtype=torch.float64), 1.0)
    again_N = []
    for sequence in weighted.nll.sequences_N.tolist():
        batch, posterior = alone(trained, sequence)
        terms = []
        for _ in range(DRAWS):
            z = posterior.sample()
            log_p_x = -float(trained.model.network.nll_given_z(batch, z.float()))
            terms.append(log_p_x + float((prior.log_prob(z) - posterior.log_prob(z)).sum()))
        again_N.append(math.log(DRAWS) - float(torch.tensor(terms, dtype=torch.float64).logsumexp(0)))
    difference = mean_of(weighted.nll.nll_N - np.array(again_N))  # of the same sequences: the noise of the draws alone
    assert abs(difference.value) < 4 * difference.error
    assert difference.error < weighted.nll.per_sequence.error


@torch.no_grad()
def test_elbo_rate_and_information_agree_with_a_second_estimator(trained):
    statistics = posterior_statistics(trained.model.network, paired_batches(trained.data, ["valid"]))
    chosen = np.random.default_rng(1).permutation(len(trained.data.split("valid")))[:1000]
    torch.manual_seed(1)
    prior = Normal(torch.zeros((), dtype=torch.float64), 1.0)
    elbo_N, posteriors = [], []
    for sequence in chosen.tolist():
        batch, posterior = alone(trained, sequence)
        z = posterior.sample()
        nll = float(trained.model.network.nll_given_z(batch, z.float()))
        elbo_N.append(-nll - float((posterior.log_prob(z) - prior.log_prob(z)).sum()))
        posteriors.append((posterior.mean[0], posterior.stddev[0], z[0]))
    elbo = mean_of(np.array(elbo_N))
    assert abs(elbo.value - statistics.elbo.value) < 4 * math.hypot(elbo.error, statistics.elbo.error)
    mean_NZ, std_NZ, z_NZ = (torch.stack(column) for column in zip(*posteriors, strict=True))
    log_q_NN = Normal(mean_NZ, std_NZ).log_prob(z_NZ[:, None]).sum(dim=-1)
    information_N = (log_q_NN.diagonal() - log_q_NN.logsumexp(dim=1) + math.log(len(chosen))).numpy()
    information = mean_of(information_N)
    near_cap = 0.1 if information.value > 0.7 * math.log(len(chosen)) else 0.0  # fewer posteriors saturate sooner
    assert abs(information.value - statistics.mutual_information) < 5 * information.error + near_cap


@torch.no_grad()
def test_decoder_use_agrees_over_five_pairings_and_with_partners_drawn_by_hand(trained):
    network, stored = trained.model.network, trained.data.split("valid")
    uses = [
        posterior_statistics(network, paired_batches(trained.data, ["valid"], seed=seed), seed=seed).decoder_use
        for seed in range(5)
    ]
    assert all(use is not None for use in uses)
    values, errors = (np.array(column) for column in zip(*uses, strict=True))
    assert np.all(np.abs(values - values.mean()) < 4 * errors)
    random = np.random.default_rng(1)
    torch.manual_seed(1)
    order = np.argsort(stored.lengths_N, kind="stable")
    place_of = np.argsort(order)
    lost = []
    for sequence in random.permutation(len(stored))[:300].tolist():
        near = np.clip(place_of[sequence] + np.arange(-10, 11), 0, len(order) - 1)
        other = int(random.choice([one for one in order[near] if one != sequence]))
        batch, own = alone(trained, sequence)
        _, others = alone(trained, other)
        nll_own, nll_other = (float(network.nll_given_z(batch, one.sample().float())) for one in (own, others))
        lost.append(nll_other - nll_own)
    use = mean_of(np.array(lost))
    assert abs(use.value - values.mean()) < 4 * math.hypot(use.error, errors.mean())
