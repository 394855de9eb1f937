"""A terminal to print on, and what a person would then see on it."""

import io
import os
import re
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STYLE_OR_CURSOR = re.compile(r"\x1b\[(?:[\d;]*m|\?25[hl])")


class Terminal:
    """A terminal that understands as much as a progress bar needs."""

    def __init__(self, columns: int, encoding: str) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self.stream = io.TextIOWrapper(os.fdopen(slave, "wb"), encoding=encoding)
        self._encoding = encoding
        self._written: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything that was written, with control sequences. Closes the terminal."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return b"".join(self._written).decode(self._encoding)

    @property
    def screen(self) -> list[str]:
        """The lines that are seen in the end. Closes the terminal."""
        lines, column = [""], 0
        rest = _STYLE_OR_CURSOR.sub("", self.text)
        while rest:
            if rest.startswith("\x1b[2K"):
                lines[-1], rest = "", rest[4:]
                continue
            character, rest = rest[0], rest[1:]
            if character == "\r":
                column = 0
            elif character == "\n":
                lines.append("")
            else:
                lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
                column += 1
        return lines

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.stream.fileno(), (24, columns))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # on Linux: the other end is closed
                return
            if not data:
                return
            self._written.append(data)


@contextmanager
def terminal(columns: int = 80, encoding: str = "utf-8") -> Iterator[Terminal]:
    opened = Terminal(columns, encoding)
    try:
        yield opened
    finally:
        _ = opened.text
