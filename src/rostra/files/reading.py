"""Reading a file from any byte on: what breaks goes on at the byte where it broke."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, cast

from fsspec.asyn import sync

from rostra.files.listing import File, version_of
from rostra.files.stores import RETRIES, Changed, explained, may_pass, protocol_of, store_of

STREAM_BUFFER = 1 << 20  # bytes
BLOCK_BUFFER = 8 << 20  # where each block is a request of its own
REQUEST_BYTES = 64 << 20  # asked for at once: a reader that jumps about wastes little
_SILENCE = 60.0  # seconds without a byte


def open_range(file: File, start: int = 0, stop: int | None = None) -> BinaryIO:
    """The bytes of `file` from `start` to `stop` (its end if None); positions are the file's.

    On a store, what may pass is tried again, a broken connection goes on at the byte where it
    broke, and every byte is of the version that was listed.

    Raises (here, or while reading):
        OSError: when this file is not there, may not be read, or has fewer bytes than listed.
        RequestError: when it is another version by now, or its store does not answer.
    """
    if (path := file.local) is not None:
        handle = path.open("rb")
        handle.seek(start)
        return handle if stop is None else cast(BinaryIO, io.BufferedReader(_Head(handle, stop)))
    connect = _STREAMS.get(protocol_of(file.url), _Blocks)
    size = BLOCK_BUFFER if connect is _Blocks else STREAM_BUFFER
    raw = _Ranged(file, start, file.size if stop is None else min(stop, file.size), connect)
    return cast(BinaryIO, io.BufferedReader(raw, size))


class Truncated(OSError):
    """A file has fewer bytes than its listing says."""


class _Head(io.RawIOBase):
    """A local file up to `stop`."""

    def __init__(self, handle: BinaryIO, stop: int) -> None:
        self._handle, self._stop = handle, stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._handle.read(max(0, min(len(buffer), self._stop - self._handle.tell())))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._handle.close()
        super().close()


class _Stream(Protocol):
    """Bytes as they come; `read` gives none at the end.

    `whole`: it goes on to the file's end, whatever was asked for.
    """

    whole: bool

    def read(self, count: int) -> bytes: ...

    def close(self) -> None: ...


class _Ranged(io.RawIOBase):
    """Bytes of a remote file, from connections that may break."""

    def __init__(
        self, file: File, start: int, stop: int, connect: Callable[[File, int, int], _Stream]
    ) -> None:
        self._file, self._place, self._stop, self._connect = file, start, stop, connect
        self._stream: _Stream | None = None
        self._until = start  # where its bytes end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._place, self._file.size)[whence]
        if base + offset != self._place:
            self._drop()
            self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self._more(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        found = bytearray()
        while data := self._more(BLOCK_BUFFER):
            found += data
        return bytes(found)

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _more(self, count: int) -> bytes:
        """Some of the next bytes; none at the end."""
        if (count := min(count, self._stop - self._place)) <= 0:
            return b""
        delays = RETRIES.delays()
        while True:
            connected = False
            try:
                if self._stream is None:
                    until = min(self._stop, self._place + REQUEST_BYTES)
                    self._stream = self._connect(self._file, self._place, until)
                    self._until = self._stop if self._stream.whole else until
                connected = True
                if data := self._stream.read(min(count, self._until - self._place)):
                    self._place += len(data)
                    if self._place == self._until:
                        self._drop()
                    return data
                error: Exception = EOFError("nothing more came")
            except Exception as caught:
                error = caught
            self._drop()
            if (delay := next(delays, None) if may_pass(error) else None) is None:
                raise self._given_up(error, connected) from error
            time.sleep(delay)

    def _given_up(self, error: Exception, connected: bool) -> Exception:
        if not connected or not may_pass(error):
            return explained(self._file.url, error)
        # It answers, time and again, and never with the next byte.
        problem = f"truncated: it ends at byte {self._place:,} of {self._file.size:,}"
        return Truncated(errno.EIO, problem, self._file.url)


class _Body:
    """The body of an HTTP answer; what came before it broke is not lost."""

    def __init__(
        self, loop: Any, content: Any, close: Callable[[], Any], whole: bool = False
    ) -> None:
        self._loop, self._content, self._close = loop, content, close
        self.whole = whole

    def read(self, count: int) -> bytes:
        found = bytearray()

        async def fill() -> None:
            while len(found) < count and (data := await self._content.read(count - len(found))):
                found.extend(data)

        try:
            sync(self._loop, fill)
        except Exception:
            if not found:
                raise
        return bytes(found)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._close)  # the loop has a thread of its own


def _s3(file: File, start: int, stop: int) -> _Stream:
    fs, path = store_of(file.url)
    bucket, key, _ = fs.split_path(path)
    match = {"IfMatch": file.version} if file.version else {}
    answer = fs.call_s3(
        "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **match
    )
    return _Body(fs.loop, answer["Body"], answer["Body"].close)


def _http(file: File, start: int, stop: int) -> _Stream:
    fs, url = store_of(file.url)
    answer = sync(fs.loop, _get, fs, url, start, stop)
    whole = answer.status != 206  # a server without ranges
    body = _Body(fs.loop, answer.content, answer.close, whole)
    if (version := version_of(answer.headers)) != file.version:
        body.close()
        raise Changed(f"it was version {file.version}, and is {version or 'unknown'}")
    sent = answer.headers.get("Content-Range")
    if not whole and sent and not sent.startswith(f"bytes {start}-"):
        body.close()
        raise OSError(f"asked for bytes from {start} on, it sent {sent}")
    passed = start if whole else 0
    while passed and (data := body.read(min(passed, STREAM_BUFFER))):
        passed -= len(data)
    return body


async def _get(fs: Any, url: str, start: int, stop: int) -> Any:
    import aiohttp

    session = await fs.set_session()
    options = {**fs.kwargs, "timeout": aiohttp.ClientTimeout(sock_connect=30, sock_read=_SILENCE)}
    ranged = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **ranged}
    answer = await session.get(fs.encode_url(url), **options)
    if answer.status >= 400:
        answer.close()
        answer.raise_for_status()
    return answer


class _Blocks:
    """Any other store: a request a block, and after each the version is looked at again."""

    whole = False

    def __init__(self, file: File, start: int, stop: int) -> None:
        self._file, self._place = file, start
        self._fs, self._path = store_of(file.url)
        self._check()  # a store that does not answer is told from a file that ends early

    def read(self, count: int) -> bytes:
        data = self._fs.cat_file(self._path, start=self._place, end=self._place + count)
        self._check()
        self._place += len(data)
        return bytes(data)

    def _check(self) -> None:
        self._fs.invalidate_cache()
        version = version_of(self._fs.info(self._path))
        if version != self._file.version:
            raise Changed(f"it was version {self._file.version}, and is {version}")

    def close(self) -> None:
        pass


_STREAMS: dict[str, Callable[[File, int, int], _Stream]] = {
    **dict.fromkeys(("s3", "s3a"), _s3),
    **dict.fromkeys(("http", "https"), _http),
}
