"""A store that checks secrets, and some thousand objects on it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rostra.config.sources import JsonlSource
from rostra.data.readers.jsonl import JsonlReader
from rostra.data.sources import BadRecords
from rostra.errors import RequestError
from rostra.files import find_files
from stores import S3_ENVIRONMENT, Radosgw, endpoint
from support import need

pytestmark = pytest.mark.soak
OBJECTS = 3000


@pytest.fixture(scope="module")
def gateway() -> Iterator[Radosgw]:
    need(all(map(shutil.which, ("radosgw", "ceph-mon", "ceph-osd"))), "radosgw, ceph-mon, ceph-osd")
    with (
        tempfile.TemporaryDirectory(prefix="ceph-") as folder,  # a short path, for its sockets
        Radosgw(Path(folder)) as server,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in S3_ENVIRONMENT.items():
            environment.setenv(name, value)
        environment.setenv("AWS_ACCESS_KEY_ID", server.key)
        environment.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
        with endpoint(server.address):
            yield server


def test_thousands_of_objects(gateway: Radosgw) -> None:
    fs = fsspec.filesystem("s3")
    fs.mkdir("many")
    line = json.dumps({"text": "some text"}).encode()
    fs.pipe({f"many/{k % 7}/{k:05d}.jsonl": line for k in range(OBJECTS)}, batch_size=32)
    found = dict(find_files("s3://many", (".jsonl",)))
    assert len(found) == OBJECTS
    assert list(found) == sorted(found)
    assert len(list(find_files("s3://many/3/*.jsonl"))) == len(range(3, OBJECTS, 7))
    reader = JsonlReader(0, JsonlSource(type="jsonl", path="s3://many/**/*.jsonl"))
    bad = BadRecords("fail", print)
    rows = sum(b.num_rows for part in reader.parts(bad)[:500] for b in reader.read(part, bad))
    assert rows == 500


def test_a_wrong_secret_is_refused(gateway: Radosgw, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SECRET_ACCESS_KEY", "wrong"), ("ACCESS_KEY_ID", "nobody")):
        with monkeypatch.context() as patched:
            patched.setenv(f"AWS_{name}", value)
            with (
                endpoint(gateway.address),
                pytest.raises(
                    RequestError, match=r"s3://many: access refused: .*AWS_ACCESS_KEY_ID"
                ),
            ):
                list(find_files("s3://many"))
