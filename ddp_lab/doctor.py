"""What this machine offers to the course: `ddp-lab doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddp_lab.launcher.limits import memory_limits, usable_cores

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report, with advice where something is missing."""

    name: str
    value: str
    advice: str = ""
    fatal: bool = False

    def __str__(self) -> str:
        lines = [f"{self.name:<14}{self.value}".replace("\n", "\n" + 14 * " ")]
        if self.advice:
            lines.append(f"{'':<14}-> {self.advice}")
        return "\n".join(lines)


def examine() -> Iterator[Finding]:
    """The findings one by one: those that cost nothing first, a test launch last."""
    checks: list[Callable[[], Finding]] = [
        software,
        cores,
        memory,
        shared_memory,
        torch_build,
        gpus,
        jupyter,
        notebook_tools,
        launcher,
        test_launch,
    ]
    for check in checks:
        yield check()


def software() -> Finding:
    system = f"{platform.system()} {platform.release()}"
    value = f"{version('ddp-lab')}, Python {platform.python_version()}, {system}"
    tried = platform.system() == "Linux"
    return Finding("ddp-lab", value, "" if tried else "Only Linux was tried: expect rough edges.")


def cores() -> Finding:
    usable, total = usable_cores(), os.cpu_count() or 1
    value = f"{usable:g} of {total}" if usable < total else f"{total}"
    advice = "" if usable >= 2 else "With one core ranks take turns: expect no speed-up from two."
    return Finding("cores", value, advice)


def memory() -> Finding:
    import psutil

    system = psutil.virtual_memory()
    total = min([system.total, *memory_limits()])
    free = min(system.available, total)
    advice = "" if free >= 2 * GIB else "Little is free: close other kernels, launch 2 to 4 ranks."
    return Finding("memory", f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free", advice)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.is_dir():
        return Finding(str(folder), "none on this system")
    usage = shutil.disk_usage(folder)
    value = f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free"
    advice = "DataLoader workers pass batches here: start a container with --shm-size=1g."
    return Finding(str(folder), value, "" if usage.free >= GIB / 4 else advice)


def torch_build() -> Finding:
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    value = f"{torch.__version__}, {torch.get_num_threads()} threads, gloo " + (
        "available" if gloo else "missing"
    )
    return Finding("torch", value, "" if gloo else "Install a torch that was built with gloo.")


def gpus() -> Finding:
    import torch
    import torch.distributed as dist

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        built = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU torch"
        reason = str(caught[0].message).splitlines()[0] if caught else ""
        if not reason and Path("/dev/nvidia0").exists():
            reason = "There is an NVIDIA device that torch cannot use: is the driver too old?"
        return Finding("GPUs", f"none ({built}): ranks run on the CPU", reason)
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "no NCCL"
    advice = "" if has_nccl else "Ranks will use gloo: this torch was built without NCCL."
    return Finding("GPUs", f"{count} x {names}, CUDA {torch.version.cuda}, {nccl}", advice)


def jupyter() -> Finding:
    return _packages("JupyterLab", ["jupyterlab", "ipykernel", "ipywidgets"])


def notebook_tools() -> Finding:
    return _packages("notebooks", ["nbval", "nbclient", "nbformat", "matplotlib", "sklearn"])


def _packages(name: str, modules: list[str]) -> Finding:
    """The versions of packages that import; advice for those that do not."""
    found, missing = [], []
    for module in modules:
        package = "scikit-learn" if module == "sklearn" else module
        try:
            import_module(module)
            found.append(f"{package} {version(package)}")
        except (ImportError, PackageNotFoundError):
            missing.append(package)
    value = ", ".join([*found, *(f"{package} missing" for package in missing)])
    return Finding(name, value, f"pip install {' '.join(missing)}" if missing else "")


def launcher() -> Finding:
    """How ranks will start, and what they will speak."""
    import torch

    from ddp_lab.launcher.client import forks

    try:
        forked = forks()
    except ValueError as error:
        return Finding("launcher", "cannot start", str(error))
    start = "forks ranks from a template process" if forked else "spawns ranks"
    count = torch.cuda.device_count()
    backend = f"NCCL for up to {count} ranks, gloo for more" if count else "gloo on the CPU"
    advice = "" if forked else "A launch takes seconds; where ranks are forked, a tenth of one."
    return Finding("launcher", f"{start}; {backend}", advice)


def test_launch() -> Finding:
    """Two launches of 2 ranks: the first starts the template, the second shows the usual cost."""
    try:
        from ddp_lab.launcher.client import forks, wait_until_warm

        first = _timed_launch()
        if forks():
            wait_until_warm()
        second = _timed_launch()
    except Exception as error:  # whatever it is, the report shall say it
        value = f"failed: {type(error).__name__}: {error}"
        advice = "Nothing in the course works until this does."
        return Finding("test launch", value, advice, fatal=True)
    value = f"2 ranks, all_reduce: {second:.2f} s; the first one {first:.1f} s, imports included"
    return Finding("test launch", value)


def _timed_launch() -> float:
    """Seconds for a launch of 2 ranks that add their ones. Raises when the sum is wrong."""
    from ddp_lab import launch

    start = time.perf_counter()
    sums = launch(_sum_of_ones, nproc_per_node=2, timeout=60, output="quiet")
    if list(sums) != [2.0, 2.0]:
        raise RuntimeError(f"the ranks got {list(sums)} where 1 + 1 is 2")
    return time.perf_counter() - start


def _sum_of_ones() -> float:
    import torch
    import torch.distributed as dist

    on_gpu = dist.get_backend() == "nccl"
    one = torch.ones(1, device=f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    dist.all_reduce(one)
    return one.item()
