"""One pool of four workers serves all tests that need real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoplan.runtime.launch import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_seconds=60) as workers:
        yield workers
