"""The first launch in a new kernel, against the imports that its template has to do."""

from __future__ import annotations

from benchmarks._report import JOB, Kernel, median, report, seconds

ROUNDS = 3


def main() -> None:
    took, imports = [], []
    for _ in range(ROUNDS):
        kernel = Kernel()
        kernel.check(JOB)
        first = kernel.check("from ddp_lab import launch").seconds
        took.append(first + kernel.check("_ = launch(job, nproc_per_node=4)").seconds)
        kernel.check("from ddp_lab.launcher import client")
        imports.append(kernel.value("client.wait_until_warm().import_seconds"))
        kernel.shutdown()
    ratio = median(a / b for a, b in zip(took, imports, strict=True))
    rows = [
        ["import ddp_lab and launch", "the template's imports", "ratio"],
        [seconds(median(took)), seconds(median(imports)), f"{ratio:.2f}"],
    ]
    report("The first launch in a new kernel: at most 1.3 of the template's imports", rows)


if __name__ == "__main__":
    main()
