"""The likelihoods are proper, the embeddings distinguish what differs, and sums over events equal a loop.

Shapes: B sequences, T steps (S: with the end mark), V variables or ids, D features, E events, N rows, W width.
"""

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from seqvae.data.batch import EventBatch, TokenBatch
from seqvae.data.building.finishing import gap_moments
from seqvae.data.description import DataDescription
from seqvae.models.embeddings import (
    EventEmbedding,
    PretrainedVectors,
    SpreadToEvents,
    SumByStep,
    step_offsets,
    time_features,
)
from seqvae.models.likelihoods import (
    DRAWN_VARIABLES,
    FEW_VARIABLES,
    LOGVAR_LIMIT,
    OUTLIER_SHARE,
    EventLikelihood,
    GapScale,
    MomentsOfAll,
    MomentsOfPresent,
    Presence,
    PresenceOfMany,
    TokenLikelihood,
    VectorLikelihood,
    by_rows,
    draw_bounds,
    gap_nll,
    robust_nll,
    student_cdf,
)
from seqvae.models.posteriors import bounded
from seqvae.models.vae import SequenceVAE
from tests.support.small_models import DESCRIPTIONS, SMALL, make_batch


@pytest.mark.parametrize("unknown_share", [0.0, 0.3])
def test_token_sequences_up_to_a_length_and_those_longer_have_probability_one(unknown_share):
    torch.manual_seed(0)
    vae = SequenceVAE(DataDescription(kind="tokens", vocabulary_size=2, unknown_share=unknown_share), SMALL).eval()
    longest, z_1Z = 4, torch.randn(1, 3)
    first_hidden_W = vae.decoder(vae.begin_W.expand(1, 1, -1), z_1Z)[0, 0]
    assert isinstance(vae.likelihood, TokenLikelihood)
    nothing = (1 - unknown_share) * vae.likelihood.scores(first_hidden_W).softmax(dim=-1)[vae.likelihood.end]
    ended = [torch.exp(-score_all_words(vae, length, z_1Z).sum(dim=1)).sum() for length in range(1, longest + 1)]
    longer = torch.exp(-score_all_words(vae, longest + 1, z_1Z)[:, :-1].sum(dim=1)).sum()
    assert (nothing + sum(ended) + longer).item() == pytest.approx(1, abs=1e-5)


def score_all_words(vae: SequenceVAE, length: int, z_1Z: Tensor) -> Tensor:
    """-log p of each step of each of the 2^length words, the end mark last."""
    words_BT = torch.tensor(list(itertools.product(range(2), repeat=length)))
    lengths_B = torch.full((len(words_BT),), length)
    batch = TokenBatch(words_BT, lengths_B, lengths_B, None, step_tokens=1, position=0)
    return vae.decode(batch, z_1Z.expand(len(words_BT), -1)).detach()


def test_what_training_never_showed_costs_its_share_and_changes_no_gradient_of_what_it_shows():
    hidden_BSW, batch = torch.randn(2, 5, 8), make_batch("tokens", [4, 2])
    likelihood, shared = TokenLikelihood(5, 8), TokenLikelihood(5, 8, unknown_share=0.1)
    with torch.no_grad():
        likelihood.scores.bias[0] = -30.0  # as training leaves what it never shows
    shared.load_state_dict(likelihood.state_dict())
    shown = batch._replace(tokens_BT=batch.tokens_BT.clamp(min=1))
    real_BS = torch.arange(5) < torch.tensor([[5], [3]])
    torch.testing.assert_close(shared(hidden_BSW, shown), likelihood(hidden_BSW, shown) - math.log(0.9) * real_BS)
    gradients = [
        torch.autograd.grad(one(hidden_BSW, shown).sum(), one.scores.weight)[0] for one in (likelihood, shared)
    ]
    assert torch.equal(*gradients)
    unseen = batch._replace(tokens_BT=torch.zeros_like(batch.tokens_BT))
    unknown_BS, is_unknown_BS = shared.unknown_nll(hidden_BSW, unseen)
    assert is_unknown_BS.sum(dim=1).tolist() == [4, 2]
    torch.testing.assert_close(unknown_BS[is_unknown_BS], torch.full((6,), -math.log(0.1)), rtol=0, atol=1e-5)


def test_an_unknown_variable_costs_its_share_and_is_there_or_not_with_probability_one():
    torch.manual_seed(0)
    shared = EventLikelihood(replace(DESCRIPTIONS["events"], unknown_share=0.1), 8)
    plain = EventLikelihood(DESCRIPTIONS["events"], 8)
    with torch.no_grad():
        plain.presence.bias[0] = -30.0
    shared.load_state_dict(plain.state_dict())
    hidden_BTW, batch = torch.randn(1, 4, 8), make_batch("events", [4])
    there = batch._replace(
        variables_E=torch.zeros(4).long(),
        steps_E=torch.arange(4),
        values_E=torch.zeros(4),
        has_value_E=torch.zeros(4).bool(),
    )
    absent = there._replace(variables_E=torch.ones(4).long())
    nll_there_BT, is_unknown_BT = shared.unknown_nll(hidden_BTW, there)
    nll_absent_BT, is_there_BT = shared.unknown_nll(hidden_BTW, absent)
    assert is_unknown_BT.all()
    assert not is_there_BT.any()
    torch.testing.assert_close(nll_there_BT, torch.full((1, 4), -math.log(0.1)), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.exp(-nll_there_BT) + torch.exp(-nll_absent_BT), torch.ones(1, 4))
    torch.testing.assert_close(
        shared(hidden_BTW, there) - plain(hidden_BTW, there), nll_there_BT - plain.unknown_nll(hidden_BTW, there)[0]
    )


def test_feature_densities_are_those_of_independent_gaussians():
    torch.manual_seed(0)
    likelihood, batch = VectorLikelihood(DESCRIPTIONS["vectors"], 8), make_batch("vectors", [4])
    hidden_BTW = torch.randn(1, 4, 8)
    mean_BTD, raw_BTD = likelihood.moments(hidden_BTW).chunk(2, dim=-1)
    gaussians = torch.distributions.Normal(mean_BTD, torch.exp(3.5 * torch.tanh(raw_BTD / 7)))
    expected_BT = -(gaussians.log_prob(batch.values_BTD) * batch.observed_BTD).sum(dim=-1)
    torch.testing.assert_close(likelihood(hidden_BTW, batch), expected_BT, rtol=0, atol=0.01)


def test_a_missing_value_has_no_say_in_the_likelihood():
    likelihood, batch = VectorLikelihood(DESCRIPTIONS["vectors"], 8), make_batch("vectors", [4])
    hidden_BTW = torch.randn(1, 4, 8)
    poisoned_BTD = torch.where(batch.observed_BTD, batch.values_BTD, 100.0)
    torch.testing.assert_close(
        likelihood(hidden_BTW, batch._replace(values_BTD=poisoned_BTD)), likelihood(hidden_BTW, batch), rtol=0, atol=0
    )


def test_gaps_are_log_normal():
    gaps, mean, logvar = torch.tensor([0.5, 7.0, 300.0]), torch.tensor(0.5), torch.tensor(0.6)
    expected = -torch.distributions.LogNormal(1.0 + 2.0 * mean, 2.0 * torch.exp(0.5 * logvar)).log_prob(gaps)
    torch.testing.assert_close(gap_nll(gaps, mean, logvar, GapScale(1.0, 2.0, 0.1)), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("mean", "logvar", "scale"),
    [
        (-1.0, 0.0, GapScale(0.0, 1.0, 0.2)),
        (1.0, -1.0, GapScale(2.0, 1.5, 1.0)),
        (-8.0, -2.0, GapScale(0.0, 1.0, 0.2)),
        (0.5, 1.0, GapScale(21.4, 0.3, 5e8)),  # a month in milliseconds
        (0.5, 1.0, GapScale(-7.3, 2.0, 3e-4)),  # minutes in days
    ],
)
def test_gaps_and_those_too_short_to_be_distinguished_have_probability_one(mean, logvar, scale):
    """What outliers have beyond the longest is known in closed form."""
    mean, logvar = torch.tensor([mean, logvar], dtype=torch.float64)
    longest = math.log(scale.shortest) + 40.0
    edges = torch.linspace(math.log(scale.shortest), longest, 400_001, dtype=torch.float64)
    gaps = (0.5 * (edges[1:] + edges[:-1])).exp()
    longer = (torch.exp(-gap_nll(gaps, mean, logvar, scale)) * gaps).sum() * (edges[1] - edges[0])
    shorter = scale.shortest * torch.exp(-gap_nll(torch.tensor(0.0), mean, logvar, scale))
    farthest = (longest - scale.log_mean) / scale.log_std
    beyond = OUTLIER_SHARE * student_cdf((mean - farthest) * torch.exp(-0.5 * logvar))
    assert (longer + shorter + beyond).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("log_mean", "log_std"), [(math.log(43_200), 0.5), (math.log(1e9), 1.0), (math.log(1e-4), 0.1)]
)
def test_gaps_reach_their_entropy_in_any_unit(log_mean, log_std):
    """A month in minutes, 12 days in milliseconds, a tenth of a millisecond in seconds; measured as for the cache."""
    torch.manual_seed(0)
    gaps_N = torch.exp(log_mean + log_std * torch.randn(4000))
    scale = GapScale(*gap_moments(iter, [[gaps_N.numpy()]]))
    heads = nn.Linear(8, 2)
    hidden_NW = torch.randn(4000, 8)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-3)
    for _ in range(400):
        mean_N, logvar_N = heads(hidden_NW).unbind(dim=-1)
        nll = gap_nll(gaps_N, mean_N, logvar_N, scale).mean()
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
    entropy = log_mean + 0.5 * math.log(2 * math.pi * math.e) + math.log(log_std)
    assert nll.item() == pytest.approx(entropy, abs=0.3)


def test_a_rare_value_far_from_the_mean_is_learned_where_it_can_be_predicted():
    """1 in 4 % of the steps, else 0: 4.9 standard deviations from the mean, and what causes it stands in the input."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for _ in range(900):
        inputs_N4 = torch.randn(512, 4)
        inputs_N4[:, 0] = (torch.rand(512) < 0.04).float()
        values_N = (inputs_N4[:, 0] - 0.04) / 0.04**0.5 / 0.96**0.5
        mean_N, logvar_N = network(inputs_N4).unbind(dim=-1)
        loss = robust_nll(values_N, mean_N, bounded(logvar_N, LOGVAR_LIMIT)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert mean_N[inputs_N4[:, 0] == 1].mean().item() == pytest.approx(4.9, abs=0.5)


def test_gaps_too_short_to_be_distinguished_are_equally_likely_and_learn_from():
    mean = torch.tensor(1.0, requires_grad=True)
    nll_N = gap_nll(torch.tensor([0.0, 0.1, 0.2]), mean, torch.tensor(0.0), GapScale(0.0, 1.0, 0.2))
    assert nll_N.unique().numel() == 1
    nll_N.sum().backward()
    assert mean.grad is not None
    assert mean.grad > 0


@pytest.mark.parametrize(("mean", "logvar"), [(0.0, 0.0), (2.0, -5.0), (-3.0, 4.0)])
def test_values_have_probability_one(mean, logvar):
    """What outliers have beyond 1,000 is known in closed form."""
    values = torch.linspace(-1000, 1000, 2_000_001, dtype=torch.float64)
    density = torch.exp(-robust_nll(values, torch.tensor(mean), torch.tensor(logvar)))
    ends = (torch.tensor([-1000.0, 1000.0]) - mean) * math.exp(-0.5 * logvar)
    beyond = OUTLIER_SHARE * student_cdf(-ends.abs()).sum().item()
    assert (density.sum() * 0.001).item() + beyond == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("logvar", [-7.0, 0.0, 7.0])
def test_an_ordinary_value_costs_what_it_costs_under_a_gaussian(logvar):
    deviation = math.exp(0.5 * logvar)
    values = 1.5 + deviation * torch.linspace(-3, 3, 61)
    expected = -torch.distributions.Normal(1.5, deviation).log_prob(values)
    torch.testing.assert_close(robust_nll(values, torch.tensor(1.5), torch.tensor(logvar)), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(("value", "most"), [(19.7, 30), (-19.7, 30), (1e3, 45), (1e30, 160)])
def test_a_wild_value_costs_little_and_leaves_gradients_finite(value, most):
    moments = torch.tensor([0.0, -7.0], requires_grad=True)
    nll = robust_nll(torch.tensor(value), *moments)
    nll.backward()
    assert nll < most
    assert moments.grad is not None
    assert moments.grad.isfinite().all()


def test_a_wild_gap_costs_little():
    nll = gap_nll(torch.tensor(1e9), torch.tensor(0.0), torch.tensor(-7.0), GapScale(0.0, 1.0, 0.1))
    assert nll < math.log(1e9) + 30


def test_the_sets_that_a_step_may_hold_have_probability_one():
    torch.manual_seed(0)
    likelihood, hidden_1W = EventLikelihood(events_of(4), 8), torch.randn(1, 8)
    subsets_NV = torch.tensor(list(itertools.product([False, True], repeat=4)))
    nll_N = likelihood.presence.bernoulli_nll(hidden_1W.expand(len(subsets_NV), -1), subsets_NV)
    assert torch.exp(-nll_N).sum().item() == pytest.approx(1, abs=1e-5)


def events_of(variables: int) -> DataDescription:
    names = tuple(map(str, range(variables)))
    return DataDescription(kind="events", names=names, valued=(True,) * variables)


def test_an_event_twice_in_a_step_is_present_once():
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(DESCRIPTIONS["events"], 8), make_batch("events", [5])
    doubled = batch._replace(
        variables_E=batch.variables_E.repeat_interleave(2), steps_E=batch.steps_E.repeat_interleave(2)
    )
    hidden_NW = torch.randn(5, 8)
    presence = likelihood.presence
    torch.testing.assert_close(presence.nll(hidden_NW, doubled), presence.nll(hidden_NW, batch))


def test_the_likelihood_of_a_step_is_that_of_its_gap_its_variables_and_their_values():
    """Held against a loop over the steps and events of one sequence."""
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(DESCRIPTIONS["events"], 8), make_batch("events", [5])
    hidden_BTW = torch.randn(1, 5, 8)
    nll_T = likelihood(hidden_BTW, batch)[0]
    scale = likelihood.gap_scale
    for step in range(5):
        features = torch.cat((hidden_BTW[0, step], time_features(batch.gaps_BT[0, step], scale.shortest)))
        hidden_W = hidden_BTW[0, step] + likelihood.after_gap(features)
        mine_E = batch.steps_E == step
        logits_V = likelihood.presence(hidden_W)
        present_V = torch.isin(torch.arange(3), batch.variables_E[mine_E]).float()
        expected = -torch.distributions.Bernoulli(logits=logits_V).log_prob(present_V).sum()
        moments = likelihood.predict_gaps(hidden_BTW[:, step])
        expected += gap_nll(batch.gaps_BT[:, step], *moments, scale).squeeze() if step > 0 else 0
        for variable, value, has_value in zip(
            batch.variables_E[mine_E], batch.values_E[mine_E], batch.has_value_E[mine_E], strict=True
        ):
            mean, raw = likelihood.value_moments.of_all(hidden_W[None])[0, variable]
            gaussian = torch.distributions.Normal(mean, torch.exp(3.5 * torch.tanh(raw / 7)))
            expected -= gaussian.log_prob(value) * has_value
        torch.testing.assert_close(nll_T[step], expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("make_moments", [MomentsOfAll, MomentsOfPresent])
def test_moments_of_events_are_those_of_their_step_and_variable(make_moments):
    torch.manual_seed(0)
    moments, hidden_NW = make_moments(7, 8), torch.randn(4, 8)
    steps_E, variables_E = torch.tensor([0, 0, 1, 3]), torch.tensor([6, 2, 2, 0])
    moments_E2 = moments(hidden_NW, steps_E, variables_E, step_offsets(steps_E, 4))
    torch.testing.assert_close(moments_E2, moments.of_all(hidden_NW)[steps_E, variables_E])


def test_many_variables_have_a_proper_likelihood_that_learns():
    torch.manual_seed(0)
    likelihood, batch = EventLikelihood(events_of(FEW_VARIABLES + 1), 8), make_batch("events", [5, 2])
    nll_BT = likelihood(torch.randn(2, 5, 8), batch)
    assert not nll_BT[1, 2:].any()
    nll_BT.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in likelihood.parameters())


# --- Many variables ---------------------------------------------------------------------------------------------------

DRAWS = 40
"""Variables that are drawn in these tests, of four times as many."""


@pytest.fixture
def many(monkeypatch) -> PresenceOfMany:
    """Presence of 160 variables with scores as spread as after training, of which 40 are drawn."""
    monkeypatch.setattr("seqvae.models.likelihoods.DRAWN_VARIABLES", DRAWS)
    torch.manual_seed(0)
    presence = PresenceOfMany(8, 4 * DRAWS, (0.9, 0.5, *[0.02] * (4 * DRAWS - 2)))
    nn.init.normal_(presence.weight, std=0.7)
    return presence


def events_at(steps: int, variables: int) -> EventBatch:
    """One sequence: the first variable at every step, the second twice at the first, two others at each step but the last."""
    steps_E = torch.cat((torch.arange(steps), torch.tensor([0, 0]), torch.arange(steps - 1).repeat_interleave(2)))
    drawn = torch.randint(2, variables, (2 * (steps - 1),), generator=torch.Generator().manual_seed(1))
    variables_E = torch.cat((torch.zeros(steps, dtype=torch.int64), torch.tensor([1, 1]), drawn))
    order = steps_E.argsort(stable=True)
    batch = make_batch("events", [1])
    values = {"values_E": torch.zeros(len(order)), "has_value_E": torch.zeros(len(order), dtype=torch.bool)}
    return batch._replace(steps_E=steps_E[order], variables_E=variables_E[order], **values)


def plain_nll(presence: Presence, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
    present_NV = torch.zeros(len(hidden_NW), presence.out_features)
    present_NV[batch.steps_E, batch.variables_E] = 1
    return -torch.distributions.Bernoulli(logits=presence(hidden_NW)).log_prob(present_NV).sum(dim=1)


def test_in_training_the_mean_over_the_draws_is_the_exact_value_and_gradient(many):
    batch, hidden_NW = events_at(6, many.out_features), torch.randn(6, 8, requires_grad=True)
    inputs = (hidden_NW, many.weight, many.bias)
    exact = plain_nll(many, hidden_NW, batch)
    exact_gradients = torch.autograd.grad(exact.square().sum(), inputs)
    values, gradients = [], []
    for _ in range(1500):
        estimate = many.train().nll(hidden_NW, batch)
        values.append(estimate.detach())
        # Of a linear function: the mean of a square would not be the square of the mean.
        gradients.append(torch.autograd.grad((2 * exact.detach() * estimate).sum(), inputs))
    for found, expected in zip(
        (torch.stack(values), *map(torch.stack, zip(*gradients, strict=True))), (exact, *exact_gradients), strict=True
    ):
        error = found.std(dim=0) / len(values) ** 0.5
        away = (found.mean(dim=0) - expected.detach()) / error.clamp(min=1e-3)
        assert found.std() > 0
        assert away.abs().max() < 5
        assert away.square().mean() < 1.5


@pytest.mark.parametrize("at_once", [1, 2**21], ids=["in blocks", "at once"])
def test_without_gradients_all_variables_count(many, monkeypatch, at_once):
    monkeypatch.setattr("seqvae.models.cpu_kernels.SCORES_AT_ONCE", at_once)
    monkeypatch.setattr("seqvae.models.cpu_kernels.FEWEST_COLUMNS", 7)
    batch, hidden_NW = events_at(6, many.out_features), torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(many.train().nll(hidden_NW, batch), plain_nll(many, hidden_NW, batch))
    torch.testing.assert_close(many.eval().nll(hidden_NW, batch), plain_nll(many, hidden_NW, batch))


def test_the_same_seed_draws_the_same_variables_each_once(many):
    torch.manual_seed(5)
    chosen_M, weights_M = many.draw()
    assert len(chosen_M.unique()) == DRAWS
    assert weights_M.min() == 1
    torch.manual_seed(5)
    assert torch.equal(many.draw()[0], chosen_M)
    assert not torch.equal(many.draw()[0], chosen_M)


def test_chances_of_being_drawn_add_up_and_none_is_more_than_certain():
    rates_V = torch.tensor([0.9, 0.9, 0.5, *[0.001] * 997], dtype=torch.float64)
    chances_V = draw_bounds(rates_V, 100).diff().double() / 2**32
    assert chances_V.sum().item() == pytest.approx(100)
    assert chances_V[:3].tolist() == [1, 1, 1]
    assert 0.05 < chances_V[3:].min() <= chances_V[3:].max() < 0.2


def test_many_variables_start_at_the_entropy_of_their_rates():
    torch.manual_seed(0)
    rates = tuple(torch.logspace(-5, -1, 3000).tolist())
    presence, hidden_NW = PresenceOfMany(64, 3000, rates), torch.randn(400, 64)
    present_NV = torch.rand(400, 3000) < torch.tensor(rates)
    steps_E, variables_E = present_NV.nonzero(as_tuple=True)
    batch = make_batch("events", [1])._replace(steps_E=steps_E, variables_E=variables_E)
    entropy = torch.distributions.Bernoulli(torch.tensor(rates)).entropy().sum().item()
    for found in (presence.nll(hidden_NW, batch).mean(), presence.eval().nll(hidden_NW, batch).mean()):
        assert found.item() == pytest.approx(entropy, rel=0.03)
    assert entropy / 3000 < 0.06


def test_the_weights_of_few_variables_do_not_depend_on_their_rates():
    likelihoods = []
    for rates in ((), (0.1,) * FEW_VARIABLES):
        torch.manual_seed(0)
        description = dataclasses.replace(events_of(FEW_VARIABLES), presence_rates=rates)
        likelihoods.append(EventLikelihood(description, 8))
    one, other = (likelihood.state_dict() for likelihood in likelihoods)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_from_before_there_were_rates_fit_many_variables():
    """They are those of a plain layer, and nothing is stored beside them."""
    old = nn.Linear(8, FEW_VARIABLES + 1).state_dict()
    PresenceOfMany(8, FEW_VARIABLES + 1, ()).load_state_dict(old)


def test_drawing_takes_memory_for_the_drawn_variables_and_not_for_all():
    """800 steps of 40,000 variables would be 128 MB of scores."""
    presence, hidden_NW = PresenceOfMany(8, 40_000, ()), torch.randn(800, 8, requires_grad=True)
    batch = events_at(800, 40_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        presence.train().nll(hidden_NW, batch).sum().backward()
    assert presence.out_features > DRAWN_VARIABLES
    assert max(event.cpu_memory_usage for event in profiler.events()) < 16e6


def test_a_forward_pass_leaves_no_trace_in_the_network():
    likelihood, batch = EventLikelihood(DESCRIPTIONS["events"], 8).train(), make_batch("events", [9])
    before = {name: tensor.clone() for name, tensor in (*likelihood.named_parameters(), *likelihood.named_buffers())}
    likelihood(torch.randn(1, 9, 8), batch)
    after = dict((*likelihood.named_parameters(), *likelihood.named_buffers()))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "valued_V" not in likelihood.state_dict()


def test_scores_in_slices_equal_scores_at_once(monkeypatch):
    torch.manual_seed(0)
    likelihood, hidden_NW = TokenLikelihood(40, 8), torch.randn(600, 8, requires_grad=True)
    targets_N = torch.randint(0, 41, (600,))
    whole_N = likelihood.cross_entropy(hidden_NW, targets_N)
    (whole_gradient,) = torch.autograd.grad(whole_N.square().sum(), likelihood.scores.weight)
    monkeypatch.setattr("seqvae.models.cpu_kernels.SCORES_AT_ONCE", 1)
    sliced_N = by_rows(likelihood.cross_entropy, 41, hidden_NW, targets_N)
    (sliced_gradient,) = torch.autograd.grad(sliced_N.square().sum(), likelihood.scores.weight)
    torch.testing.assert_close(sliced_N, whole_N)
    torch.testing.assert_close(sliced_gradient, whole_gradient, rtol=1e-4, atol=1e-4)


def test_the_order_of_the_events_in_a_step_changes_nothing():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(DESCRIPTIONS["events"], 16), make_batch("events", [6, 4])
    order = torch.argsort(batch.steps_E * 10 - batch.variables_E)
    shuffled = batch._replace(
        **{name: getattr(batch, name)[order] for name in ("variables_E", "values_E", "has_value_E", "steps_E")}
    )
    torch.testing.assert_close(embedding(shuffled), embedding(batch))


def test_a_value_swapped_between_two_variables_changes_the_set():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(DESCRIPTIONS["events"], 16), make_batch("events", [1])
    pair = {"variables_E": torch.tensor([0, 2]), "has_value_E": torch.tensor([True, True])}
    pair |= {"steps_E": torch.tensor([0, 0]), "values_E": torch.tensor([-1.0, 1.0])}
    batch = batch._replace(**pair)
    swapped = batch._replace(values_E=torch.tensor([1.0, -1.0]))
    assert (embedding(swapped) - embedding(batch)).abs().max() > 0.1


def test_a_value_of_zero_is_not_a_missing_value():
    torch.manual_seed(0)
    embedding, batch = EventEmbedding(DESCRIPTIONS["events"], 16), make_batch("events", [3])
    zeros_E = torch.zeros_like(batch.values_E)
    measured = embedding(batch._replace(values_E=zeros_E, has_value_E=torch.ones_like(batch.has_value_E)))
    unmeasured = embedding(batch._replace(values_E=zeros_E, has_value_E=torch.zeros_like(batch.has_value_E)))
    assert (measured - unmeasured).abs().max() > 0.1


def test_sums_by_step_equal_a_loop_and_spreading_is_their_adjoint():
    torch.manual_seed(0)
    steps_E = torch.tensor([0, 0, 1, 3, 3, 3])
    offsets = step_offsets(steps_E, 5)
    events_ER, steps_NR = torch.randn(6, 2, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    expected_NR = torch.stack([events_ER[steps_E == step].sum(dim=0) for step in range(5)])
    sums_NR, spread_ER = SumByStep.apply(events_ER, steps_E, offsets), SpreadToEvents.apply(steps_NR, steps_E, offsets)
    torch.testing.assert_close(sums_NR, expected_NR)
    assert torch.equal(spread_ER, steps_NR[steps_E])
    (gradient_ER,) = torch.autograd.grad((sums_NR * steps_NR.detach()).sum(), events_ER)
    (gradient_NR,) = torch.autograd.grad((spread_ER * events_ER.detach()).sum(), steps_NR)
    assert torch.equal(gradient_ER, steps_NR[steps_E])
    torch.testing.assert_close(gradient_NR, expected_NR)


def test_a_batch_without_events_adds_up_to_nothing():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert not SumByStep.apply(torch.zeros(0, 2), nothing, step_offsets(nothing, 3)).any()


@pytest.mark.parametrize("minutes", [1 / 60, 1.0, 60.0, 24 * 60.0, 30 * 24 * 60.0])
@pytest.mark.parametrize("unit", [1.0, 60_000.0, 1 / 525_600])
def test_time_features_distinguish_a_time_from_one_a_tenth_longer_in_any_unit(minutes, unit):
    times_2 = torch.tensor([minutes, 1.1 * minutes]) * unit
    one_F, longer_F = time_features(times_2, shortest=unit / 60)
    assert (longer_F - one_F).norm() > 0.3


def test_pretrained_vectors_distinguish_variables_on_the_scale_of_drawn_ones():
    torch.manual_seed(0)
    drawn = EventEmbedding(events_of(1000), 64)
    pretrained = EventEmbedding(events_of(1000), 64, PretrainedVectors(30 * torch.randn(1000, 300), True))
    spread = [module.table().std().item() for module in (drawn, pretrained)]
    assert spread[1] == pytest.approx(spread[0], rel=0.1)
