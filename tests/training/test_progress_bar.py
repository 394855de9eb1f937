"""The progress bar: one line that keeps to its place, whatever else is written and however wide the window is."""

import io
import logging
import sys

import pytest
from rich.console import Console

from seqvae.training.callbacks.progress import Progress, ProgressBar, bar_line, can_show_bar
from tests.support.pseudo_terminal import terminal
from tests.support.scripted_training import Clock, Scripted, fake_trainer

TEXTS = ["84/200", "0:12 left", "loss 1.25", "900 tokens/s", "epoch 2", "elbo -31.20"]


def line(share: float, texts: list[str], width: int, *, encoding: str = "utf-8") -> str:
    """Return the line as it stands in a window that is one column wider."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width + 1, color_system=None, force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(bar_line(console, share, texts), end="", soft_wrap=True)
    return capture.get()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_line_never_exceeds_the_window(encoding):
    for width in range(1, 150):
        for share in (0.0, 0.337, 1.0):
            assert len(line(share, TEXTS, width, encoding=encoding)) <= width


def test_a_narrow_window_loses_the_last_texts_first():
    assert "elbo" in line(0.4, TEXTS, 120)
    narrow = line(0.4, TEXTS, 40)
    assert "0:12 left" in narrow
    assert "loss" not in narrow
    assert line(0.4, TEXTS, 5) == " 40%"


def test_the_bar_is_as_long_as_the_share_that_is_done():
    for tenths in range(11):
        assert line(tenths / 10, [], 16, encoding="ascii").count("-") == tenths
    assert line(0.5, [], 16).rstrip() == " 50% ━━━━━"
    assert line(0.55, [], 16).rstrip() == " 55% ━━━━━╸"


def test_where_the_encoding_has_no_lines_the_bar_is_ascii():
    with terminal(encoding="ascii") as window:
        bar = ProgressBar(window.stream)
        bar.show(0.5, ["1/2"])
        bar.close()
        assert window.screen[0].startswith(" 50% ---")


def test_lines_of_others_stay_whole_above_the_bar(monkeypatch):
    root = logging.getLogger()
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", window.stream)
        handler = logging.StreamHandler()
        root.addHandler(handler)
        bar = ProgressBar(window.stream)
        bar.show(0.1, TEXTS)
        print("a", "line", flush=True)
        bar.show(0.2, TEXTS)
        logging.getLogger("anybody").warning("a warning")
        print("piece", end=" ")
        bar.show(0.3, TEXTS)
        print("by piece")
        print("an error", file=sys.stderr)
        bar.show(0.4, TEXTS)
        bar.close()
        print("afterwards")
        root.removeHandler(handler)
        *lines, bar_line, afterwards, end = window.screen
    assert lines == ["a line", "a warning", "piece by piece", "an error"]
    assert bar_line.startswith(" 40% ━")
    assert (afterwards, end) == ("afterwards", "")


def test_closing_gives_the_streams_and_the_handlers_back(monkeypatch):
    root = logging.getLogger()
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", window.stream)
        handler = logging.StreamHandler()
        root.addHandler(handler)
        bar = ProgressBar(window.stream)
        bar.show(0.5, [])
        kept = sys.stdout
        assert kept is not window.stream
        bar.close()
        bar.close()
        root.removeHandler(handler)
        assert sys.stdout is sys.stderr is handler.stream is window.stream
        print("late", file=kept)
        del kept
        print("later")
        *_, late, later, end = window.screen
    assert (late, later, end) == ("late", "later", "")


def test_what_goes_to_a_file_is_not_redirected(monkeypatch):
    log = io.TextIOWrapper(io.BytesIO())
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", log)
        bar = ProgressBar(window.stream)
        bar.show(0.5, [])
        assert sys.stderr is log
        bar.close()


def test_the_bar_follows_the_window_when_its_width_changes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(columns=100) as window:
        bar = ProgressBar(window.stream)
        bar.show(0.4, TEXTS)
        window.resize(40)
        bar.show(0.4, TEXTS)
        bar.close()
        bar_line, end = window.screen
    assert bar_line.rstrip() == line(0.4, TEXTS, 39).rstrip()
    assert end == ""


def test_it_is_drawn_five_times_a_second(tmp_path, monkeypatch):
    clock, shown = Clock(), list[float]()
    progress = Progress(tmp_path / "m.csv", every_n_steps=99, total_steps=9, unit="token", now=clock)
    clock.seconds = -1
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setenv("TERM", "xterm")
        progress.on_train_start(fake_trainer(), Scripted())
        monkeypatch.setattr(ProgressBar, "show", lambda bar, share, texts: shown.append(share))
        for millisecond in range(1000):
            clock.seconds = millisecond / 1000
            progress.on_validation_batch_end(fake_trainer(), Scripted(), None, None, 0)
        progress.on_exception()
    assert len(shown) == 5


def test_a_bar_that_never_was_shown_leaves_nothing_behind():
    with terminal() as window:
        bar = ProgressBar(window.stream)
        bar.close()
        assert window.text == ""


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_a_bar_needs_a_terminal_that_can_redraw_a_line(kind, monkeypatch):
    monkeypatch.setenv("TERM", kind)
    with terminal() as window:
        assert can_show_bar(window.stream) == (kind == "xterm")
    assert not can_show_bar(io.TextIOWrapper(io.BytesIO()))
    assert not can_show_bar(io.StringIO())
