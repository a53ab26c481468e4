"""What a World costs: a call, 64 ranks, and memory."""

from __future__ import annotations

from benchmarks._report import JOB, Kernel, median, report, seconds

CALLS = """\
def nothing(): pass
def call():
    began = time.perf_counter()
    world.run(nothing)
    return time.perf_counter() - began
times = []
for _ in range(7):
    with World(nproc_per_node={size}) as world:
        times.append([call() for _ in range(20)])
"""
MEMORY = """\
def private():
    import psutil, torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    memory = psutil.Process().memory_full_info().uss
    dist.barrier()
    return memory
memory = list(launch(private, nproc_per_node=8))
"""


def main() -> None:
    kernel = Kernel()
    kernel.warm_up()
    kernel.check(JOB)
    rows = [["ranks", "first run, start included", "second run", "later runs"]]
    for size in (2, 4, 8):
        kernel.check(CALLS.format(size=size))
        first, second, *later = zip(*kernel.value("times"), strict=True)
        columns = first, second, [took for run in later for took in run]
        rows.append([str(size), *(seconds(median(column)) for column in columns)])
    report("A World's run of an empty function: under 10 ms from the second on", rows)

    many = [kernel.check("_ = launch(job, nproc_per_node=64)").seconds for _ in range(3)]
    kernel.check(MEMORY)
    memory = [uss / 2**20 for uss in kernel.value("memory")]
    rows = [
        ["64 ranks start, all_reduce, end", "private memory a rank, of 8", "highest"],
        [seconds(median(many)), f"{median(memory):.1f} MiB", f"{max(memory):.1f} MiB"],
    ]
    report("Many ranks: under 30 MB each", rows)
    kernel.shutdown()


if __name__ == "__main__":
    main()
