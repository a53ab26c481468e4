"""The kernel is killed or restarted: all that it has started ends with it, whatever it is doing."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.harness import Kernel, Traces, assert_nothing_new, wait_until

# .02 to .3 s were seen after the kernel's death. While the template imports torch it looks ten
# times a second, except that the import of one large C library may take longer.
PROMISE = 1.5

# What each rank does when the kernel dies; it says "there" just before.
ZOO = """\
import torch

def all_reduce():
    import torch.distributed as dist
    numbers = torch.ones(3)
    print("there")
    dist.all_reduce(numbers)

def compute():
    print("there")
    while True: pass

def compute_in_C():  # holds the GIL, handles no signal in Python
    print("there")
    sum(range(10**12))

def ignore_signals():
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    print("there")
    while True: pass

def stop():
    print("there")
    os.kill(os.getpid(), signal.SIGSTOP)

def load():
    from torch.utils.data import DataLoader
    for _ in DataLoader(torch.arange(10**6), num_workers=2):
        break
    batches = iter(DataLoader(range(10**9), num_workers=2))
    next(batches)
    print("there")
    for _ in batches: pass

def daemonize():
    inner, outer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(outer, b"!")
            time.sleep(600)
        os._exit(0)
    os.read(inner, 1)
    print("there")
    time.sleep(600)

def run_a_program():
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("there")
    time.sleep(600)

def chatter():
    print("there")
    while True: print("x" * 1000)

ANIMALS = [all_reduce, compute, compute_in_C, ignore_signals, stop, load, daemonize, run_a_program,
           chatter]

def zoo():
    ANIMALS[int(os.environ["RANK"])]()
"""
ANIMALS = 9


def start_zoo(kernel: Kernel) -> None:
    """Ranks that are at all kinds of things."""
    kernel.check(ZOO)
    running = kernel.begin(f"launch(zoo, nproc_per_node={ANIMALS})")
    for rank in range(ANIMALS):
        running.wait_for(f"[rank {rank}] there")
    names = [process.name for process in kernel.others()]
    assert len(names) >= 2 + ANIMALS + 2 + 2  # template, supervisor; loader workers, others


def traces_without(kernel: Kernel) -> Traces:
    """All that there is now, apart from what the kernel has started."""
    traces = Traces.now()
    traces.processes -= set(kernel.others())
    traces.sockets = {(pid, address) for pid, address in traces.sockets if pid == os.getpid()}
    traces.files = {name for name in traces.files if not name.startswith("ddp-lab-")}
    return traces


def kill(kernel: Kernel) -> None:
    """Kill the kernel and see that nothing is left but what was there without it."""
    before = traces_without(kernel)
    kernel.kill()
    print(f"gone after {wait_until(lambda: not kernel.others(), PROMISE, 'all gone'):.3f} s")
    kernel.manager.provisioner.process.wait()
    assert_nothing_new(before)


@pytest.mark.soak
def test_killed_while_ranks_are_busy(own_kernel: Kernel) -> None:
    start_zoo(own_kernel)
    kill(own_kernel)


@pytest.mark.soak
def test_killed_while_it_starts(cold_kernel: Kernel) -> None:
    """While the template imports torch, or while the first ranks start."""
    moment = random.uniform(0, random.choice([0.5, 3]))
    print(f"killed after {moment:.3f} s")
    source = "print('begins', flush=True)\nfrom ddp_lab import launch\n"
    running = cold_kernel.begin(source + "launch(lambda: __import__('time').sleep(600))")
    running.wait_for("begins")
    time.sleep(moment)
    kill(cold_kernel)


@pytest.mark.soak
def test_killed_while_a_launch_starts_or_ends(own_kernel: Kernel) -> None:
    own_kernel.check("launch(lambda: 0)")
    moment = random.uniform(0, 0.3)
    print(f"killed after {moment:.3f} s")
    running = own_kernel.begin("print('begins', flush=True)\nwhile True: launch(lambda: 0)")
    running.wait_for("begins")
    time.sleep(moment)
    kill(own_kernel)


@pytest.mark.soak
def test_killed_while_the_template_imports_what_is_useful_later(own_kernel: Kernel) -> None:
    """It does so when no ranks have run for a second."""
    own_kernel.check("launch(lambda: 0)")
    time.sleep(random.uniform(0.9, 2))
    kill(own_kernel)


@pytest.mark.soak
def test_killed_while_a_world_idles(own_kernel: Kernel) -> None:
    """Also when a child of the kernel holds copies of its sockets open."""
    kernel = own_kernel
    kernel.check("world = World(3)\nworld.put(x=1)")
    child = int(kernel.check("pid = os.fork()\nif pid == 0: time.sleep(600)\nprint(pid)").stdout)
    kernel.kill()
    try:
        wait_until(lambda: [p.pid for p in kernel.others()] == [child], PROMISE, "all gone but one")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("idle", [True, False], ids=["idle", "busy"])
def test_restarted(own_kernel: Kernel, idle: bool) -> None:
    """The next launch works, from a template of the new kernel's."""
    kernel = own_kernel
    if idle:
        kernel.check("world = World(2)\nworld.put(x=1)")
    else:
        start_zoo(kernel)
    old = set(kernel.others())
    assert len(old) >= 4
    began = time.monotonic()
    kernel.restart()
    print(f"restarted in {time.monotonic() - began:.3f} s")
    wait_until(lambda: not old & set(kernel.others()), PROMISE, "all of the old kernel's gone")
    kernel.prepare()
    assert kernel.check("print(list(launch(lambda: 7)))").stdout.endswith("[7, 7]\n")
    wait_until(lambda: len(kernel.others()) == 1, 1, "only the new template is left")


@pytest.mark.soak
def test_shut_down(own_kernel: Kernel) -> None:
    kernel = own_kernel
    before = traces_without(kernel)
    kernel.check("world = World(2)\nworld.put(x=1)")
    start_zoo(kernel)
    began = time.monotonic()
    kernel.manager.shutdown_kernel()
    print(f"shut down in {time.monotonic() - began:.3f} s")
    wait_until(lambda: not kernel.others(), PROMISE, "all gone")
    assert_nothing_new(before)
