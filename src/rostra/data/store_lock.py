"""One process at a time for work on a store, which has no locks: an object that its owner renews.

Should two go on at once all the same (the owner slept for long), both write the same bytes, and
one may have to be started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

import psutil

from rostra import files
from rostra.errors import RequestError

RENEWED_SECONDS = 10.0
STALE_SECONDS = 60.0  # without a renewal: by the clock of the one that waits
SETTLED_SECONDS = 2.0  # in which another that takes over at the same time is seen
POLL_SECONDS = 1.0


class StoreLock:
    """The lock at a URL, held inside `with`.

    A lock whose owner was a process of this machine that is no longer there, or did not renew
    it for a minute, is taken over.

    Args:
        say: told whom this waits for, and which stale lock is taken over.
    """

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self._url, self._say = url, say
        self._mine: dict[str, Any] = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "token": uuid.uuid4().hex,
            "renewed": 0,
        }
        self._left = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        while not files.put_new(self._content(), self._url) and not self._is_mine():
            if self._wait_and_take_over():
                break
        self._renewing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._renewing.join()
        with contextlib.suppress(OSError, RequestError):  # a store that is gone: it goes stale
            if self._is_mine():
                files.remove(self._url)

    def _wait_and_take_over(self) -> bool:
        """Wait until the lock is free (false), or was taken over from a dead owner (true)."""
        seen, since, told = None, 0.0, False
        while (owner := self._owner()) is not None:
            now = time.monotonic()
            if owner != seen:
                seen, since = owner, now
            who = f"process {owner.get('process')} on {owner.get('host')}"
            if _is_dead(owner) or now - since > STALE_SECONDS:
                self._say(
                    f"{who}, which was preparing the same data since {owner.get('since')}, has "
                    "stopped without a word; going on with its work"
                )
                files.put_bytes(self._content(), self._url)
                time.sleep(SETTLED_SECONDS)
                if self._is_mine():
                    return True
            elif not told:
                told = True
                self._say(f"{who} is preparing the same data; waiting for it")
            time.sleep(POLL_SECONDS)
        return False

    def _renew(self) -> None:
        while not self._left.wait(RENEWED_SECONDS):
            with contextlib.suppress(OSError, RequestError):  # the next one may get through
                if not self._is_mine():
                    return
                self._mine["renewed"] += 1
                files.put_bytes(self._content(), self._url)

    def _content(self) -> bytes:
        return json.dumps(self._mine).encode()

    def _owner(self) -> dict[str, Any] | None:
        """What the lock says; None when there is none."""
        try:
            owner = json.loads(files.read_bytes(self._url))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _is_mine(self) -> bool:
        return (self._owner() or {}).get("token") == self._mine["token"]


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether it is known to be: only of this machine can that be told."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(owner["process"])
        started = abs(process.create_time() - owner["process_started"]) < 1
        return process.status() == psutil.STATUS_ZOMBIE or not started
    except psutil.NoSuchProcess:
        return True
    except (KeyError, TypeError):
        return False
