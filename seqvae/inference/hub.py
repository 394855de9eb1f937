"""Models on the Hugging Face Hub: `hf://user/name`, or `hf://user/name@revision`, through huggingface_hub (extra `hub`).

In: an address that the user typed, nothing else leads here. Out: a directory with the files of a saved model, all of one commit; or
the address that a model was put to. Only these files are fetched (`seqvae/inference/saved.py`), and what a stranger wrote in them
names no place of this machine. What is published names none either. The token is huggingface_hub's (`hf auth login`, or HF_TOKEN);
it is neither taken, kept nor shown.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

import seqvae
from seqvae.errors import SeqVAEError, StorageError, UsageError
from seqvae.inference.saved import CARD, CONFIG, WEIGHTS, Saved, files_of, is_edited
from seqvae.text import visible

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SCHEME = "hf://"
OTHERS = ("datasets", "spaces", "buckets", "kernels")
"""What stands in place of a user in addresses of other things than models."""
MOST_SAID = 300
"""Characters of a server's own words that a message repeats."""
_ROOT = r"(?:~[\w.-]*[/\\]|/|[A-Za-z]:[\\/]|\\\\)"
_PLACE = re.compile(rf"""(?<=')(?:{_ROOT})[^']+(?=')|(?<![\w./:\\])(?:{_ROOT})[^\s'"=,;]+""")
"""A path of a machine in a text, absolute or in a home directory; in quotes it may hold spaces."""


class Address(NamedTuple):
    """A model on the hub."""

    name: str
    """Its repository: user/name."""
    revision: str | None = None
    """A branch, tag or commit; None: the newest commit."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


def is_on_hub(place: str) -> bool:
    return place.lower().startswith(SCHEME)


def fetch(place: str) -> Path:
    """Return a directory with the files of the model at an address; out of reach of the hub, as they were fetched before."""
    address = _address_of(place)
    with _errors_about(address):
        api = _api()
        address = _whole(address, api)
        wanted = [CONFIG, WEIGHTS]
        directory = Path(api.snapshot_download(address.name, revision=address.revision, allow_patterns=wanted))
    if missing := [name for name in wanted if not (directory / name).is_file()]:
        raise UsageError(f"{address} holds no model of ours: {' and '.join(missing)} is not there")
    return directory


def push(saved: Saved, place: str, *, private: bool, message: str | None = None) -> str:
    """Put a model onto the hub in one commit, and return its address; a card that was edited there stays as it is."""
    address = _address_of(place if is_on_hub(place) else SCHEME + place)
    if address.revision is not None:
        raise UsageError(f"{address}: a model is pushed to a name; a revision is what comes of it")
    with _errors_about(address):
        from huggingface_hub import CommitOperationAdd

        api = _api()
        address = _whole(address, api)
        api.create_repo(address.name, private=private, exist_ok=True)
        files = files_of(*without_places(saved), str(address), with_card=not _is_card_edited(api, address))
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        words = message or f"Model of step {saved.stored.step:,}, by seqvae {seqvae.__version__}"
        commit = api.create_commit(address.name, operations, commit_message=words)
    return str(address._replace(revision=commit.oid))


def without_places(saved: Saved) -> Saved:
    """Return a model whose settings and results name no place of a machine: of paths the last name is left, of caches none."""
    stored, results = saved
    settings = {
        name: value if name.endswith(("_column", "_columns")) else _without_places(value)
        for name, value in stored.settings.items()
    }
    settings |= {name: None for name in ("cache_dir", "endpoint_url", "storage_path") if name in settings}
    return Saved(stored._replace(settings=settings), _without_places(dict(results)))


def _without_places(value: Any) -> Any:
    match value:
        case str():
            return _PLACE.sub(lambda found: _last_name(found[0]), value)
        case Mapping():
            return {name: _without_places(one) for name, one in value.items()}
        case list() | tuple():
            return [_without_places(one) for one in value]
    return value


def _last_name(path: str) -> str:
    """Return the last name of a path of any system; of no more than a root, a dot.

    >>> _last_name("/home/ann/data/"), _last_name("C:\\\\data\\\\mine"), _last_name("~"), _last_name("/")
    ('data', 'mine', '.', '.')
    """
    name = PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
    return name if name not in ("", "~") else "."


# --- Talking to the hub -----------------------------------------------------------------------------------------------


def _address_of(place: str) -> Address:
    name, at, revision = place[len(SCHEME) :].partition("@")
    user, slash, _ = name.partition("/")
    if slash and user in OTHERS:
        raise UsageError(f"{SCHEME}{visible(user)}/... is no model: give {SCHEME}user/name")
    if not name or (at and not revision) or ":" in name:
        raise UsageError(
            f"{SCHEME}... must be {SCHEME}user/name or {SCHEME}user/name@revision; credentials never stand in it"
        )
    return Address(name, revision or None)


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    endpoint = os.environ.get("HF_ENDPOINT")  # as it is now: the library reads it when it is imported
    return HfApi(endpoint=endpoint, library_name="seqvae", library_version=seqvae.__version__)


def _whole(address: Address, api: "HfApi") -> Address:
    """Return the address with the user's own name where it names no user."""
    if "/" in address.name:
        return address
    return address._replace(name=f"{api.whoami()['name']}/{address.name}")


def _is_card_edited(api: "HfApi", address: Address) -> bool:
    """Return whether the card on the hub is there and not as it was written; a foreign one counts as edited."""
    there = set(api.list_repo_files(address.name))
    if CARD not in there:
        return False
    names = [name for name in (CARD, CONFIG) if name in there]
    directory = Path(api.snapshot_download(address.name, allow_patterns=names))
    return CONFIG not in there or is_edited(directory)


@contextmanager
def _errors_about(address: Address) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors of ours. Not `from` it: a server's answer may repeat what it was sent."""
    try:
        import httpx2
        import huggingface_hub.errors
    except ImportError as error:
        raise UsageError(f'{SCHEME} needs huggingface_hub: pip install "seqvae[hub]"') from error
    try:
        yield
    except (SeqVAEError, MemoryError):
        raise
    except (httpx2.HTTPError, huggingface_hub.errors.HFValidationError, OSError) as error:
        if (reported := _reported(address, error)) is None:
            raise
        raise reported from None


def _reported(address: Address, error: Exception) -> SeqVAEError | None:
    """Return what to say of an error; None: it is about something else than the hub, such as a disk."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why it could not be asked for
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    code = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.HFValidationError():
            return UsageError(f"{address} is no name of a model: letters, digits, - _ and . in user/name")
        case errors.LocalTokenNotFoundError():
            return UsageError(
                f"{address}: there is no token to find out who you are: {log_in}, or write {SCHEME}user/name"
            )
        case errors.GatedRepoError():
            return StorageError(
                f"{address}: its owner lets nobody in without being asked: ask on its page, and {log_in}"
            )
        case errors.RevisionNotFoundError():
            return UsageError(f"{address}: there is no such revision")
        case errors.RepositoryNotFoundError():
            return UsageError(f"{address}: there is no such model, or it is private: check the name, or {log_in}")
    if code in (401, 403):
        return StorageError(f"{address}: access was denied ({_said(error)}): {log_in}, with a token that may do this")
    if code is not None:
        return StorageError(f"{address}: the hub answered {code} ({_said(error)}). Try again later.")
    if isinstance(error, OSError) and error.errno is not None:
        return None
    reason = "HF_HUB_OFFLINE is set" if isinstance(error, errors.OfflineModeIsEnabled) else type(error).__name__
    return StorageError(f"{address}: the hub cannot be reached ({reason}). Check the network, and HF_ENDPOINT.")


def _said(error: Exception) -> str:
    """Return a server's own words in one line, without the token, should it repeat that."""
    from huggingface_hub import get_token

    words = " ".join((getattr(error, "server_message", None) or "no reason given").split())
    if token := get_token():
        words = words.replace(token, "***")
    return visible(words[:MOST_SAID])
