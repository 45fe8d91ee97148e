"""Ranks as processes of this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

from autoplan.launch import is_rank, start_ranks


def ranks(tmp_path: Path, code: str, count: int = 3, **options: float) -> object:
    return start_ranks([sys.executable, "-c", f"folder = {str(tmp_path)!r}\n" + code], count, **options)


def test_each_rank_gets_torchruns_environment(tmp_path: Path) -> None:
    code = """
import os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
open(f"{folder}/{os.environ['RANK']}", "w").write(" ".join(os.environ[n] for n in names))
"""
    assert ranks(tmp_path, code) is None
    seen = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [line[:5] for line in seen] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert len({line[5] for line in seen}) == 1


def test_the_first_failure_is_reported_and_the_others_are_ended(tmp_path: Path) -> None:
    code = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no luck")
open(f"{folder}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""
    start = time.monotonic()
    failure = ranks(tmp_path, code, grace_s=1.5)
    assert time.monotonic() - start < 30
    assert failure is not None and (failure.rank, failure.code) == (1, 1)
    assert str(failure) == "rank 1 failed (exit code 1)\nno luck"
    for file in tmp_path.glob("pid*"):
        assert not Path(f"/proc/{file.read_text()}").exists()


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    code = "import os, signal\nif os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)"
    failure = ranks(tmp_path, code)
    assert str(failure) == "rank 2 failed (killed by SIGKILL)"


def test_others_may_end_with_an_error_of_their_own(tmp_path: Path) -> None:
    code = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(0.5)
open(f"{folder}/ended{os.environ['RANK']}", "w").close()
sys.exit(4)
"""
    failure = ranks(tmp_path, code, grace_s=30)
    assert failure is not None and failure.code == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ended1", "ended2"]


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    rank = f"import os, time; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid())); "
    script = (
        "import sys; from autoplan.launch import start_ranks; "
        f"start_ranks([sys.executable, '-c', {rank + 'time.sleep(600)'!r}], 2)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and sum(f.stat().st_size > 0 for f in tmp_path.iterdir()) < 2:
        time.sleep(0.05)
    process.send_signal(2)
    _, error = process.communicate(timeout=30)
    assert process.returncode and b"KeyboardInterrupt" in error
    assert len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():
        assert not Path(f"/proc/{file.read_text()}").exists()


def test_is_rank() -> None:
    assert is_rank({"RANK": "0", "WORLD_SIZE": "2"})
    assert not is_rank({"WORLD_SIZE": "2"})
    assert is_rank() == ("RANK" in os.environ)
