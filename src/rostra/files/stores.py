"""Stores behind URLs: which package reaches them, which failures pass, and what to say of the
others."""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from rostra.errors import RequestError

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_EXTRAS = {  # protocol: extra of this package, what it installs
    **dict.fromkeys(("s3", "s3a"), ("s3", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), ("gcs", "gcsfs")),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), ("azure", "adlfs")),
    **dict.fromkeys(("http", "https"), ("http", "aiohttp")),
}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and AWS_ENDPOINT_URL for "
    "a store that is not Amazon's",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_CONNECTIONS = 1024  # a file that is open and waits keeps its own: these may be many
_CHANCE = random.Random()  # seeds of a run make neither this alike on all ranks, nor it them
_GONE = (404, 410)
_REFUSED = (401, 403, 407)
_CHANGED = 412  # a precondition failed: the object is another version


@dataclass(frozen=True)
class Retries:
    """How often what may pass is tried again, with exponential backoff and full jitter.

    Delays are drawn from 0 to `first` seconds, then to twice that, and so on to `longest`: many
    readers that failed together do not come back together (Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015).
    """

    attempts: int = 8
    first: float = 0.25
    longest: float = 16.0

    def delays(self) -> Iterator[float]:
        """Seconds to wait after each failure but the last."""
        for attempt in range(self.attempts - 1):
            yield _CHANCE.uniform(0, min(self.longest, self.first * 2**attempt))

    def call(self, url: str, work: Callable[[], T]) -> T:
        """What `work` gives, tried again while its failures may pass.

        Raises:
            OSError, RequestError: as `explained`.
        """
        delays = self.delays()
        while True:
            try:
                return work()
            except Exception as error:
                delay = next(delays, None) if may_pass(error) else None
                if delay is None:
                    raise explained(url, error) from error
                time.sleep(delay)


RETRIES = Retries()


class Changed(Exception):
    """The object is another version than the one that was listed."""


def is_url(path: str) -> bool:
    """Whether `path` lies on a store, and not in the local file system."""
    found = _URL.match(path)
    return found is not None and found[1].lower() not in ("file", "local")


def local_path(path: str) -> Path:
    """A local path, or the one of a file:// URL."""
    return Path(re.sub(r"^(?:file|local)://", "", path)).expanduser()


def join(url: str, *names: str) -> str:
    """`url` (or a local folder) and names below it."""
    return "/".join([url.rstrip("/") or "/", *names]) if is_url(url) else str(Path(url, *names))


def protocol_of(url: str) -> str:
    found = _URL.match(url)
    return found[1].lower() if found else "file"


def store_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path on it. fsspec keeps one a process.

    Raises:
        RequestError: for a protocol that is unknown, or whose package is not installed.
    """
    protocol = protocol_of(url)
    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
        # Trying again is done here: a wrong address shall not take minutes to be told.
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 2, "mode": "standard"},
            "max_pool_connections": _CONNECTIONS,
        }
    if protocol in ("http", "https"):
        options["get_client"] = _http_client
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra, package = _EXTRAS.get(protocol, ("", protocol))
        command = f"pip install 'rostra[{extra}]'" if extra else "install that package"
        raise RequestError(
            f"{url}: {protocol}:// is reached through {package}, which is not installed "
            f"({error}). Run: {command}"
        ) from error
    except ValueError as error:
        raise RequestError(f"{url}: {protocol}:// is no protocol that fsspec knows") from error
    return fs, path


async def _http_client(**options: Any) -> Any:
    """The session of fsspec's HTTP file systems, of which each host has one."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    return aiohttp.ClientSession(**{"connector": connector, **options})


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, as aiohttp, botocore, gcsfs and Azure's client carry it."""
    seen: BaseException | None = error
    while seen is not None:
        answer = getattr(seen, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        elif type(seen).__module__ == "aiohttp.http_exceptions":
            status = None  # 400 of its own, for an answer that broke off
        else:
            names = ("status", "code", "status_code")
            status = next((s for n in names if (s := getattr(seen, n, None)) is not None), None)
        if isinstance(status, int) and 300 <= status < 600:
            return status
        seen = seen.__cause__ or seen.__context__
    return None


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, lost connections, 429, 5xx."""
    if isinstance(error, (Changed, RequestError, NotImplementedError)):
        return False
    if (status := status_of(error)) is not None:
        return status in (408, 425, 429) or status >= 500
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        # fsspec says "not found" of a host that does not answer, too
        return error.__cause__ is not None and may_pass(error.__cause__)
    kind = type(error)
    if kind.__name__ in ("NoCredentialsError", "InvalidURL", "InvalidUrlClientError"):
        return False
    network = kind.__module__.split(".")[0] in ("aiohttp", "aiobotocore", "botocore", "urllib3")
    return network or isinstance(error, (OSError, EOFError))


def explained(url: str, error: Exception) -> Exception:
    """What to raise for a failure that stays.

    An OSError is about this one file: readers fail or skip as the config says. A RequestError
    is about the store, or a file that changes as it is read.
    """
    if isinstance(error, RequestError):
        return error
    status = status_of(error)
    if isinstance(error, Changed) or status == _CHANGED or type(error).__name__ == "FileExpired":
        return RequestError(
            f"{url}: changed after it was listed ({error}). Start the same command again once "
            "nothing writes to it."
        )
    lost = may_pass(error)
    if status in _GONE or (isinstance(error, FileNotFoundError) and not (lost or status)):
        return FileNotFoundError(errno.ENOENT, "is not there", url)
    no_credentials = type(error).__name__ == "NoCredentialsError"
    if status in _REFUSED or no_credentials or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"access refused: {_said(error)}; {advice(url)}", url)
    if not lost:
        return RequestError(f"{url}: cannot be used ({_said(error)}). Check the URL.")
    return RequestError(
        f"{url}: does not answer ({_said(error)}), and did not in {RETRIES.attempts} attempts. "
        "Check the URL, the network and the store, then start the same command again."
    )


def advice(url: str) -> str:
    """Where the credentials of a store come from."""
    extra = _EXTRAS.get(protocol_of(url), ("", ""))[0]
    if extra in _CREDENTIALS:
        return f"check {_CREDENTIALS[extra]}"
    return "check who may read it"


def _said(error: BaseException) -> str:
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or repr(error)).splitlines()[0]
