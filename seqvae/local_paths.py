"""What the user typed in for a path -> whether it can be one of this machine. Nothing is ever fetched."""

import re
import unicodedata
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def refuse_no_paths(settings: object, *names: str) -> None:
    """Refuse what stands in these fields of settings and is no path of this machine."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and (reason := why_no_path(value)):
            raise ValueError(f"--{name} {reason}")


def why_no_path(text: str) -> str | None:
    """Why a text can be no path here, or None. Every flag that names a place is asked about here, and nowhere else.

    >>> why_no_path("s3://bucket/a")
    's3://bucket/a is a URL, and URLs are not fetched: copy it to this machine, and give the path of the copy'
    """
    if not text:
        return "is empty: give a path, or leave the flag out"
    if _URL.match(text):
        return f"{text} is a URL, and URLs are not fetched: copy it to this machine, and give the path of the copy"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        return f"{text!r} holds control characters or bytes that are no UTF-8: rename it, or let a link lead there"
    if text.startswith("--"):
        return f"{text} begins like a flag: give the path in full"
    return f"{text}: there is no such home directory; give the path in full" if _is_of_nobody(text) else None


def _is_of_nobody(text: str) -> bool:
    try:
        return text.startswith("~") and not Path(text).expanduser()
    except RuntimeError:
        return True
