"""A study: runs with different settings, one after the other or side by side on Ray, towards what is best in two respects.

In: the settings of `seqvae tune`. Out: a directory with a run for each trial, `study.db` (Optuna's own records, in SQLite, which a
command that was stopped goes on from), `study.json` and `index.html`, the page. Each trial is a process that does what
`seqvae train` does, then one that does what `seqvae evaluate` does: a trial that runs out of memory ends alone, and its directory
is that of any run.
"""

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from seqvae.clusters import refuse_without_ray, run_on_ray
from seqvae.config.tuning import Range, Space, StudySettings
from seqvae.config.yaml_files import to_flat_dict, to_yaml
from seqvae.errors import DataError, ExitCode, Stopped, StorageError, UsageError, harmless
from seqvae.files import AlreadyLocked, replace_file, take_lock
from seqvae.reports.read_run import read_run
from seqvae.reports.story import end_of, story_of
from seqvae.reports.study_page import COLLAPSED, FAILED, FINISHED, UNFINISHED, Study, TrialRow, write_study
from seqvae.text import brief, duration

if TYPE_CHECKING:
    import optuna

DATABASE, SETTINGS, OBJECTIVES = "study.db", "settings.yaml", "objectives.json"
COLLAPSED_CONSTRAINT = "collapsed"
"""Optuna's name for what a trial on the front must not be; above 0 it is."""
PR_SET_PDEATHSIG = 1


class Order(NamedTuple):
    """A trial, as the process that runs it gets it."""

    number: int
    values: dict[str, str]
    """What was chosen, by setting."""
    directory: Path
    """Of its run."""
    train: list[str]
    """Words behind `seqvae train`."""
    evaluate: list[str]
    """Words behind `seqvae evaluate`, but for the checkpoint."""


class Outcome(NamedTuple):
    """How a trial ended."""

    order: Order
    exit_code: int
    seconds: float
    said: str = ""
    """The last line of what it said, where it failed."""


def tune(settings: StudySettings, tell: Callable[[str], None] = print) -> Path:
    """Run the trials that are missing, and return the directory of the study. `tell` gets a line for each trial that ended."""
    space = settings.space
    if find_spec("optuna") is None:
        raise UsageError("seqvae tune needs the extra 'tune': pip install -e '.[tune]'")
    if settings.tuning.probe is not None and find_spec("sklearn") is None:
        raise UsageError("--probe needs the extra 'eval': pip install -e '.[eval]'")
    if settings.run.run_name is None:
        raise UsageError("a study needs a name, which it goes on by: give it --run_name")
    if settings.run.resume != "auto":
        raise UsageError("--resume is for one run; a study goes on with the same --run_name")
    if settings.compute.launcher == "ray":
        refuse_without_ray("--launcher ray")
    directory = Path(settings.run.output_dir).expanduser().absolute() / settings.run.run_name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = take_lock(directory / ".study.lock")
    except AlreadyLocked as error:
        raise UsageError(f"{directory}: another command works on this study (process {error.holder})") from error
    except OSError as error:
        raise StorageError(
            f"{directory}: cannot be written ({error.strerror}). Choose another --output_dir."
        ) from error
    with lock:
        _run_trials(_Study(directory, settings, space), settings, tell)
    return directory


def _run_trials(study: "_Study", settings: StudySettings, tell: Callable[[str], None]) -> None:
    """Run trials until the study has as many as it should."""
    study.write()
    try:
        if settings.compute.launcher == "ray":
            at_once, use_gpus = settings.compute.ray_bounds[1], settings.compute.accelerator in ("auto", "gpu")
            outcomes: Iterable[Outcome] = run_on_ray(
                run_trial, study.orders(), at_once=at_once, in_order=False, use_gpus=use_gpus
            )
        else:
            outcomes = map(run_trial, study.orders())
        for outcome in outcomes:
            if (stop := _stop_by(outcome, is_first=not study.has_results)) is not None:
                raise stop
            tell(harmless(study.record(outcome)))
            study.write()
    finally:
        study.write()


def _stop_by(outcome: Outcome, *, is_first: bool) -> BaseException | None:
    """Return what the study ends with, where a trial ended by no fault of what was chosen for it; it is tried again later."""
    where = f"{outcome.order.directory.name}: {outcome.said}"
    if outcome.exit_code == ExitCode.USAGE and is_first:  # else a choice was refused that others need not share
        return UsageError(where)
    if outcome.exit_code == ExitCode.DATA:
        return DataError(where)
    if outcome.exit_code == ExitCode.STORAGE:
        return StorageError(where)
    if outcome.exit_code - 128 in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        return Stopped(
            outcome.exit_code - 128, f" in {outcome.order.directory.name}. The same command goes on with it."
        )
    return None


# --- The study ------------------------------------------------------------------------------------------------------------


class _Study:
    """Optuna's study in a directory, and the files that are made of it."""

    def __init__(self, directory: Path, settings: StudySettings, space: Space) -> None:
        import optuna

        self._directory, self._settings, self._space = directory, settings, space
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        common = settings.of_trials()
        self._objectives = ("ELBO", "mutual information")
        if settings.tuning.probe is not None:
            self._objectives = ("ELBO", f"probe of {settings.tuning.probe}")
        storage = optuna.storages.RDBStorage(f"sqlite:///{directory / DATABASE}")
        known = {one.study_name for one in optuna.get_all_study_summaries(storage)}
        name = directory.name
        of_before = len(optuna.load_study(study_name=name, storage=storage).trials) if name in known else 0
        # Another seed for each command: the sampler's state is not kept, and would choose again what it chose before.
        sampler = optuna.samplers.TPESampler(seed=(settings.run.seed + of_before) % 2**32)
        self._study = optuna.create_study(
            study_name=name, storage=storage, sampler=sampler, directions=["maximize"] * 2, load_if_exists=True
        )
        about = {"objectives": list(self._objectives), "space": _space_as_json(space), "common": _facts(common)}
        if name in known:
            self._refuse_other(about)
        else:
            for key, value in about.items():
                self._study.set_user_attr(key, value)
            typed = to_flat_dict(common)
            first = {key: value for key, value in typed.items() if key in space and _is_within(value, space[key])}
            self._study.enqueue_trial({key: _as_optuna(value, space[key]) for key, value in first.items()})
        run = common.run
        with replace_file(directory / SETTINGS) as partial_file:
            partial_file.write_text(to_yaml(common), encoding="utf-8")
        allow = ["--allow_remote"] if settings.source.allow_remote else []
        self._train = [
            "--config",
            str(directory / SETTINGS),
            "--output_dir",
            str(directory),
            "--seed",
            str(run.seed),
            *allow,
        ]
        probe = settings.tuning.probe
        labels = ["--label_path", settings.source.label_path] if probe and settings.source.label_path else []
        self._evaluate = [
            "--split",
            "valid",
            "--iw_sequences",
            "0",
            *(["--probe", probe] if probe else []),
            *labels,
            *allow,
        ]

    def _refuse_other(self, about: Mapping[str, Any]) -> None:
        """Refuse to go on with other data, settings or objectives: values of different trials would not be comparable."""
        attributes = self._study.user_attrs
        if attributes["objectives"] != about["objectives"]:
            raise UsageError(
                f"{self._directory}: this study is about {' and '.join(attributes['objectives'])}. Choose another --run_name"
            )
        before, now = attributes["common"], about["common"]
        differing = [f"--{key}" for key in now if before.get(key) != now[key] and key not in self._space]
        if differing:
            raise UsageError(
                f"{self._directory}: its trials had another {', '.join(differing)}, and could not be compared with new ones. "
                "Give the same, or choose another --run_name"
            )
        if attributes["space"].keys() != about["space"].keys():
            raise UsageError(
                f"{self._directory}: its trials chose {', '.join(attributes['space'])}. Give the same --space (ranges may differ), "
                "or choose another --run_name"
            )
        self._study.set_user_attr("space", about["space"])

    @property
    def has_results(self) -> bool:
        """Whether a trial came to something."""
        return any(one.values for one in self._study.get_trials(deepcopy=False))

    def orders(self) -> Iterator[Order]:
        """Yield the trials that a command before left unfinished, then new ones, until there are as many as there should be."""
        from optuna.trial import TrialState

        before = self._study.get_trials(deepcopy=False)
        for frozen in before:
            if frozen.state == TrialState.RUNNING:
                yield self._order(frozen.number, frozen.params)
        while len(self._started()) < self._settings.tuning.trials:
            trial = self._study.ask({name: _distribution(values) for name, values in self._space.items()})
            yield self._order(trial.number, trial.params)

    def _started(self) -> list["optuna.trial.FrozenTrial"]:
        from optuna.trial import TrialState

        return [one for one in self._study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def _order(self, number: int, params: Mapping[str, Any]) -> Order:
        values = {name: _as_typed(value) for name, value in params.items()}
        directory = self._directory / f"trial-{number:03d}"
        chosen = [word for name, value in values.items() for word in (f"--{name}", value)]
        return Order(number, values, directory, [*self._train, "--run_name", directory.name, *chosen], self._evaluate)

    def record(self, outcome: Outcome) -> str:
        """Keep how a trial ended, and return it as a line."""
        import optuna
        from optuna.trial import TrialState

        number, objectives = outcome.order.number, _read_objectives(outcome)
        trial = optuna.trial.Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        story = story_of(read_run(outcome.order.directory), time.time())
        is_collapsed = outcome.exit_code == ExitCode.COLLAPSED
        state = FAILED if objectives is None else COLLAPSED if is_collapsed else FINISHED
        for key, value in {
            "state": state,
            "verdict": story.verdict,
            "seconds": outcome.seconds,
            "exit_code": outcome.exit_code,
            "said": outcome.said,
        }.items():
            trial.set_user_attr(key, value)
        if objectives is None:
            self._study.tell(number, state=TrialState.FAIL)
        else:
            # Optuna prunes no trial with two objectives: one that collapsed counts as what must not be, and is kept off the front.
            trial.set_constraint(COLLAPSED_CONSTRAINT, 1.0 if is_collapsed else 0.0)
            self._study.tell(number, objectives)
        chosen = ", ".join(f"{name} {value}" for name, value in outcome.order.values.items())
        came_to = outcome.said
        if objectives is not None:
            came_to = ", ".join(f"{name} {brief(one)}" for name, one in zip(self._objectives, objectives, strict=True))
        total = self._settings.tuning.trials
        return f"{outcome.order.directory.name} of {total} ({chosen}): {came_to}. {story.verdict}, {duration(outcome.seconds)}"

    def write(self) -> None:
        """Write what the study came to so far, and its page."""
        from optuna.trial import TrialState

        front = {one.number for one in self._study.best_trials}
        rows = [
            TrialRow(
                name=f"trial-{one.number:03d}",
                state=one.user_attrs.get("state", UNFINISHED if one.state == TrialState.RUNNING else FAILED),
                verdict=one.user_attrs.get("verdict", ""),
                values={name: _as_typed(value) for name, value in one.params.items()},
                objectives=tuple(one.values) if one.values else (),
                is_on_front=one.number in front,
                seconds=one.user_attrs.get("seconds"),
                said=one.user_attrs.get("said", ""),
            )
            for one in self._started()
        ]
        write_study(
            self._directory,
            Study(
                name=self._directory.name,
                objectives=self._objectives,
                space=self._study.user_attrs["space"],
                trials=tuple(rows),
                of_trials=max(self._settings.tuning.trials, len(rows)),
                common=self._study.user_attrs["common"],
            ),
        )


def _space_as_json(space: Space) -> dict[str, Any]:
    return {name: values._asdict() for name, values in space.items()}


def _facts(common: Any) -> dict[str, Any]:
    """Return the settings that all trials share, without those that say only where they lie or how they are shown."""
    own = ("run_name", "output_dir", "log_every_n_steps", "logger", "log_dir", "cache_dir", "num_workers")
    return {name: value for name, value in to_flat_dict(common).items() if name not in own}


def _distribution(values: Any) -> "optuna.distributions.BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(list(values.values))
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.is_logarithmic)
    return FloatDistribution(values.low, values.high, log=values.is_logarithmic)


def _is_within(value: object, values: Any) -> bool:
    if isinstance(values, Range):
        return isinstance(value, int | float) and not isinstance(value, bool) and values.low <= value <= values.high
    return _as_optuna(value, values) in values.values


def _as_optuna(value: Any, values: Any) -> Any:
    """Return a setting as Optuna knows it: numbers of a range, words of a choice."""
    return value if isinstance(values, Range) else _as_typed(value)


def _as_typed(value: Any) -> str:
    """Return a value as on a command line, of a float the digits that tell it from its neighbours by a millionth.

    >>> _as_typed(0.00123456789), _as_typed(8), _as_typed(True), _as_typed("lstm")
    ('0.00123457', '8', 'true', 'lstm')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _read_objectives(outcome: Outcome) -> tuple[float, float] | None:
    """Return what a trial came to; None where it came to nothing."""
    if outcome.exit_code not in (ExitCode.DONE, ExitCode.COLLAPSED):
        return None
    record = json.loads((outcome.order.directory / OBJECTIVES).read_text(encoding="utf-8"))
    rows = {row["name"]: row["value"] for row in record["rows"]}
    elbo, second = rows["ELBO"], rows["mutual information"]
    if "probe" in record:
        (latents,) = (row for row in record["probe"]["rows"] if row["features"] == "latents")
        second = latents["score"][0]
    return (elbo, second) if elbo is not None and second is not None else None  # what is no number is null in the file


# --- A trial --------------------------------------------------------------------------------------------------------------


def run_trial(order: Order) -> Outcome:
    """Train and evaluate as two processes one after the other; what they print goes to a log beside the run's directory."""
    begin = time.monotonic()
    with order.directory.with_suffix(".log").open("a", encoding="utf-8") as log:
        call = partial(_call, log=log)
        end = end_of(read_run(order.directory).events)
        # The monitor stopped it before this command began: to train on would take the verdict back.
        was_stopped = end is not None and end["event"] == "stopped"
        code, said = (int(ExitCode.COLLAPSED), "") if was_stopped else call(["train", *order.train])
        if code in (ExitCode.DONE, ExitCode.COLLAPSED):
            checkpoint = order.directory / "checkpoints" / "last.ckpt" if code else order.directory
            words = ["evaluate", str(checkpoint), *order.evaluate, "--json", str(order.directory / OBJECTIVES)]
            code_of_evaluation, said_of_it = call(words)
            if code_of_evaluation:
                code, said = code_of_evaluation, said_of_it
    return Outcome(order, code, time.monotonic() - begin, said if code else "")


def _call(words: list[str], log: TextIO) -> tuple[int, str]:
    """Run a command and return its exit code and its last line on stderr; a signal to this process ends both."""
    # In a session of its own, a Ctrl-C of the terminal reaches it once: as what this process sends.
    with subprocess.Popen(
        [sys.executable, "-m", "seqvae", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    ) as process:
        said = ""
        try:
            assert process.stderr is not None
            for line in process.stderr:
                log.write(line)
                said = line.strip() or said
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return (128 - code if code < 0 else code), said


def _end_with_parent() -> None:
    """Let the system end this process when its parent is gone, as it does where Ray kills one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
