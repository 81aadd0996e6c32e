"""`RemoteObject`: one version of an object behind a URL, read range by range through fsspec.

    object_at(url) ──HEAD, once a process──> RemoteObject ──read_range──> bytes of that version, or an error

A failed range is asked for again, ATTEMPTS times in all, with pauses from FIRST_PAUSE_S, doubled up to LAST_PAUSE_S.
The first look at an object decides its version for the process (`forget` ends that): another version later is refused
with both. S3 checks that in the request of each range, other stores are asked again behind it.

Credentials, endpoints and profiles are those of the clients (s3fs, gcsfs, aiohttp) by their own rules: environment
variables, their files, the machine's role.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bagpipe.errors import InputError
from bagpipe.files.version import FileVersion

__all__ = [
    "RemoteObject",
    "entries_in",
    "file_system",
    "forget",
    "kind_of",
    "object_at",
    "pin",
    "pins",
    "retried",
]

ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0

#: Errors of clients without credentials, by name: their packages are not imported here.
_NO_ACCESS = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "NoAuthTokenError",
        "DefaultCredentialsError",
        "RefreshError",
        "ProfileNotFound",
    }
)

#: Statuses of a file that is not there.
_NOT_FOUND = (404, 410)

_Result = TypeVar("_Result")

#: What stores name a version of an object's content, best first.
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "generation",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "created",
)

_lock = threading.Lock()
_objects: dict[str, RemoteObject] = {}
_owner = os.getpid()


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        InputError: the scheme is unknown, its package is not installed, or the URL holds a password.
    """
    import fsspec

    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0]:
        raise InputError(
            f"{scheme}://{rest.rpartition('@')[2]}: its user and password stood in the path, which messages and "
            f"checkpoints name: give them to the client by its own rules"
        )
    try:
        found, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise InputError(
            f"{url}: {scheme}:// needs a Python package that is not installed: {_one_line(error)}"
        ) from None
    except ValueError as error:
        raise InputError(f"{url}: {_one_line(error)}") from None
    except Exception as error:
        raise _explained(url, error) from None
    return found, path


def retried(url: str, call: Callable[[], _Result]) -> _Result:
    """The result of a call that reads or writes behind a URL, tried ATTEMPTS times.

    Raises:
        InputError: there are no credentials, or no access.
        OSError: it fails each time; FileNotFoundError at once.
    """
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except InputError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and _is_missing(url, error):
                raise
            if _lacks_access(error):
                raise _explained(url, error) from None
            if attempt == ATTEMPTS:
                raise OSError(f"{_one_line(_root(error))} ({ATTEMPTS} attempts)") from None
        threading.Event().wait(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    raise AssertionError("unreachable")


def _is_missing(url: str, error: FileNotFoundError) -> bool:
    """Whether the file is not there. Of web servers fsspec calls all that fails a missing file."""
    status = _status(error)
    if status is None and url.startswith(("http://", "https://")):
        return isinstance(_root(error), FileNotFoundError)  # what it makes of status 404, at times
    return status is None or status in _NOT_FOUND


def _root(error: BaseException) -> BaseException:
    """What a client met that it calls a missing file; other errors as they are."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _lacks_access(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, PermissionError) or type(chain).__name__ in _NO_ACCESS:
            return True
        chain = chain.__cause__
    return _status(error) in (401, 403)


def _status(error: BaseException) -> int | None:
    """The status with which an HTTP server refused, if fsspec tells it: it calls all of them missing files."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(status := getattr(chain, "status", None), int):
            return status
        chain = chain.__cause__
    return None


def _explained(url: str, error: BaseException) -> InputError | OSError:
    if _lacks_access(error):
        return InputError(
            f"{url}: no access: {_one_line(error)}; credentials come by the rules of the client of "
            f"{url.partition('://')[0]}:// (environment variables, its files, the machine's role)"
        )
    return error if isinstance(error, OSError) else OSError(_one_line(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def kind_of(url: str) -> str:
    """file, directory, or an empty text if there is neither."""
    system, path = file_system(url)
    try:
        return str(retried(url, lambda: system.info(path))["type"])
    except FileNotFoundError:
        return ""


def entries_in(url: str) -> dict[str, str]:
    """Names of what is directly in a folder, each with ``file`` or ``directory``."""
    system, path = file_system(url)
    entries: list[Mapping[str, Any]] = retried(url, lambda: system.ls(path, detail=True))
    own = path.rstrip("/")
    return {
        str(entry["name"]).rstrip("/").rpartition("/")[2]: str(entry["type"])
        for entry in entries
        if str(entry["name"]).rstrip("/") != own
    }


class RemoteObject:
    """One version of an object.

    Args:
        url: of the object.
        version: the one to read; None: the present one.

    Raises:
        InputError: no access; the object has another version; or the server does not tell its version.
        OSError: it does not exist, or the store does not answer.
    """

    def __init__(self, url: str, version: FileVersion | None = None) -> None:
        self.url = url
        self._system, self._path = file_system(url)
        self.version = self._look()
        if version is not None:
            self._check(version, self.version)
        protocols = self._system.protocol
        self._checks_itself = "s3" in ((protocols,) if isinstance(protocols, str) else protocols)
        self._file: Any = None
        if self._checks_itself:
            # Its ranges carry If-Match with the ETag of a further look.
            self._file = retried(url, lambda: self._system.open(self._path, "rb", cache_type="none"))
            self._check(self.version, _version_of(self._file.details))

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, at most to the end of the object.

        Raises:
            InputError: no access; or the object has changed.
            OSError: the store does not give them.
        """
        stop = min(stop, self.version.num_bytes)
        if start >= stop:
            return b""
        found = retried(self.url, lambda: self._ask(start, stop))
        if not self._checks_itself:
            self._check(self.version, self._look())
        return found

    def _ask(self, start: int, stop: int) -> bytes:
        if self._file is not None:
            try:
                found: bytes = self._file._fetch_range(start, stop)
            except OSError as error:
                if type(error).__name__ == "FileExpired":
                    self._check(self.version, self._look())
                raise
        else:
            found = self._system.cat_file(self._path, start=start, end=stop)
        if len(found) > stop - start:
            raise InputError(f"{self.url}: the server does not serve ranges of bytes: copy the file")
        if len(found) < stop - start:
            raise OSError(f"expected {stop - start} bytes from {start} on, got {len(found)}")
        return found

    def _look(self) -> FileVersion:
        """The present version."""
        found = retried(self.url, lambda: self._system.info(self._path))
        if found.get("type") == "directory":
            raise IsADirectoryError(f"{self.url} is a folder")
        if found.get("size") is None:
            raise InputError(f"{self.url}: the server does not tell the size of the file: copy the file")
        version = _version_of(found)
        if not version.tag:
            raise InputError(f"{self.url}: the server does not tell the version of the file: copy the file")
        return version

    def _check(self, expected: FileVersion, found: FileVersion) -> None:
        if expected != found:
            raise InputError(f"{self.url} changed while it was read: it had {expected}, and has {found}")


def _version_of(details: Mapping[str, Any]) -> FileVersion:
    tag = next((str(details[name]) for name in _TAGS if details.get(name)), "")
    return FileVersion(num_bytes=int(details["size"]), tag=tag.strip('"'))


def object_at(url: str) -> RemoteObject:
    """The object that this process reads behind a URL.

    Raises:
        InputError, OSError: as `RemoteObject`.
    """
    with _lock:
        _begin()
        found = _objects.get(url)
        pinned = _pinned.get(url)
    if found is None:
        made = RemoteObject(url, pinned)
        with _lock:
            found = _objects.setdefault(url, made)
    return found


#: Versions that another process has seen.
_pinned: dict[str, FileVersion] = {}


def pins() -> dict[str, FileVersion]:
    """URL -> version of all objects that this process has looked at: for `pin` in another process."""
    with _lock:
        _begin()
        return {**_pinned, **{url: found.version for url, found in _objects.items()}}


def pin(versions: Mapping[str, FileVersion]) -> None:
    """Read these versions, and refuse others."""
    with _lock:
        _begin()
        _pinned.update(versions)


def forget(url: str) -> None:
    """Let the next look at the objects whose URLs begin with `url` decide their versions."""
    with _lock:
        _begin()
        for name in [name for name in {*_objects, *_pinned} if name.startswith(url)]:
            _objects.pop(name, None)
            _pinned.pop(name, None)


def _begin() -> None:
    """A forked process makes connections of its own."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        _objects.clear()
