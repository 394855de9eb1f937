"""The progress bar: one line that keeps to its place, whatever else is written and however wide the window is."""

import io
import logging
import sys

import pytest

from seqvae.training.callbacks.progress import ProgressBar, can_show_bar, compose
from tests.support.pseudo_terminal import terminal

TEXTS = ["84/200", "0:12 left", "loss 1.25", "900 tokens/s", "epoch 2", "elbo -31.20"]


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("blocks", [True, False])
def test_the_line_never_exceeds_the_window(blocks):
    for width in range(1, 150):
        for share in (0.0, 0.337, 1.0):
            assert len(compose(share, TEXTS, width, blocks=blocks)) <= width


def test_a_narrow_window_loses_the_last_texts_first():
    assert "elbo" in compose(0.4, TEXTS, 120, blocks=True)
    narrow = compose(0.4, TEXTS, 40, blocks=True)
    assert "0:12 left" in narrow
    assert "loss" not in narrow
    assert compose(0.4, TEXTS, 5, blocks=True) == " 40%"


def test_the_bar_is_as_long_as_the_share_that_is_done():
    for tenths in range(11):
        assert compose(tenths / 10, [], 18, blocks=False).count("#") == tenths
    assert compose(0.5, [], 18, blocks=True) == " 50% ▕█████     ▏"
    assert compose(0.55, [], 18, blocks=True) == " 55% ▕█████▌    ▏"


def test_where_the_encoding_has_no_blocks_the_bar_is_ascii():
    with terminal(encoding="ascii") as window:
        bar = ProgressBar(window.stream)
        bar.show(0.5, ["1/2"])
        bar.close()
        assert window.screen[0].startswith(" 50% [###")


def test_lines_of_others_stay_whole_above_the_bar(monkeypatch):
    root = logging.getLogger()
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", window.stream)
        handler = logging.StreamHandler()
        root.addHandler(handler)
        bar = ProgressBar(window.stream)
        bar.open()
        bar.show(0.1, TEXTS)
        print("a", "line", flush=True)
        bar.show(0.2, TEXTS)
        logging.getLogger("anybody").warning("a warning")
        print("piece", end=" ")
        bar.show(0.3, TEXTS)
        print("by piece", file=sys.stderr)
        bar.show(0.4, TEXTS)
        bar.close()
        print("afterwards")
        root.removeHandler(handler)
        bar_line = compose(0.4, TEXTS, 79, blocks=True)
        assert window.screen == ["a line", "a warning", "piece by piece", bar_line, "afterwards", ""]


def test_closing_gives_the_streams_and_the_handlers_back(monkeypatch):
    root = logging.getLogger()
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", window.stream)
        handler = logging.StreamHandler()
        root.addHandler(handler)
        bar = ProgressBar(window.stream)
        bar.open()
        kept = sys.stdout
        assert kept is not window.stream
        bar.close()
        bar.close()
        root.removeHandler(handler)
        assert sys.stdout is sys.stderr is handler.stream is window.stream
        print("late", file=kept)
        del kept
        print("later")
        assert window.screen == ["late", "later", ""]


def test_what_goes_to_a_file_is_not_redirected(monkeypatch):
    log = io.TextIOWrapper(io.BytesIO())
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        monkeypatch.setattr(sys, "stderr", log)
        bar = ProgressBar(window.stream)
        bar.open()
        assert sys.stderr is log
        bar.close()


def test_the_bar_follows_the_window_when_its_width_changes():
    with terminal(columns=100) as window:
        bar = ProgressBar(window.stream)
        bar.show(0.4, TEXTS)
        window.resize(40)
        bar.show(0.4, TEXTS)
        bar.close()
        assert window.screen == [compose(0.4, TEXTS, 39, blocks=True), ""]


def test_it_is_due_five_times_a_second():
    clock, shown = Clock(), 0
    with terminal() as window:
        bar = ProgressBar(window.stream, clock)
        for millisecond in range(1000):
            clock.seconds = millisecond / 1000
            if bar.is_due():
                bar.show(0.5, TEXTS)
                shown += 1
    assert shown == 5


def test_a_bar_that_never_was_shown_leaves_nothing_behind():
    with terminal() as window:
        bar = ProgressBar(window.stream)
        bar.open()
        bar.close()
        assert window.text == ""


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm"}])
def test_a_bar_needs_a_terminal_that_can_redraw_a_line(environment):
    with terminal() as window:
        assert can_show_bar(window.stream, environment) == (environment["TERM"] == "xterm")
    assert not can_show_bar(io.TextIOWrapper(io.BytesIO()), environment)
    assert not can_show_bar(io.StringIO(), environment)
