"""How much of this machine the process may use: its affinity, and what its control groups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def usable_cores(system: Path = Path("/")) -> float:
    """The cores that this process may use: its affinity, and its cgroups' quota of time."""
    with suppress(AttributeError):  # not on macOS and Windows
        return min([float(len(os.sched_getaffinity(0))), *_core_limits(system)])
    return float(os.cpu_count() or 1)


def _core_limits(system: Path) -> Iterator[float]:
    for group in _cgroups(system, "cpu"):
        with suppress(OSError, ValueError):  # v2: "150000 100000" or "max 100000"
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with suppress(OSError, ValueError):
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                yield int(quota) / int(period)


def memory_limits(system: Path = Path("/")) -> list[int]:
    """Bytes that this process's cgroups allow, one entry for each group with a limit."""
    limits = []
    for group in _cgroups(system, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return limits


def _cgroups(system: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups (v2 and v1), from its own up to the root.

    In a container the path may be the host's, which is not there: readers skip what is missing.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = system / "sys/fs/cgroup" / controllers
        own = PurePosixPath(path.lstrip("/"))
        yield from (mount / folder for folder in (own, *own.parents))
