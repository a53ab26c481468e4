"""How fast a large tensor comes back from a rank, against this machine's own memory."""

from __future__ import annotations

from benchmarks._report import Kernel, median, report

PREPARE = """\
import mmap
def write():
    # What sending must do at least: the tensor's bytes, once, into an anonymous file in memory.
    began = time.perf_counter()
    descriptor = os.memfd_create("benchmark")
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)
    return time.perf_counter() - began
def prepare():
    global large
    large = torch.ones(100_000_000)
def give():
    return large if dist.get_rank() == 0 else None
def send():
    began = time.perf_counter()
    got = world.run(give)
    took = time.perf_counter() - began
    assert got[0][-1] == 1
    return took
data = torch.ones(100_000_000).numpy()
world = World(nproc_per_node=2)
world.run(prepare)
"""


def main() -> None:
    kernel = Kernel()
    kernel.warm_up()
    kernel.check(PREPARE)
    kernel.check("pairs = [(write(), send()) for _ in range(8)][1:]")
    pairs = kernel.value("pairs")
    kernel.check("world.shutdown()")
    kernel.shutdown()
    writes, sends = ([0.4 / took for took in times] for times in zip(*pairs, strict=True))
    ratio = median(sent / wrote for wrote, sent in zip(writes, sends, strict=True))
    rows = [
        ["pwrite into a memfd", "from a World's rank", "ratio"],
        [f"{median(writes):.2f} GB/s", f"{median(sends):.2f} GB/s", f"{ratio:.2f}"],
    ]
    report("A tensor of 400 MB: at least half the rate of writing it once", rows)


if __name__ == "__main__":
    main()
