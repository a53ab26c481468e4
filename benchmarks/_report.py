"""What the benchmarks share: a real kernel, and a table of what was measured."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import uuid
from collections.abc import Iterable, Sequence

# PYTHONUNBUFFERED would make ranks write every piece of a line at once.
for _name in ("PYTHONUNBUFFERED", "DDP_LAB_OUTPUT", "DDP_LAB_START"):
    os.environ.pop(_name, None)
os.environ.setdefault("DDP_LAB_TESTS", uuid.uuid4().hex)  # the harness marks what it starts

from tests.harness import Cell, Kernel  # noqa: E402

__all__ = ["Cell", "Kernel", "median", "report", "seconds"]

JOB = """\
def job():
    import torch, torch.distributed as dist
    numbers = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(numbers)
    return numbers[0].item()
"""
"""An all_reduce, as a cell defines it."""


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def seconds(value: float) -> str:
    """`1.23 s` or `4.5 ms`."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def report(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first row is its head."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(
        f"\n{title}  ({os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()})"
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join(cells).rstrip())
    sys.stdout.flush()
