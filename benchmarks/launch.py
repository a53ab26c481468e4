"""A warm `launch` in a notebook, against torch's own fork and spawn of the same job in a script."""

from __future__ import annotations

import subprocess
import sys

from benchmarks._report import JOB, Kernel, median, report, seconds

ROUNDS, SPAWNS = 15, 1  # a spawn takes seconds
SIZES = (2, 4, 8)


def script() -> None:
    """Run `fork 4` or `spawn 8`, as read from stdin, and print the seconds that it took."""
    import socket
    import time

    import torch.multiprocessing

    for line in sys.stdin:
        method, size = line.split()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        began = time.perf_counter()
        torch.multiprocessing.start_processes(
            worker, (int(size), port), nprocs=int(size), start_method=method
        )
        print(time.perf_counter() - began, flush=True)


def worker(rank: int, size: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    numbers = torch.full((1000,), float(rank))
    dist.all_reduce(numbers)
    assert numbers[0] == size * (size - 1) / 2
    dist.destroy_process_group()  # without it torch aborts now and then


def main() -> None:
    command = [sys.executable, "-m", "benchmarks.launch", "script"]
    pipe = subprocess.PIPE
    rival = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert rival.stdin is not None and rival.stdout is not None
    kernel = Kernel()
    kernel.warm_up()
    kernel.check(JOB)

    def run(method: str, size: int) -> float:
        if method == "launch":
            return kernel.check(f"_ = launch(job, nproc_per_node={size})").seconds
        print(method, size, file=rival.stdin, flush=True)
        return float(rival.stdout.readline())  # type: ignore[union-attr]

    rows = [["ranks", "launch", "fork", "launch / fork", "spawn", "spawn / launch"]]
    for size in SIZES:
        took: dict[str, list[float]] = {"launch": [], "fork": [], "spawn": []}
        run("launch", size), run("fork", size)
        for turn in range(ROUNDS):
            for method in took:
                if method != "spawn" or turn < SPAWNS:
                    took[method].append(run(method, size))
        launch, fork, spawn = (median(times) for times in took.values())
        ratios = f"{launch / fork:.2f}", f"{spawn / launch:.1f}"
        rows.append(
            [str(size), seconds(launch), seconds(fork), ratios[0], seconds(spawn), ratios[1]]
        )
    report("A warm launch of an all_reduce: at most 1.25 of fork, spawn at least 15 times", rows)
    rival.stdin.close()
    rival.wait()
    kernel.shutdown()


if __name__ == "__main__":
    script() if sys.argv[1:] == ["script"] else main()
