"""Locks and processes, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline import processes

SLEEP = "import time; time.sleep(600)"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def test_identity_tells_processes_apart() -> None:
    child = python(SLEEP)
    process = processes.identity(child.pid)
    assert processes.is_alive(process)
    assert processes.is_alive(processes.identity())
    assert not processes.is_alive(process | {"started": process["started"] - 1})  # same pid, earlier process
    assert not processes.is_alive(process | {"boot_id": "another boot"})
    child.kill()
    assert wait_until(lambda: not processes.is_alive(process))  # a zombie until waited for
    child.wait()
    assert not processes.is_alive(process)


def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys, time
from pathlib import Path
child = "import os, time; from pathlib import Path; from pipeline import processes; processes.die_with_parent();"
child += "Path({str(tmp_path / "ready")!r}).touch(); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child])
print(process.pid, flush=True)
process.wait()
"""
    parent = python(program)
    assert parent.stdout is not None
    child = processes.identity(int(parent.stdout.readline()))
    assert wait_until((tmp_path / "ready").exists)
    assert processes.is_alive(child)
    parent.kill()  # SIGKILL: the parent cannot tell its child
    parent.wait()
    assert wait_until(lambda: not processes.is_alive(child))


def test_child_ends_if_its_parent_is_gone_already() -> None:
    program = "from pipeline import processes; processes.die_with_parent(parent=1 << 22)"
    assert python(program).wait() == -signal.SIGKILL


def test_second_holder_of_a_lock_waits_for_the_first(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from pipeline import processes
with processes.exclusive(Path(sys.argv[1]), "somebody else is at it"):
    print("got it", time.time(), flush=True)
    time.sleep(float(sys.argv[2]))
"""
    lock = tmp_path / "locks" / "run.lock"
    first = python(program, str(lock), "600")
    assert first.stdout is not None
    first.stdout.readline()
    second = subprocess.Popen(
        [sys.executable, "-c", program, str(lock), "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert second.stderr is not None
    assert second.stderr.readline() == "margrpo: somebody else is at it\n"
    with processes.try_exclusive(lock) as free:
        assert not free
    assert second.poll() is None
    killed = time.time()
    first.kill()  # the kernel releases the lock of a killed process
    assert second.stdout is not None
    assert float(second.stdout.readline().split()[-1]) >= killed
    assert second.wait() == 0
    first.wait()
    with processes.try_exclusive(lock) as free:
        assert free


def test_stop_group_ends_the_whole_tree(tmp_path: Path) -> None:
    program = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits this
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    group = processes.start_group([sys.executable, "-c", program], tmp_path)
    assert group.stdout is not None
    grandchild = processes.identity(int(group.stdout.readline()))
    processes.stop_group(group, patience=0.5)
    assert group.poll() == -signal.SIGKILL
    assert wait_until(lambda: not processes.is_alive(grandchild))


def test_group_ends_with_a_killed_starter(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from pipeline import processes
group = processes.start_group([sys.executable, "-c", {SLEEP!r}], Path({str(tmp_path)!r}))
time.sleep(1)  # until the launcher has become the command
print(group.pid, flush=True)
time.sleep(600)
"""
    starter = python(program)
    assert starter.stdout is not None
    child = processes.identity(int(starter.stdout.readline()))
    assert processes.is_alive(child)
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert wait_until(lambda: not processes.is_alive(child))


def test_detached_command_outlives_its_starter(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from pipeline import processes
code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
processes.spawn_detached([sys.executable, "-c", code], Path({str(tmp_path)!r}), Path({str(tmp_path / "log")!r}))
"""
    assert python(program).wait() == 0
    assert wait_until(lambda: (tmp_path / "log").read_text().strip() != "")
    detached = processes.identity(int((tmp_path / "log").read_text()))
    assert processes.is_alive(detached)
    os.kill(detached["pid"], signal.SIGKILL)
