"""Settings of all tests: one thread per process, no downloads, the same Hypothesis examples in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Before torch, ray or transformers is imported; child processes inherit them.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("autoplan", deadline=None, derandomize=True, database=None)
settings.load_profile("autoplan")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked ``gpu`` is skipped, by name of the reason, where there is no CUDA device."""
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Four workers, one ``WorkerPool`` for all tests that need real processes."""
    from autoplan.runtime.launch import WorkerPool

    with WorkerPool(4, timeout_seconds=60) as workers:
        yield workers
