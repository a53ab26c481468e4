"""Where there is no fork, ranks are spawned: slower, with the same promises."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.harness import Kernel, Traces, assert_nothing_new, patience, run_script, wait_until

# Ranks get the same grace as forked ones. What it takes to start them, 3 to 6 s, comes on top.
PROMISE = 2.0


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel(DDP_LAB_START="spawn")
    kernel.prepare()
    kernel.check("import torch, torch.distributed as dist")
    yield kernel
    kernel.shutdown()


def test_functions_output_failures_and_leftovers(kernel: Kernel) -> None:
    """One World for all of it: each start costs seconds."""
    before = Traces.now()
    setting = """\
        class Scale:
            def __init__(self, factor):
                self.factor = factor

        factor = 3
        scale = Scale(2)

        def total(start):
            numbers = torch.full((2,), start + dist.get_rank()) * factor
            dist.all_reduce(numbers)
            print("hello from", dist.get_rank())
            print("oops", file=sys.stderr)
            return (scale.factor * numbers).tolist(), os.environ["LOCAL_RANK"], kept

        def fail():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(600)

        world = World(2)
        world.put(kept=5)"""
    kernel.check(textwrap.dedent(setting))
    assert kernel.template() is None
    cell = kernel.check("results = world.run(total, 1.0)")
    assert sorted(cell.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert sorted(cell.stderr.splitlines()) == ["[rank 0] oops", "[rank 1] oops"]
    assert kernel.value("list(results)") == [([18.0] * 2, "0", 5), ([18.0] * 2, "1", 5)]

    cell = kernel.run("world.run(lambda: undefined)")
    assert cell.error is not None and cell.seconds < patience(PROMISE)
    assert cell.error.message.startswith("rank 0 of 2 raised NameError: name 'undefined' is not")
    assert "lost" not in cell.error.message
    running = kernel.begin("world.run(lambda: [print('there'), time.sleep(600)])")
    running.wait_for("[rank 1] there")
    kernel.interrupt()
    pressed = time.monotonic()
    cell = running.finish()
    assert time.monotonic() - pressed < patience(PROMISE)
    assert cell.error is not None and cell.error.name == "KeyboardInterrupt"
    assert kernel.value("world.get('kept')") == [5, 5]

    cell = kernel.run("world.run(fail)")
    assert cell.error is not None and cell.seconds < patience(PROMISE)
    first, second, third, last = cell.error.message.splitlines()
    assert first == "rank 1 of 2 was killed by SIGSEGV"
    assert second.startswith("  In[") and ", in fail:  os.kill(os.getpid()" in second
    assert third.startswith("  rank 0 was running (In[")
    assert "variables are lost" in last
    assert_nothing_new(before)


@pytest.mark.soak
def test_kernel_that_is_killed() -> None:
    kernel = Kernel(DDP_LAB_START="spawn")
    try:
        before = Traces.now()
        kernel.prepare()
        source = """\
            def work():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        print("there", flush=True)
                        time.sleep(600)
                    os._exit(0)
                time.sleep(600)
            launch(work)"""
        running = kernel.begin(textwrap.dedent(source))
        running.wait_for("[rank 0] there")
        running.wait_for("[rank 1] there")
        kernel.kill()
        wait_until(lambda: not kernel.others(), PROMISE, "all gone")
        kernel.manager.provisioner.process.wait()
        assert_nothing_new(before)
    finally:
        kernel.shutdown()


@pytest.mark.soak
def test_supervisor_that_is_killed(kernel: Kernel) -> None:
    before = Traces.now()
    source = """\
        def work():
            print("there")
            if dist.get_rank() == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        launch(work)"""
    cell = kernel.run(textwrap.dedent(source))
    assert cell.error is not None
    assert cell.error.message == "the supervisor of the ranks was killed"
    assert_nothing_new(before, timeout=1)


def test_script_without_a_guard() -> None:
    """Ranks don't import the script, so it needs none."""
    source = "from ddp_lab import launch\nprint(launch(lambda: 7, nproc_per_node=1)[0])"
    done = run_script(source, "env", "DDP_LAB_START=spawn", sys.executable, "-c")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
