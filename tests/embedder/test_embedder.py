"""`SequenceEmbedder` as scikit-learn's tools use it, on every form of sequences."""

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import seqvae

TINY: dict[str, Any] = {
    "width": 8,
    "depth": 1,
    "heads": 1,
    "num_workers": 0,
    "precision": "32-true",
    "disable_metrics_monitoring": True,
}
GENERATOR = np.random.default_rng(0)
FLOATS = [GENERATOR.normal(size=3 + row % 4).tolist() for row in range(24)]


def embedder(**settings: Any) -> seqvae.SequenceEmbedder:
    own: dict[str, Any] = {"max_steps": 2, "random_state": 0, "flags": TINY}
    return seqvae.SequenceEmbedder(3, **own | settings)


@pytest.fixture(scope="module")
def fitted() -> seqvae.SequenceEmbedder:
    return embedder().fit(FLOATS)


@pytest.mark.slow
@parametrize_with_checks([embedder()])
def test_it_passes_the_checks_of_scikit_learn_on_tables_of_numbers(estimator, check):
    """All of them: none had to be expected to fail. Sequences of different lengths are beyond them, and tested below."""
    check(estimator)


SEQUENCES: dict[str, tuple[Any, str]] = {
    "lists of floats": (FLOATS, "vectors"),
    "arrays of ints": ([np.arange(2 + row % 3) for row in range(12)], "tokens"),
    "lists of vectors": ([[[1.0, float(step)] for step in range(2 + row % 3)] for row in range(12)], "vectors"),
    "texts": (["abc"[: 1 + row % 3] for row in range(12)], "tokens"),
    "a series": (pd.Series(FLOATS, index=range(5, 29)), "vectors"),
    "a column of sequences": (pd.DataFrame({"signal": FLOATS}), "vectors"),
    "an array of series": (GENERATOR.normal(size=(12, 4)), "vectors"),
    "an array of whole numbers": (GENERATOR.integers(-5, 5, size=(12, 4)), "vectors"),
    "an array of steps": (GENERATOR.normal(size=(12, 4, 2)), "vectors"),
    "columns of numbers": (pd.DataFrame(GENERATOR.normal(size=(12, 4)), columns=list("abcd")), "vectors"),
}


@pytest.mark.parametrize("form", SEQUENCES)
def test_every_form_of_sequences_is_embedded_a_row_for_each(form):
    X, kind = SEQUENCES[form]
    own = embedder(tokenizer="characters" if form == "texts" else None)
    latents = own.fit_transform(X)
    assert (latents.shape, latents.dtype) == ((len(X), 3), np.float32)
    assert own.model_.description.kind == kind
    assert own.n_sequences_ == len(X)
    if form == "an array of steps":
        assert len(own.model_.description.names) == 2


def test_rows_keep_their_order(fitted):
    latents = fitted.transform(FLOATS)
    np.testing.assert_allclose(fitted.transform(FLOATS[::-1])[::-1], latents, atol=1e-6)
    np.testing.assert_allclose(fitted.transform(FLOATS[3:4]), latents[3:4], atol=1e-6)


def test_the_embedding_is_that_of_the_model(fitted):
    means = np.stack(fitted.model_.encode(FLOATS)["mean"].to_list())
    np.testing.assert_array_equal(fitted.transform(FLOATS), means.astype(np.float32))


def test_the_same_random_state_gives_the_same_and_another_one_another(fitted):
    latents = fitted.transform(FLOATS)
    np.testing.assert_array_equal(clone(fitted).fit(FLOATS).transform(FLOATS), latents)
    assert not np.array_equal(embedder(random_state=1).fit(FLOATS).transform(FLOATS), latents)


def test_a_pickle_embeds_alike_without_any_file(fitted):
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.transform(FLOATS), fitted.transform(FLOATS))


def test_it_is_a_step_of_a_pipeline_and_its_settings_can_be_searched():
    pipeline = make_pipeline(embedder(), LogisticRegression())
    pipeline.set_params(sequenceembedder__n_latent=2)
    labels = [row % 2 for row in range(24)]
    assert pipeline.fit(FLOATS, labels).predict(FLOATS).shape == (24,)
    assert pipeline[0].transform(FLOATS).shape == (24, 2)
    assert list(pipeline[0].get_feature_names_out()) == ["sequenceembedder0", "sequenceembedder1"]
    assert clone(pipeline).get_params()["sequenceembedder__n_latent"] == 2


def test_the_run_is_kept_where_that_is_asked_for(tmp_path, capsys):
    own = embedder(output_dir=tmp_path, flags={**TINY, "run_name": "mine"}).fit(FLOATS)
    assert (tmp_path / "mine" / "metrics.csv").exists()
    assert own.verdict_ == "not watched"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("X", "settings", "said"),
    [
        ([], {}, "0 sample"),
        ([[1.0, 2.0]], {}, "1 sample"),
        (FLOATS, {"flags": {"latent_scope": "step"}}, "no embedding of a whole sequence"),
        (FLOATS, {"validation_fraction": 1.0}, "must lie between 0 and 1"),
        ([[1.0, float("nan")], [2.0], [1.0]], {}, "NaN"),
        (["ab", "c"], {}, "--tokenizer"),
        (np.zeros((3, 2, 2, 2)), {}, "4 dimensions"),
    ],
)
def test_what_cannot_be_embedded_is_refused(X, settings, said):
    with pytest.raises(ValueError, match=said):
        embedder(**settings).fit(X)


def test_it_has_to_be_fitted_and_tables_keep_their_width():
    with pytest.raises(NotFittedError):
        embedder().transform(FLOATS)
    own = embedder().fit(np.zeros((8, 3)) + np.arange(8)[:, None])
    with pytest.raises(ValueError, match="X has 2 features, but SequenceEmbedder is expecting 3"):
        own.transform(np.zeros((4, 2)))
    assert own.transform([[1.0, 2.0], [3.0]]).shape == (2, 3)
