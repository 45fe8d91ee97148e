"""What cannot be sent is found with the path to it."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from autoplan.sweep.pickling import check_picklable
from searchspace.errors import SweepError


@dataclass
class Holder:
    inner: Any


def closure(over: Any) -> Any:
    return lambda: over


def test_lambdas_closures_and_local_classes_are_fine() -> None:
    class Local:
        pass

    check_picklable({"f": closure(3), "c": Local(), "k": Local}, "options")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), "search.x"),
        ({"a": [1, threading.Lock()]}, r"search.x\['a'\]\[1\]"),
        (closure(threading.Lock()), "search.x.<closure>.over"),
        (Holder(Holder(threading.Lock())), "search.x.inner.inner"),
        (closure(Holder((1, (i for i in range(3))))), r"search.x.<closure>.over.inner\[1\]"),
    ],
)
def test_the_path_leads_to_the_smallest_part(value: Any, path: str) -> None:
    with pytest.raises(SweepError, match=rf"^{path} \(of type \w+\) cannot be sent to the sweep's workers: .*pickle"):
        check_picklable(value, "search.x")


def test_open_files(tmp_path: Any) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(SweepError, match="of type TextIOWrapper"):
        check_picklable([file], "search.x")
