"""Files in object stores, reached through pyarrow.fs: s3://, gs://, abfs:// and abfss://, and hf:// through huggingface_hub.

In: a URL that the user allowed. Out: a `Store` that lists, reads and writes, and `RemoteFile`s, which stand where the readers of
Parquet take a Path. Credentials are found by each service's SDK (environment variables, its own files, the machine's role); a URL
that holds some is refused. Requests are repeated with growing pauses; what still fails is a `StorageError` that names the object.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa

from seqvae.errors import DataError, StorageError, UsageError
from seqvae.files import is_remote

if TYPE_CHECKING:
    from pyarrow import fs

T = TypeVar("T")
ATTEMPTS = 6
"""Requests for one answer, with pauses that double between them: a server that is gone is given up after 10 to 20 seconds."""
CONNECT_SECONDS, SILENT_SECONDS = 5, 30
THREADS = 16
"""Requests that wait for an answer at one time."""
READ_AHEAD_BYTES = 256 << 20
"""Of decoded rows and whole small files that lie ready at one time, beside the one that is being used."""
SMALL_BYTES = 8 << 20
"""A file up to this size is fetched whole by one request, its footer and its columns."""
TROUBLE = re.compile(r"AWS Error|google::cloud|Azure|azure|HTTP|[Cc]onnection|[Tt]imed? ?out|[Cc]redential")
"""What an OSError of a store says, in contrast to one about the content of a file."""
DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT|INVALID_SIGNATURE|EXPIRED|UNRECOGNIZED_CLIENT|HTTP status 40[13]|40[13] "
    r"|[Cc]redential|PERMISSION_DENIED|UNAUTHENTICATED|[Aa]uthenticat|[Aa]uthoriz"
)
MISSING_BUCKET = re.compile(
    r"NO_SUCH_BUCKET|[Bb]ucket .*(not found|does not exist)|ContainerNotFound|RepositoryNotFound"
)


class Listed(NamedTuple):
    """An object or a folder in a store."""

    path: str
    """Its bucket and key."""
    size: int
    modified_ns: int
    is_folder: bool


@dataclass(frozen=True)
class RemoteFile:
    """An object, with what the readers of Parquet ask of a Path."""

    path: PurePosixPath
    """Its bucket and key."""
    size: int
    modified_ns: int
    store: "Store" = field(repr=False)

    def __str__(self) -> str:
        return self.store.url_of(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stem(self) -> str:
        return self.path.stem

    def open(self, mode: str = "rb") -> pa.NativeFile:
        """Return a file to read anywhere from; several threads may do so."""
        assert mode == "rb"
        return self.store.open(str(self.path))

    def mark(self) -> str:
        """Return the ETag of the object as it is now, or where a store has none its time of modification in nanoseconds."""
        return self.store.etag(str(self.path)) or str(self.modified_ns)


@dataclass(frozen=True)
class StoredPlace:
    """A folder or an object in a store that a cache is built in, with what its builder asks of a Path."""

    path: PurePosixPath
    """Its bucket and key."""
    store: "Store" = field(repr=False)

    def __str__(self) -> str:
        return self.store.url_of(self.path)

    def __truediv__(self, name: str) -> "StoredPlace":
        return StoredPlace(self.path / name, self.store)

    @property
    def name(self) -> str:
        return self.path.name

    def mkdir(self, *, parents: bool) -> None:
        """Do nothing: where there is an object, there is its folder."""


DataFile = Path | RemoteFile
"""A file of data, on this machine or in a store."""


def readable(file: DataFile) -> Any:
    """Return what pyarrow opens: a path of this machine, or an open file of a store."""
    return file.open() if isinstance(file, RemoteFile) else file


class Store:
    """The objects behind one kind of URL, at one endpoint."""

    def __init__(self, files: "fs.FileSystem", base: str, opened_by: tuple[str, str, str | None]) -> None:
        """`base`: what stands before bucket and key in a URL, `s3://`. `opened_by`: the arguments of `_store`."""
        self.files = files
        self._base = base
        self._opened_by = opened_by

    def __reduce__(self) -> tuple[Any, tuple[str, str, str | None]]:
        """Open it anew in another process: what pyarrow pickles would not repeat requests as often."""
        return _store, self._opened_by

    def url_of(self, path: object) -> str:
        if "@" in self._base:  # abfss://container@account/: the container stands before the account
            container, _, key = str(path).partition("/")
            return self._base.replace("@", f"{container}@", 1) + key
        return f"{self._base}{path}"

    def list(self, prefix: str, *, recursive: bool = True) -> list[Listed]:
        """Return the objects and folders below a prefix in the order of their paths; none where it is missing."""
        from pyarrow import fs

        with self._about(prefix):
            selector = fs.FileSelector(prefix, recursive=recursive, allow_not_found=True)
            found = self.files.get_file_info(selector)
        return sorted(_listed(info) for info in found)

    def find(self, path: str) -> Listed | None:
        """Return the object or folder at a path, None where there is none."""
        with self._about(path):
            info = self.files.get_file_info(path)
        return _listed(info) if info.type.name in ("File", "Directory") else None

    def exists(self, path: str) -> bool:
        return self.find(path) is not None

    def etag(self, path: str) -> str | None:
        """Return the mark that changes with an object's content, None where the store has none."""
        with self._about(path), self.files.open_input_stream(path) as stream:
            about = {str(key).lower(): value.decode() for key, value in (stream.metadata() or {}).items()}
        return (about.get("etag") or about.get("generation") or "").strip('"') or None

    def open(self, path: str) -> pa.NativeFile:
        with self._about(path):
            return self.files.open_input_file(path)

    def read(self, path: str) -> bytes:
        """Return a whole object."""
        with self._about(path), self.files.open_input_file(path) as file:
            return bytes(file.read())

    def write(self, path: str, content: bytes | Path) -> None:
        """Put bytes, or a file of this machine, into an object, which is there as a whole or not at all."""
        with self._about(path), self.files.open_output_stream(path) as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                with content.open("rb") as source:
                    while piece := source.read(SMALL_BYTES):
                        stream.write(piece)

    def create(self, path: str) -> "Upload":
        """Return an object to write from its beginning to its end; as much as was written is there once it is closed."""
        return Upload(self, path)

    def pieces(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object, so many bytes at a time, some of them ahead."""
        file = self.open(path)

        def read(begin: int) -> bytes:
            with self._about(path):
                piece = bytes(file.read_at(size, begin))
            if len(piece) != (wanted := min(size, length - begin)):
                raise StorageError(
                    f"{self.url_of(path)}: {wanted:,} bytes at {begin:,} were {len(piece):,}. Start again."
                )
            return piece

        with self._about(path):
            length = file.size()
        yield from ahead((size, partial(read, begin)) for begin in range(0, length, size))

    def ranges(self, path: str) -> Callable[[str, int, int], bytes]:
        """Return what reads bytes of the objects below a path: by name, first byte, and how many."""
        opened = cache(lambda name: self.open(f"{path}/{name}"))

        def read(name: str, begin: int, number: int) -> bytes:
            with self._about(f"{path}/{name}"):
                return bytes(opened(name).read_at(number, begin))

        return read

    def delete(self, path: str) -> None:
        with self._about(path):
            self.files.delete_file(path)

    def delete_folder(self, path: str) -> None:
        """Delete all objects below a path."""
        with self._about(path):
            self.files.delete_dir(path)

    def _about(self, path: str) -> "_Translated":
        return _Translated(self.url_of(path))


class Upload:
    """An object that is being written."""

    def __init__(self, store: Store, path: str) -> None:
        self._about = _Translated(store.url_of(path))
        with self._about:
            self._stream = store.files.open_output_stream(path)

    def write(self, content: Any) -> None:
        with self._about:
            self._stream.write(content)

    def close(self) -> None:
        with self._about:
            self._stream.close()


class _Translated:
    """A block in which trouble with a store becomes a `StorageError` or a `DataError` that names the object."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (told := trouble_with(self.url, error)) is not None:
            raise told from error


def trouble_with(url: object, error: BaseException) -> DataError | StorageError | None:
    """Return what to say of a request that failed for good; None where the error is about something else."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{url}: is gone, or never was there. Check the path.")
    said = " ".join(str(error).split())
    if not isinstance(error, OSError) or not TROUBLE.search(said):
        return None
    said = re.sub(r" \(Request ID: .*?\)", "", said)[:300]
    if MISSING_BUCKET.search(said):
        return DataError(f"{url}: there is no such bucket or container. Check the name, and --endpoint_url.")
    if DENIED.search(said):
        return StorageError(
            f"{url}: access was denied ({said}). Set the credentials in the environment (for s3: AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or AWS_PROFILE), and check what they may read."
        )
    return StorageError(
        f"{url}: cannot be reached, after {ATTEMPTS} attempts ({said}). Check the network and --endpoint_url, and start the same "
        f"command again."
    )


def open_store(url: str, endpoint_url: str | None = None) -> tuple[Store, str]:
    """Return the store of a URL, and the bucket and key that it names; the user must have allowed it."""
    scheme, _, rest = url.partition("://")
    authority, _, key = rest.partition("/")
    bucket, _, account = authority.partition("@")
    # A bucket of Amazon's has a region of its own.
    store = _store(scheme.lower(), bucket if scheme.lower() == "s3" else account, endpoint_url)
    return store, f"{bucket}/{key.strip('/')}".rstrip("/")


@cache
def _store(scheme: str, authority: str, endpoint_url: str | None) -> Store:
    from pyarrow import fs

    opened_by = (scheme, authority, endpoint_url)
    base = f"{scheme}://{f'@{authority}/' if scheme.startswith('abfs') and authority else ''}"
    protocol, _, host = (endpoint_url or "").rstrip("/").partition("://")
    with _Translated(f"{scheme}://{authority}"):
        if scheme == "s3":
            endpoint = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint:  # not Amazon's: no machine there tells credentials, and asking for them takes 14 seconds
                os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            if region is None:
                region = "us-east-1" if endpoint else fs.resolve_s3_region(authority)
            return Store(
                fs.S3FileSystem(
                    region=region,
                    endpoint_override=endpoint,
                    connect_timeout=CONNECT_SECONDS,
                    request_timeout=SILENT_SECONDS,
                    allow_delayed_open=True,  # one request for a small object, not three
                    retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
                ),
                base,
                opened_by,
            )
        if scheme == "gs":
            elsewhere = {"endpoint_override": host, "scheme": protocol} if endpoint_url else {}
            return Store(fs.GcsFileSystem(retry_time_limit=timedelta(seconds=60), **elsewhere), base, opened_by)
        if scheme in ("abfs", "abfss"):
            account = authority.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT")
            if not account:
                raise UsageError(
                    f"{scheme}: which storage account? Write {scheme}://container@account.dfs.core.windows.net/path, or set "
                    f"AZURE_STORAGE_ACCOUNT."
                )
            elsewhere = {"blob_storage_authority": host, "blob_storage_scheme": protocol} if endpoint_url else {}
            secrets = {"account_key": "AZURE_STORAGE_KEY", "sas_token": "AZURE_STORAGE_SAS_TOKEN"}
            found = {name: os.environ[variable] for name, variable in secrets.items() if variable in os.environ}
            return Store(fs.AzureFileSystem(account, **found, **elsewhere), base, opened_by)
        try:
            files, _ = fs.FileSystem.from_uri("hf://datasets")
        except ImportError as error:
            raise UsageError("hf:// needs huggingface_hub: pip install huggingface_hub") from error
        return Store(files, base, opened_by)


def _listed(info: "fs.FileInfo") -> Listed:
    is_folder = info.type.name == "Directory"
    return Listed(info.path.rstrip("/"), info.size or 0, info.mtime_ns or 0, is_folder)


def require_consent(url: str, allowed: bool) -> None:
    """Refuse a URL that the user did not type in this run."""
    if is_remote(url) and not allowed:
        raise UsageError(
            f"{url}: nothing is fetched from a store that was not typed in this command. Say --allow_remote, or --data_dir."
        )


def in_order(function: Callable[[DataFile], T], files: Sequence[DataFile]) -> Iterator[T]:
    """Yield what a function returns for each file; those in a store are asked in parallel."""
    if any(isinstance(file, RemoteFile) for file in files):
        return ahead((0, partial(function, file)) for file in files)
    return map(function, files)


def ahead(tasks: Iterable[tuple[int, Callable[[], T]]]) -> Generator[T, None, None]:
    """Yield what the tasks return, in their order; they run in threads, as many before they are needed as hold at most
    READ_AHEAD_BYTES, by the number of bytes that each names."""
    waiting: deque[tuple[int, Future[T]]] = deque()
    held, tasks = 0, iter(tasks)
    pool = ThreadPoolExecutor(THREADS)
    try:
        following = next(tasks, None)
        while following or waiting:
            while following and len(waiting) < 2 * THREADS and (not waiting or held + following[0] <= READ_AHEAD_BYTES):
                held += following[0]
                waiting.append((following[0], pool.submit(following[1])))
                following = next(tasks, None)
            size, first = waiting.popleft()
            held -= size
            yield first.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
