"""What the launcher needs of the operating system: processes that cannot outlive their parent.

Linux has what it takes (prctl, pidfd, memfd, /proc); elsewhere each function does what it can,
and says so. Nothing here knows of ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator

LINUX = sys.platform == "linux"
_PF_EXITING = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20

# These clean up after others once those have gone (shared memory, semaphores), so at the end
# they get a moment that nobody else gets.
_JANITORS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def _prctl(option: int, argument: int | bytes) -> None:
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the new parent of whatever its descendants leave behind (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes (Linux)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which forked this one, ends (Linux).

    The signal follows the parent's *thread*, so the parent must fork from a thread that lives on.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above took effect
        os._exit(1)


def merge_pages() -> Iterator[None]:
    """Merge this process's memory into huge pages, 2 MiB a step (Linux 6.1 and newer).

    A fork copies one entry for each page, and an exit drops it: with huge pages both take a third
    of the time. Pages that a child then writes to are copied in small pieces, as before.
    """
    if not LINUX:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for span, access, _, _, _, *name in mappings:
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        for piece in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            madvise(piece, _HUGE_PAGE, _MADV_COLLAPSE)  # where it is refused all stays as it was
            yield


def watch_process(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` ends; None where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    return os.pidfd_open(pid)


def is_ending(pid: int) -> bool:
    """Has a process that was there begun to end, whatever it takes it (Linux)?"""
    try:
        with open(f"/proc/{pid}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & _PF_EXITING)


def anonymous_file(name: str) -> int:
    """A descriptor of a file in memory that has no name anywhere, so it cannot be left behind."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return descriptor


def children() -> list[int]:
    """The direct children of this process, orphans that it has adopted included."""
    if not LINUX:
        import psutil

        return [child.pid for child in psutil.Process().children()]
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def reap() -> None:
    """Collect every child that has ended, without waiting."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a child that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants(
    janitor_seconds: float = 0.3, kill_janitors: bool = True, spare: Collection[int] = ()
) -> None:
    """Kill and reap everything below this process, which must have called `adopt_orphans`.

    Those that clean up after others get `janitor_seconds` to end by themselves, and are then left
    alone if `kill_janitors` is False. The children in `spare`, and what is below them, live on.

    Children of the killed become our children, so killing and looking again until there is none
    reaches all of them, even those that called setsid, ignore SIGTERM, or are stopped.
    """
    deadline = time.monotonic() + janitor_seconds
    while pids := [pid for pid in children() if pid not in spare]:
        in_time = time.monotonic() < deadline
        victims = [p for p in pids if not ((in_time or not kill_janitors) and _is_janitor(p))]
        if not (victims or in_time):
            return
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        reap()
        time.sleep(0.001)


def _is_janitor(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return any(name in command for name in _JANITORS)


def memory_kills() -> int:
    """How many processes the system has killed for want of memory since it started (Linux)."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
