"""`seqvae.fit`, `seqvae.load` and what they return: the commands' words and numbers, for people who write Python."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lightning import Callback

import seqvae
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.frames import path_of

ROOT = Path(__file__).parent.parent.parent
TINY: dict[str, Any] = {"width": 16, "depth": 1, "heads": 1, "latent_size": 2, "num_workers": 0, "precision": "32-true"}
TOKENS = [[(row * 7 + step) % 5 for step in range(3 + row % 6)] for row in range(120)]
IDS = [f"s{row:03d}" for row in range(120)]


@pytest.fixture
def fit(tmp_path):
    """`seqvae.fit` of a tiny model for a few steps."""

    def call(data: Any, **flags: Any) -> seqvae.Run:
        places = {"output_dir": str(tmp_path / "runs"), "cache_dir": str(tmp_path / "cache")}
        return seqvae.fit(data, **{**TINY, **places, "max_steps": 4, "run_name": "mine", **flags})

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> seqvae.Run:
    """A finished run on tokens."""
    folder = tmp_path_factory.mktemp("run")
    table = pa.table({"id": IDS, "tokens": TOKENS})
    places: dict[str, Any] = {
        "output_dir": str(folder / "runs"),
        "cache_dir": str(folder / "cache"),
        "run_name": "mine",
    }
    return seqvae.fit(table, **TINY, **places, max_steps=6, fast_detection=True)


def test_labels_that_are_a_table_are_refused_with_what_to_do(fit):
    with pytest.raises(seqvae.SeqVAEError, match=r"label_path is a DataFrame: give the path .* or merge the labels"):
        fit(TOKENS, label_path=pd.DataFrame({"id": IDS, "failed": 0}))


# --- What a run is -----------------------------------------------------------------------------------------------------


def test_a_run_tells_its_verdict_its_metrics_and_its_directory(run):
    assert run.verdict in ("warming up", "cannot tell", "collapsed", "healthy", "decoder ignores z", "partly collapsed")
    assert run.metrics["step"].max() == 6
    assert run.metrics["valid_elbo"].notna().any()
    assert run.readings["step"].max() == 6
    assert {"rate", "mutual_information", "decoder_use"} <= set(run.readings)
    assert (run.directory / "checkpoints" / "last.ckpt").exists()
    assert repr(run).startswith(f"Run({str(run.directory)!r}: {run.verdict}. ")
    assert "Finished at step 6 of 6." in repr(run)


def test_a_run_shows_its_report_in_a_notebook_without_scripts(run):
    page = run._repr_html_()
    assert page.startswith(f"<p><b>{run.verdict}</b>")
    assert "<iframe sandbox srcdoc=" in page
    assert "<script" not in page
    assert (run.directory / "report.html").exists()


def test_a_run_can_be_opened_by_its_directory(run):
    assert seqvae.Run(run.directory).verdict == run.verdict


def test_the_command_to_go_on_is_one_that_can_be_typed(fit, capsys):
    directory = fit(TOKENS, disable_metrics_monitoring=True).directory
    assert f"to go on    seqvae train --config {directory}/config.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(("plain", "schema"), [(False, OptimizedSettings), (True, ReferenceSettings)])
def test_both_recipes_can_be_chosen(fit, monkeypatch, plain, schema, tmp_path):
    seen: list[type] = []

    def train(settings: Any, callbacks: Any) -> seqvae.Run:
        seen.append(type(settings))
        return seqvae.Run(tmp_path)

    monkeypatch.setattr("seqvae.training.fit.fit", train)
    fit(TOKENS, plain=plain)
    assert seen == [schema]


def test_callbacks_of_the_caller_are_called(fit):
    class Count(Callback):
        steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

    count = Count()
    fit(TOKENS, callbacks=[count], gradient_accumulation_steps=1, disable_metrics_monitoring=True)
    assert count.steps == 4


# --- Data in memory ----------------------------------------------------------------------------------------------------


class OnlyArrow:
    """A table of some other library, like a DataFrame of polars: all that is known of it is the Arrow interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


TABLE = pa.table({"id": IDS, "tokens": TOKENS})
VECTORS = [[[float(step), float(row % 3)] for step in range(3 + row % 4)] for row in range(120)]
EVENTS = pd.DataFrame(
    [
        {"patient": row, "hour": hour, "name": name, "value": float(hour)}
        for row in range(120)
        for hour in range(3)
        for name in ("heat", "pulse")
    ]
)
IN_MEMORY = {
    "pandas": (TABLE.to_pandas(), {}, "tokens"),
    "pyarrow": (TABLE, {}, "tokens"),
    "other library": (OnlyArrow(TABLE), {}, "tokens"),
    "string views": (pa.table({"id": pa.array(IDS, pa.string_view()), "tokens": TOKENS}), {}, "tokens"),
    "lists of ints": (TOKENS, {}, "tokens"),
    "arrays of ints": ([np.array(row) for row in TOKENS], {}, "tokens"),
    "lists of lists of floats": (VECTORS, {}, "vectors"),
    "matrices": ([np.array(row) for row in VECTORS], {}, "vectors"),
    "strings": (["abc" * (1 + row % 3) for row in range(120)], {"tokenizer": "characters"}, "tokens"),
    "events in rows": (
        EVENTS,
        {"id_column": "patient", "time_column": "hour", "variable_column": "name", "value_column": "value"},
        "events",
    ),
}


@pytest.mark.parametrize("kind_of_data", IN_MEMORY)
def test_data_in_memory_are_trained_on(fit, kind_of_data):
    data, flags, kind = IN_MEMORY[kind_of_data]
    trained = fit(data, **flags, disable_metrics_monitoring=True)
    assert trained.model.description.kind == kind
    assert trained.verdict == "not watched"


def test_data_in_memory_train_as_the_same_data_in_a_file(fit, tmp_path):
    pq.write_table(TABLE, tmp_path / "data.parquet")
    flags = {"max_steps": 3, "log_every_n_steps": 1, "disable_metrics_monitoring": True}
    runs = [fit(data, run_name=name, **flags) for name, data in (("a", TABLE), ("b", str(tmp_path / "data.parquet")))]
    one, other = (run.metrics.drop(columns=["seconds"]).filter(regex="^(?!.*per_second)") for run in runs)
    pd.testing.assert_frame_equal(one[["step", "valid_elbo"]], other[["step", "valid_elbo"]])


def test_the_same_content_is_the_same_file_and_is_not_written_again(tmp_path):
    first = path_of(TABLE, str(tmp_path))
    before = Path(first).stat().st_mtime_ns
    assert path_of(OnlyArrow(TABLE), str(tmp_path)) == first
    assert Path(first).stat().st_mtime_ns == before
    assert path_of(TABLE.slice(1), str(tmp_path)) != first
    assert len(list((tmp_path / "frames").iterdir())) == 2


def test_an_index_with_a_name_is_a_column_and_one_without_is_not(tmp_path):
    frame = TABLE.to_pandas()
    assert pq.read_schema(path_of(frame.set_index("id"), str(tmp_path))).names == ["tokens", "id"]
    assert pq.read_schema(path_of(frame[frame["id"] > "s010"], str(tmp_path))).names == ["id", "tokens"]


def test_a_run_on_data_in_memory_goes_on_where_it_stopped(fit, capsys):
    first = fit(TOKENS, disable_metrics_monitoring=True)
    assert fit(TOKENS, disable_metrics_monitoring=True).directory == first.directory
    assert "nothing left to do" in capsys.readouterr().out
    unwatched = fit(TOKENS, disable_metrics_monitoring=True, max_steps=6)
    assert unwatched.metrics["step"].max() == 6
    assert unwatched.readings.empty


# --- Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_szie": 4}, "batch_szie is no setting; did you mean batch_size?"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"batch_size": 2.5}, "batch_size wants a whole number, got '2.5'"),
        ({"fast_detection": "ture"}, "fast_detection wants true or false, got 'ture'"),
        ({"max_sequence_length": None}, "max_sequence_length wants a whole number, got null"),
        ({"decoder": "tnc"}, "decoder wants transformer, lstm, tcn or parallel, got 'tnc'; did you mean tcn?"),
        ({"window_stride": 3}, "window_stride needs long_sequences split"),
        ({"preset": "debgu"}, "got 'debgu'; did you mean debug?"),
        ({"data_dir": "x"}, "data and data_dir are the same: give one of them"),
        ({"version": True}, "version is no setting"),
    ],
)
def test_wrong_flags_are_named_as_they_were_given(fit, flags, message):
    with pytest.raises(seqvae.UsageError) as caught:
        fit(TOKENS, **flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the data hold no rows"),
        ([1, 2], "Wanted: a path, a DataFrame, a pyarrow Table, or a list of sequences"),
        ([["a"], ["b"]], "cannot be read as a table"),
        ([[1], ["b"]], "cannot be read as a table"),
        (object(), "data of type object cannot be read as a table"),
        (["abc", "d"], "--tokenizer"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_words(fit, data, message):
    with pytest.raises(seqvae.DataError) as caught:
        fit(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there_is_an_error_of_data(fit, tmp_path):
    with pytest.raises(seqvae.DataError):
        fit(tmp_path / "nowhere")


def test_every_error_has_one_base_and_the_exit_code_of_its_command():
    errors = [seqvae.UsageError, seqvae.SettingsError, seqvae.DataError, seqvae.DivergedError, seqvae.StorageError]
    assert [error.exit_code for error in [*errors, seqvae.CollapsedError]] == [2, 2, 3, 4, 6, 7]
    assert all(issubclass(error, seqvae.SeqVAEError) for error in errors)


def test_a_run_that_stops_because_it_collapsed_is_an_exception_and_no_exit(fit, monkeypatch):
    from seqvae.monitors import PosteriorCollapsed, Verdict

    def collapse(*_: Any) -> None:
        raise PosteriorCollapsed(Verdict("collapsed", 120, "the rate is 0", ("--free_bits 0.25 (why)",)))

    monkeypatch.setattr("seqvae.training.fit.fit", collapse)
    with pytest.raises(seqvae.CollapsedError, match=r"step 120: collapsed: the rate is 0\. Try --free_bits 0\.25"):
        fit(TOKENS)


# --- Signals, threads, output ------------------------------------------------------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_no_signal_handler_is_left_behind(fit):
    before = handlers()
    fit(TOKENS, disable_metrics_monitoring=True)
    assert handlers() == before


class Interrupt(Callback):
    """Ctrl-C after the second step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_and_raises_keyboard_interrupt(fit, tmp_path):
    before = handlers()
    with pytest.raises(KeyboardInterrupt, match="after step 2, which is saved"):
        fit(TOKENS, callbacks=[Interrupt()], disable_metrics_monitoring=True, gradient_accumulation_steps=1)
    assert handlers() == before
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "last.ckpt").exists()
    resumed = fit(TOKENS, disable_metrics_monitoring=True, gradient_accumulation_steps=1)
    assert resumed.metrics["step"].max() == 4


def test_training_runs_in_a_thread_that_is_not_the_main_one(fit):
    found: list[Any] = []

    def train() -> None:
        try:
            found.append(fit(TOKENS, fast_detection=True).verdict)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert isinstance(found[0], str), found


# --- Models ------------------------------------------------------------------------------------------------------------


def test_a_model_reads_data_in_memory_as_it_reads_its_own(run):
    own = run.model.encode(split="train").sort_values("id", ignore_index=True)
    frame = TABLE.to_pandas()
    again = run.model.encode(frame[frame["id"].isin(own["id"])]).sort_values("id", ignore_index=True)
    assert again["id"].tolist() == own["id"].tolist()
    np.testing.assert_allclose(np.stack(again["mean"]), np.stack(own["mean"]), atol=1e-5)


def test_a_model_reconstructs_samples_interpolates_and_is_evaluated(run):
    model = run.model
    assert len(model.reconstruct(TABLE.slice(0, 5))) == 5
    assert len(model.sample(7, seed=1)) == 7
    assert model.interpolate(IDS[0], IDS[1], TABLE, steps=3)["share"].unique().tolist() == [0, 0.5, 1]
    record = model.evaluate(TABLE.slice(0, 30), iw_sequences=0)
    assert record["sequences"] == 30
    assert {"NLL", "rate", "ELBO"} <= {row["name"] for row in record["rows"]}


def test_the_ids_of_the_latents_name_the_ends_of_a_path(fit):
    model = fit(TOKENS, disable_metrics_monitoring=True).model
    first, last = model.encode()["id"][:2]
    assert model.interpolate(first, last, steps=3)["share"].unique().tolist() == [0, 0.5, 1]


def test_a_model_imputes_what_is_missing_in_a_frame(fit):
    frame = pd.DataFrame({"id": np.repeat(np.arange(60), 4), "time": np.tile(np.arange(4.0), 60)})
    frame["a"], frame["b"] = np.sin(frame["time"]), frame["id"] % 3 + 0.5
    frame.loc[::5, "a"] = np.nan
    flags = {"id_column": "id", "time_column": "time", "feature_columns": "a,b", "bad_values": "missing"}
    model = fit(frame, **flags, disable_metrics_monitoring=True).model
    assert model.impute(frame)["a"].notna().all()


def test_a_saved_model_is_the_same_model(run, tmp_path):
    run.model.save(tmp_path / "saved")
    again = seqvae.load(tmp_path / "saved")
    assert isinstance(again, seqvae.Model)
    pd.testing.assert_frame_equal(again.encode(TABLE), run.model.encode(TABLE))


def test_what_is_no_model_is_refused_in_words(tmp_path):
    with pytest.raises(seqvae.UsageError, match="it holds no checkpoint"):
        seqvae.load(tmp_path)


# --- Names -------------------------------------------------------------------------------------------------------------


def test_all_names_are_there_and_can_be_completed():
    assert {"fit", "load", "Run", "Model", "SequenceDataModule", "SequenceVAE", "PosteriorMetricsMonitor"} < set(
        dir(seqvae)
    )
    assert all(getattr(seqvae, name) is not None for name in seqvae.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = seqvae.fitt


def test_the_monitors_can_be_completed_before_any_is_used():
    code = "import seqvae.monitors as m; print(set(m.__all__) <= set(dir(m)))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_flags_of_fit_can_be_completed_with_their_defaults():
    parameters = inspect.signature(seqvae.fit).parameters
    assert list(parameters)[:3] == ["data", "plain", "callbacks"]
    assert {"preset", "config"} | to_flat_dict(OptimizedSettings()).keys() < parameters.keys()
    assert parameters["gradient_accumulation_steps"].default == 2


def test_a_network_describes_itself_in_a_few_lines(run):
    lines = repr(run.model.network).splitlines()
    assert len(lines) <= 4
    assert max(map(len, lines)) <= 120
    assert lines[0] == "SequenceVAE of tokens: transformer encoder, transformer decoder, width 16, depth 1"
    assert "2 latent dimensions for each sequence" in lines[1]
    assert len(repr(run.model).splitlines()) == 1


@pytest.mark.parametrize("name", ["fit", "load", "Run", "SeqVAEError"])
def test_a_name_imports_nothing_heavy_until_it_is_used(name):
    code = f"import sys, seqvae; seqvae.{name}; print([one for one in ('torch', 'lightning', 'pandas') if one in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
