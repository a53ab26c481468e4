"""Where a launch may be called: threads, asyncio, two kernels at once, IPython, scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Kernel, Traces, assert_gone_already, patience, run_script, wait_until

TOTAL = """\
import asyncio
def total(start=1.0):
    numbers = torch.full((4,), start)
    dist.all_reduce(numbers)
    print("total")
    return numbers.tolist()
"""
RIGHT = "[[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]"
PROMISE = 2.0


@pytest.fixture(scope="module", autouse=True)
def setting(kernel: Kernel) -> None:
    kernel.check(TOTAL)


@pytest.fixture(scope="module")
def second_kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.warm_up()
    kernel.check(TOTAL)
    yield kernel
    kernel.shutdown()


def check(kernel: Kernel, source: str) -> None:
    """Run a cell; its last line is to print the right result, and both ranks a line."""
    shown = kernel.check(textwrap.dedent(source)).stdout.splitlines()
    assert sorted(shown[:-1]) == ["[rank 0] total", "[rank 1] total"]
    assert shown[-1] == RIGHT


# In a kernel


@pytest.mark.soak
def test_twice_in_a_row(kernel: Kernel) -> None:
    """Two cells, the same cell again, and twice in one cell."""
    for _ in range(2):
        check(kernel, "print(list(launch(total)))")
    shown = kernel.check("for _ in range(3): print(list(launch(total, output='quiet')))").stdout
    assert shown.splitlines() == [RIGHT] * 3


@pytest.mark.soak
def test_from_a_thread(kernel: Kernel) -> None:
    check(
        kernel,
        """\
        found = []
        thread = threading.Thread(target=lambda: found.append(launch(total)))
        thread.start()
        thread.join()
        print(list(found[0]))""",
    )


@pytest.mark.soak
def test_from_threads_at_once(kernel: Kernel) -> None:
    source = """\
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(4) as pool:
            call = lambda start: list(launch(total, start, output="quiet"))
            found = list(pool.map(call, [1.0, 2.0, 3.0, 4.0]))
        assert found == [[[2 * start] * 4] * 2 for start in (1.0, 2.0, 3.0, 4.0)], found"""
    kernel.check(textwrap.dedent(source))


@pytest.mark.soak
def test_an_error_in_a_thread(kernel: Kernel) -> None:
    source = """\
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launch, lambda: 1 / 0).result()"""
    cell = kernel.run(textwrap.dedent(source))
    assert cell.error is not None and cell.seconds < patience(PROMISE)
    assert cell.error.message.startswith("rank 0 of 2 raised ZeroDivisionError: division by zero\n")


@pytest.mark.soak
def test_in_a_cell_that_awaits(kernel: Kernel) -> None:
    """A kernel's own event loop runs while the cell does."""
    check(kernel, "await asyncio.sleep(0)\nprint(list(launch(total)))")
    check(
        kernel,
        """\
        async def call():
            await asyncio.sleep(0)
            return launch(total)
        print(list(await call()))""",
    )


@pytest.mark.soak
def test_awaited_in_a_thread(kernel: Kernel) -> None:
    """The loop goes on meanwhile."""
    check(
        kernel,
        """\
        ticks = 0
        async def tick():
            global ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1
        ticking = asyncio.ensure_future(tick())
        found = await asyncio.to_thread(launch, total)
        ticking.cancel()
        assert ticks > 5, ticks
        print(list(found))""",
    )
    source = """\
        call = lambda start: asyncio.to_thread(launch, total, start, output="quiet")
        found = await asyncio.gather(*map(call, [1.0, 2.0, 3.0]))
        assert list(map(list, found)) == [[[2 * start] * 4] * 2 for start in (1.0, 2.0, 3.0)]"""
    kernel.check(textwrap.dedent(source))


@pytest.mark.soak
def test_errors_in_a_cell_that_awaits(kernel: Kernel) -> None:
    cell = kernel.run("await asyncio.sleep(0)\nlaunch(lambda: 1 / 0)")
    assert cell.error is not None and cell.error.name == "RankFailedError"
    assert cell.error.message.splitlines()[1].startswith(f"  In[{cell.number}], line 2, in <lamb")


@pytest.mark.soak
def test_interrupt_in_a_cell_that_awaits(kernel: Kernel) -> None:
    before = Traces.now()
    running = kernel.begin(
        "await asyncio.sleep(0)\nlaunch(lambda: [print('there'), time.sleep(600)])"
    )
    running.wait_for("[rank 1] there")
    kernel.interrupt()
    pressed = time.monotonic()
    cell = running.finish()
    assert time.monotonic() - pressed < patience(PROMISE)
    assert cell.error is not None and cell.error.name == "KeyboardInterrupt"
    assert_gone_already(before)
    check(kernel, "print(list(launch(total)))")
    check(kernel, "await asyncio.sleep(0)\nprint(list(launch(total)))")


# Two kernels


@pytest.mark.soak
def test_two_kernels_at_once(kernel: Kernel, second_kernel: Kernel) -> None:
    source = """\
        for turn in range(5):
            found = list(launch(total, {start}, nproc_per_node=3, output="quiet"))
            assert found == [[3 * {start}] * 4] * 3, found
        print("done")"""
    cells = [
        each.begin(textwrap.dedent(source.format(start=start)))
        for each, start in ((kernel, 1.0), (second_kernel, 10.0))
    ]
    assert [cell.finish().stdout for cell in cells] == ["done\n"] * 2


@pytest.mark.soak
@pytest.mark.parametrize("event", ["interrupt", "failure", "shutdown"])
def test_what_befalls_one_kernel_is_not_felt_in_the_other(
    kernel: Kernel, second_kernel: Kernel, event: str
) -> None:
    kernel.check("world = World(2)\nworld.put(x=1)")
    quiet = "def work():\n    for _ in range(15): total(), time.sleep(0.1)\n    return x\n"
    mine = kernel.begin(f"{quiet}print(list(world.run(work)))")
    mine.wait_for("[rank 1] total")
    second_kernel.check("world = World(2)\nworld.put(x=2)")
    theirs = second_kernel.begin(
        "world.run(lambda: [print('there'), 1 / 0])"
        if event == "failure"
        else "world.run(lambda: [print('there'), time.sleep(600)])"
        if event == "interrupt"
        else "world.shutdown()"
    )
    if event == "interrupt":
        theirs.wait_for("[rank 1] there")
        second_kernel.interrupt()
    assert (theirs.finish().error is None) == (event == "shutdown")
    second_kernel.check("world.shutdown()")
    assert mine.finish().stdout.endswith("\n[1, 1]\n")
    kernel.check("world.shutdown()")


@pytest.mark.soak
def test_one_kernel_is_killed(kernel: Kernel, own_kernel: Kernel) -> None:
    kernel.check("world = World(2)\nworld.put(x=1)")
    running = own_kernel.begin("launch(lambda: [print('there'), time.sleep(600)])")
    running.wait_for("[rank 1] there")
    own_kernel.kill()
    wait_until(lambda: not own_kernel.others(), PROMISE, "all of the killed kernel's gone")
    assert kernel.value("world.get('x')") == [1, 1]
    kernel.check("world.shutdown()")


# Without a kernel

PROGRAM = """\
import torch
import torch.distributed as dist
from ddp_lab import World, launch

class Scale:
    def __init__(self, factor):
        self.factor = factor

def total(scale):
    numbers = torch.full((2,), 1.0 + dist.get_rank())
    dist.all_reduce(numbers)
    print("working")
    return (scale.factor * numbers).tolist()

def fail():
    raise ValueError("bad label")

{guard}print(list(launch(total, Scale(10), nproc_per_node=3)))
{guard}launch(fail, nproc_per_node=3)
"""


def assert_program_worked(done: subprocess.CompletedProcess[str], name: str | None) -> None:
    """Its first launch did, and the second raised, with the line of the script of that name."""
    told = done.stdout + done.stderr
    assert sorted(line for line in told.splitlines() if line.startswith("[rank")) == [
        f"[rank {rank}] working" for rank in range(3)
    ]
    assert f"{[[60.0] * 2] * 3}\n" in done.stdout
    assert "RankFailedError: rank 0 of 3 raised ValueError: bad label\n" in told
    if name:
        assert f"\n  {name}, line 16, in fail:  raise ValueError" in told
    assert "\n  ranks 1, 2 did the same" in told


@pytest.mark.soak
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__": '], ids=["bare", "guarded"])
def test_script(tmp_path: Path, guard: str) -> None:
    """Unlike multiprocessing's, ours needs no guard: the ranks don't import the script."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(guard=guard))
    done = run_script(str(script), sys.executable)
    assert_program_worked(done, "train.py")
    assert done.returncode == 1


def test_script_on_standard_input() -> None:
    done = subprocess.run(
        [sys.executable], input=PROGRAM.format(guard=""), capture_output=True, text=True, timeout=90
    )
    assert_program_worked(done, None)
    assert done.returncode == 1


@pytest.mark.soak
def test_script_run_by_ipython(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(guard=""))
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor"]
    assert_program_worked(run_script(str(script), *command), "train.py")


@pytest.mark.soak
def test_session_of_ipython() -> None:
    """Its cells are numbered, too."""
    lines = [
        "from ddp_lab import launch",
        "launch(lambda: print('hello'))",
        "launch(lambda: 1 / 0)",
        "launch(lambda: 7)[1]",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--simple-prompt"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] hello\n" in done.stdout
    told = done.stdout + done.stderr
    assert "RankFailedError: rank 0 of 2 raised ZeroDivisionError: division by zero\n" in told
    assert "\n  In[3], line 1, in <lambda>:  launch(lambda: 1 / 0)\n" in told
    assert "Out[4]: 7" in done.stdout
