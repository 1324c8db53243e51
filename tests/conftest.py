"""What all tests share: one thread, tiny models and corpora, and honest skips."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from ranks import Ranks
from stores import S3_ENVIRONMENT, S3Server, forget_stores, have_moto
from support import need, tiny_run


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # how long an example takes says nothing on a machine that does other things too
    settings.register_profile("rostra", deadline=None)
    settings.load_profile("rostra")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long forms run only when asked for: `pytest -m soak`."""
    if config.option.markexpr:
        return
    long = [item for item in items if "soak" in item.keywords]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shards of tests go to a folder of their own, shared by the tests of one session."""
    os.environ["ROSTRA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A process group that a test leaves behind would change what all later ones do."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Started processes that form gloo groups: `ranks.run(2, task, ...)`."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's S3 server, started once; its address is in the environment, for processes too."""
    need(have_moto(), "moto[server], s3fs")
    server = S3Server()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": server.address}.items():
            environment.setenv(name, value)
        forget_stores()
        yield server
    server.kill()
    forget_stores()


@pytest.fixture
def s3(s3_server: S3Server) -> str:
    """The URL of an empty bucket."""
    bucket = f"s3://test-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(bucket)
    return bucket


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents with something to learn in them."""
    folder = tmp_path_factory.mktemp("corpus")
    words = "the sun rose over a quiet harbour while small boats went out to sea again".split()
    for index in range(40):
        line = " ".join(words[(index * step) % len(words)] for step in range(1, 60))
        (folder / f"{index:02}.txt").write_text(f"Chapter {index}.\n{line}.\n" * 4)
    return folder


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The config of a tiny run in this test's folder; keyword arguments replace keys of a
    section."""
    return partial(tiny_run, corpus, tmp_path / "run")
