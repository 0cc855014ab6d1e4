"""Processes and locks: who is alive, who waits for whom, and what must end together (Linux)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return what tells a process from every other one: pid, start time in ticks since boot, boot id."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "started": _stat(number)[1], "boot_id": boot_id()}


def is_alive(process: dict[str, Any]) -> bool:
    """Return whether the process of an `identity` still runs on this machine."""
    if process["boot_id"] != boot_id():
        return False
    state, started = _stat(int(process["pid"]))
    return started == process["started"] and state not in "ZX"


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> tuple[str, int]:
    """Return state and start time of a process; ("X", -1) if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X", -1
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return fields[0], int(fields[19])


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies, also when that is killed.

    `parent`: pid it is expected to have; if that one is gone already, the process ends at once.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != expected:  # it died before the request
        os.kill(os.getpid(), number)


@contextmanager
def exclusive(path: Path, waiting: str | None = None) -> Iterator[None]:
    """Hold an advisory lock on a file, waiting for it; the kernel releases it when the process ends.

    `waiting`: printed to stderr if somebody else holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                print(f"margrpo: {waiting}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def try_exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock of `exclusive` if it is free; yields whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def start_group(
    command: Sequence[str],
    cwd: Path,
    environment: dict[str, str] | None = None,
    output: IO[str] | None = None,
) -> subprocess.Popen[str]:
    """Start a command in a process group of its own that ends with this process.

    `output`: file for all that it prints; default one pipe.
    """
    launcher = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]
    return subprocess.Popen(
        launcher,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
        start_new_session=True,
    )


def stop_group(process: subprocess.Popen[str], patience: float = 5.0) -> None:
    """End a process group of `start_group`: ask, then kill what is left after `patience` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.05)
        if not _group_lives(process):
            return


def _group_lives(process: subprocess.Popen[str]) -> bool:
    process.poll()  # reaps the leader
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def spawn_detached(command: Sequence[str], cwd: Path, log: Path) -> None:
    """Start a command that outlives this process; its output goes to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        subprocess.Popen(
            list(command),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


if __name__ == "__main__":  # the launcher of start_group: bind to the parent, then become the command
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
