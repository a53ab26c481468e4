"""How soon a printed line is in the cell, and how many lines a second get there."""

from __future__ import annotations

import queue
import re
import time

from benchmarks._report import Kernel, median, report, seconds

TICKS = """\
def tick():
    import random
    for _ in range(100):
        time.sleep(random.uniform(0, .06))
        print("at", time.time())
_ = launch(tick, nproc_per_node={size})
"""
FLOOD = """\
def flood():
    for i in range(25_000): print(str(i).ljust(80, "."))
_ = launch(flood, nproc_per_node=4)
"""


def delays(kernel: Kernel, size: int) -> list[float]:
    """Seconds from print in a rank to the arrival of its message here, for each line."""
    message_id = kernel.client.execute(TICKS.format(size=size))
    found = []
    while True:
        try:
            message = kernel.client.get_iopub_msg(timeout=10)
        except queue.Empty:
            return found
        now = time.time()
        content = message["content"]
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if content.get("execution_state") == "idle":
            kernel.client.get_shell_msg(timeout=10)
            return found
        found += [now - float(at) for at in re.findall(r"at ([\d.]+)\n", content.get("text", ""))]


def main() -> None:
    kernel = Kernel()
    kernel.warm_up()
    rows = [["ranks", "lines", "median", "95th of 100", "longest"]]
    for size in (2, 4):
        found = sorted(delays(kernel, size))
        row = median(found), found[len(found) * 95 // 100], found[-1]
        rows.append([str(size), str(len(found)), *map(seconds, row)])
    report("From print in a rank to the cell: a median under 50 ms", rows)

    rows = [["lines that arrived", "seconds", "messages", "lines a second"]]
    for _ in range(3):
        cell = kernel.check(FLOOD)
        lines = cell.stdout.count("\n")
        rate = f"{lines / cell.seconds:,.0f}"
        rows.append([f"{lines:,}", f"{cell.seconds:.2f}", str(len(cell.outputs)), rate])
    report("4 ranks print 25,000 lines of 80 characters each: under 5 s", rows)
    kernel.shutdown()


if __name__ == "__main__":
    main()
