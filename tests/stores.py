"""Stores for tests: moto's S3 server, a folder over HTTP, and a proxy that breaks connections."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import random
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}


RESET = b"\1\0\0\0\0\0\0\0"  # no lingering
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class S3Server:
    """moto's server, a process of its own: `address` is its endpoint. It keeps all in memory,
    so that a killed one has lost it."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(self.port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for(port: int, seconds: float = 60) -> None:
    """Until something listens on `port`."""
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)


def forget_stores() -> None:
    """Let fsspec make its file systems anew, as the environment by now says."""
    for protocol in ("s3", "http"):
        with contextlib.suppress(ImportError):
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


@contextlib.contextmanager
def endpoint(address: str) -> Iterator[None]:
    """s3:// is at `address` for a while."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", address)
        forget_stores()
        try:
            yield
        finally:
            forget_stores()


def upload(folder: Path, url: str) -> None:
    """All files of a folder, to a URL."""
    fs, inside = fsspec.core.url_to_fs(url)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        fs.pipe_file(f"{inside}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    fs.invalidate_cache()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A plain server: index pages, no ranges."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Ranges(Quiet):
    """A server that knows ranges."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(content)


class _WebServer(http.server.ThreadingHTTPServer):
    request_queue_size = (
        256  # of connections not yet taken up; five, else, and the rest try again late
    )


@contextlib.contextmanager
def web(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """A folder over HTTP; gives the URL of its index."""
    made = functools.partial(handler, directory=str(folder))
    server = _WebServer(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class BadNetwork:
    """A proxy of bytes before a server on this machine, that breaks connections.

    Of `faults` connections each one is either reset after a random number of bytes, or, if
    `busy`, answered with 503 at once; later ones, and those while `faults` is 0, go through.
    """

    def __init__(self, port: int, faults: int, longest: int = 200_000, seed: int = 0) -> None:
        self.faults, self.broken = faults, 0
        self._target, self._longest = port, longest
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> BadNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _fault(self) -> int | None:
        """Bytes until the connection breaks; None when it does not; -1 for a 503."""
        with self._lock:
            if self.broken >= self.faults:
                return None
            self.broken += 1
            return self._random.choice((-1, self._random.randrange(self._longest)))

    def _serve(self, client: socket.socket) -> None:
        left = self._fault()
        with client, contextlib.suppress(OSError):
            if left == -1:
                client.recv(65536)
                client.sendall(BUSY)
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                asking = threading.Thread(target=self._copy, args=(client, server), daemon=True)
                asking.start()
                self._copy(server, client, left)
                if left is not None:  # a reset, and no orderly end
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                client.shutdown(socket.SHUT_RD)  # which wakes the thread; else it stays open
                asking.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, left: int | None = None) -> None:
        with contextlib.suppress(OSError):
            while (left is None or left > 0) and (data := source.recv(65536)):
                data = data if left is None else data[:left]
                target.sendall(data)
                left = None if left is None else left - len(data)


def have_moto() -> bool:
    return all(importlib.util.find_spec(name) for name in ("moto", "flask", "s3fs"))


class Radosgw:
    """Ceph's S3 gateway with a store in memory: it checks secrets, as Amazon's does.

    Of Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common.
    """

    key, secret = "AKROSTRA", "correct-secret"

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        try:
            self._set_up()
        except BaseException:
            self.stop()
            raise

    def _set_up(self) -> None:
        folder, monitor = self._folder, free_port()
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        (folder / "ceph.conf").write_text(CEPH.format(fsid=fsid, monitor=monitor, folder=folder))
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        places = ("--addv", "a", f"[v1:127.0.0.1:{monitor}]", "--fsid", fsid)
        self._run("monmaptool", "--create", *places, str(folder / "monmap"))
        self._run("ceph-mon", "--id", "a", "--mkfs", "--monmap", str(folder / "monmap"))
        self._start("ceph-mon", "--id", "a")
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0")
        self._wait_for_osd()
        keys = ("--access-key", self.key, "--secret", self.secret)
        who = ("--uid", "rostra", "--display-name", "rostra")
        self._run("radosgw-admin", "user", "create", *who, *keys)
        self._open()

    def _wait_for_osd(self) -> None:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(subprocess.SubprocessError):  # a monitor that is busy yet
                if b"1 up" in self._run("ceph", "osd", "stat"):
                    return
            if time.monotonic() > end:
                raise TimeoutError((self._folder / "ceph-osd.out").read_text())
            time.sleep(0.5)

    def _open(self) -> None:
        frontend = f"beast endpoint=127.0.0.1:{self.port}"
        self._start("radosgw", "-n", "client.rgw", "--rgw-frontends", frontend)
        wait_for(self.port, 120)

    def restart(self) -> None:
        """Kill the gateway, and start it again; what is stored is kept."""
        gateway = self._processes.pop()
        gateway.kill()
        gateway.wait()
        self._open()

    def _run(self, program: str, *arguments: str) -> bytes:
        command = [program, "-c", str(self._folder / "ceph.conf"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout

    def _start(self, program: str, *arguments: str) -> None:
        command = [program, "-c", str(self._folder / "ceph.conf"), "-f", *arguments]
        with (self._folder / f"{program}.out").open("wb") as out:
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=out))

    def __enter__(self) -> Radosgw:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


CEPH = """[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor}]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
mon data = {folder}/mon
osd data = {folder}/osd
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
"""
