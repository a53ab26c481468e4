"""The template and the supervisors: what they must be, and what happens when one is killed."""

from __future__ import annotations

import os
import random
import signal
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.harness import (
    Kernel,
    Process,
    Traces,
    assert_nothing_new,
    is_template,
    look_at,
    patience,
    wait_until,
)

PROMISE = 2.0


@pytest.fixture(scope="module", autouse=True)
def setting(kernel: Kernel) -> None:
    kernel.check(
        textwrap.dedent("""\
        def total():
            numbers = torch.ones(4)
            dist.all_reduce(numbers)
            return numbers.tolist()""")
    )


@pytest.fixture
def template(kernel: Kernel) -> Iterator[Process]:
    """The template of the kernel. After the test the next launch works."""
    launch_works(kernel)
    template = kernel.template()
    assert template is not None
    yield template
    launch_works(kernel)


def launch_works(kernel: Kernel) -> None:
    shown = kernel.check("print(list(launch(total)))").stdout
    assert shown.endswith(f"{[[2.0] * 4] * 2}\n")


def supervisors(kernel: Kernel) -> list[Process]:
    template = kernel.template()
    return [p for p in kernel.others() if template is not None and p.parent == template.pid]


def ended(process: Process) -> bool:
    now = look_at(process.pid)
    return now != process or now.state == "Z"


def threads(process: Process) -> list[str]:
    return [
        open(f"/proc/{process.pid}/task/{task}/comm").read().strip()
        for task in os.listdir(f"/proc/{process.pid}/task")
    ]


def test_template_has_one_thread(kernel: Kernel) -> None:
    """A fork copies one thread only: locks that others hold would never be released.

    It stands first, since OpenBLAS ends its threads when a process forks.
    """
    template = kernel.template()
    assert template is not None
    assert len(threads(template)) == 1
    kernel.check("launch(total, nproc_per_node=4)")
    assert kernel.template() == template
    assert len(threads(template)) == 1


@pytest.mark.soak
@pytest.mark.parametrize("threads", [1, 2])
def test_thread_pools_of_the_kernel_do_no_harm(kernel: Kernel, threads: int) -> None:
    """A kernel that has run a parallel operation or a backward cannot itself be forked: the child
    hangs at its first one."""
    source = textwrap.dedent(f"""\
        def parallel():
            weight = torch.ones(600, 600, requires_grad=True)
            (torch.ones(600, 600) @ weight).sum().backward()
            import numpy
            numpy.ones((600, 600)) @ numpy.ones((600, 600))
            return weight.grad[0, 0].item(), torch.ones(3_000_000).sum().item()

        expected = parallel()
        assert torch.get_num_threads() > 1 or os.cpu_count() == 1
        results = launch(parallel, nproc_per_node=2, threads={threads}, timeout=30)
        assert list(results) == [expected] * 2, results""")
    kernel.check(source)


@pytest.mark.soak
def test_ranks_draw_different_random_numbers(kernel: Kernel) -> None:
    """Forks of one process would all draw the same."""
    kernel.check(
        textwrap.dedent("""\
        def draw():
            import random, numpy
            return random.random(), numpy.random.rand(), os.urandom(4)
        first, second = launch(draw, nproc_per_node=3), launch(draw, nproc_per_node=3)
        assert all(len(set(column)) == 6 for column in zip(*first, *second))""")
    )


# Forks inside a rank


@pytest.mark.soak
def test_fork_inside_a_rank(kernel: Kernel) -> None:
    source = textwrap.dedent("""\
        def work():
            inner, outer = os.pipe()
            if (pid := os.fork()) == 0:
                numbers = torch.ones(600, 600)
                os.write(outer, str((numbers @ numbers)[0, 0].item()).encode())
                os._exit(0)
            found = os.read(inner, 100).decode()
            return found, os.waitpid(pid, 0)[1], total()

        results = launch(work, timeout=20)
        assert list(results) == [("600.0", 0, [2.0] * 4)] * 2, results""")
    kernel.check(source)


@pytest.mark.soak
@pytest.mark.parametrize("ending", ["return 'child'", "raise ValueError('child')", "sys.exit(0)"])
def test_child_of_a_rank_that_leaves_the_function(kernel: Kernel, ending: str) -> None:
    """It does not answer in its parent's place."""
    source = textwrap.dedent(f"""\
        def work():
            if (pid := os.fork()) == 0:
                {ending}
            os.waitpid(pid, 0)
            return 'parent'

        with World(2, timeout=20) as world:
            for _ in range(3):
                results = world.run(work)
                assert list(results) == ['parent'] * 2, results
                assert list(world.run(total)) == [[2.0] * 4] * 2""")
    kernel.check(source)


@pytest.mark.soak
def test_multiprocessing_inside_a_rank(kernel: Kernel) -> None:
    """Ranks are not daemons, so they may have children."""
    source = textwrap.dedent("""\
        def work():
            import multiprocessing
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            child = context.Process(target=lambda: queue.put(os.getppid()))
            child.start()
            parent = queue.get(timeout=20)
            child.join()
            with context.Pool(2) as pool:
                squares = pool.map(abs, range(-3, 0))
            return parent == os.getpid(), child.exitcode, squares, total()

        results = launch(work, timeout=30)
        assert list(results) == [(True, 0, [3, 2, 1], [2.0] * 4)] * 2, results""")
    kernel.check(source)


@pytest.mark.soak
def test_programs_inside_a_rank(kernel: Kernel) -> None:
    source = textwrap.dedent("""\
        def work():
            done = subprocess.run(["sh", "-c", "echo $RANK; exit 3"], capture_output=True)
            return done.stdout, done.returncode

        results = launch(work, timeout=20)
        assert list(results) == [(b"0\\n", 3), (b"1\\n", 3)], results""")
    kernel.check(source)


# Signals


@pytest.mark.soak
def test_template_survives_an_interrupt(kernel: Kernel, template: Process) -> None:
    """Jupyter sends SIGINT to the kernel's whole process group."""
    kernel.check("world = World(2)\nworld.put(x=1)")
    source = """\
        try:
            os.killpg(os.getpgid(0), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass"""
    kernel.check(textwrap.dedent(source))
    assert kernel.value("world.get('x')") == [1, 1]
    kernel.check("world.shutdown()")
    assert kernel.template() == template


@pytest.mark.soak
def test_template_survives_an_interrupt_as_it_starts(cold_kernel: Kernel) -> None:
    """From its first moment on, again and again."""
    source = textwrap.dedent("""\
        import os, signal, time
        from ddp_lab.launcher import client
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pid = client.template().process.pid
        for _ in range(50):
            os.killpg(os.getpgid(0), signal.SIGINT)
            time.sleep(0.01)
        from ddp_lab import launch
        assert list(launch(lambda: 7)) == [7, 7]
        assert client.template().process.pid == pid""")
    cold_kernel.check(source)


SLEEPY = """\
def work():
    {before}
    print("there")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    {after}
launch(work)"""
DAEMON = """\
inner, outer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(outer, b"!")
            time.sleep(600)
        os._exit(0)
    os.read(inner, 1)"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("who", "before", "after"),
    [
        ("supervisor", "pass", "time.sleep(600)"),
        ("supervisor", DAEMON, "while True: pass"),
        ("template", DAEMON, "while True: pass"),
    ],
    ids=["supervisor", "supervisor-daemon", "template-daemon"],
)
def test_killed_while_ranks_are_busy(
    kernel: Kernel, template: Process, who: str, before: str, after: str
) -> None:
    """The launch fails, says why, and leaves nothing."""
    traces = Traces.now()
    running = kernel.begin(SLEEPY.format(before=before, after=after))
    running.wait_for("[rank 0] there")
    running.wait_for("[rank 1] there")
    (supervisor,) = supervisors(kernel)
    os.kill(template.pid if who == "template" else supervisor.pid, signal.SIGKILL)
    killed = time.monotonic()
    cell = running.finish()
    assert time.monotonic() - killed < patience(PROMISE)
    assert cell.error is not None and cell.error.name == "LaunchError", cell
    words = {
        "template": "the template process ended: exit code -9",
        "supervisor": "the supervisor of the ranks was killed",
    }
    assert cell.error.message == words[who]
    assert "[rank 1] there" in cell.stdout
    traces.processes.discard(template)
    wait_until(lambda: not [p for p in kernel.others() if not is_template(p)], 1, "all gone")
    assert_nothing_new(traces, timeout=0.5)


@pytest.mark.soak
@pytest.mark.usefixtures("template")
def test_supervisor_killed_while_a_world_idles(kernel: Kernel) -> None:
    """The next call says that variables are lost, the one after it works."""
    traces = Traces.now()
    kernel.check("world = World(2)\nworld.put(x=1)")
    (supervisor,) = supervisors(kernel)
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: ended(supervisor), 1, "the supervisor's end")
    cell = kernel.run("world.run(total)")
    assert cell.error is not None and cell.error.name == "LaunchError"
    assert "variables are lost" in cell.error.message
    assert kernel.check("print(list(world.run(total)))").stdout.endswith("[2.0, 2.0, 2.0, 2.0]]\n")
    kernel.check("world.shutdown()")
    assert_nothing_new(traces, timeout=0.5)


@pytest.mark.soak
def test_template_killed_at_the_moment_of_a_launch(kernel: Kernel, template: Process) -> None:
    """The launch may come just in time; else its error says what has happened. The one after it
    need not notice."""
    moment = random.choice([0.0, random.uniform(0, 0.001), random.uniform(0, 0.1)])
    source = f"""\
        alarm = threading.Timer({moment}, os.kill, ({template.pid}, signal.SIGKILL))
        alarm.start()
        launch(total)"""
    cell = kernel.run(textwrap.dedent(source))
    if cell.error is not None:
        assert cell.error.name == "LaunchError", cell.error.shown
        assert cell.error.message == "the template process ended: exit code -9"
    wait_until(lambda: ended(template), 1, "the template's end")


@pytest.mark.soak
def test_template_that_cannot_start(cold_kernel: Kernel) -> None:
    """The error says why, not just that it ended."""
    source = textwrap.dedent("""\
        import os, sys
        os.makedirs("{folder}/torchvision")
        sys.path.insert(0, "{folder}")
        with open("{folder}/torchvision/__init__.py", "w") as file:
            file.write("raise ImportError('no such luck')")
        from ddp_lab import launch
        try:
            launch(lambda: 7)
        finally:
            import shutil
            shutil.rmtree("{folder}")""")
    cell = cold_kernel.run(source.format(folder=os.path.join(os.environ["TMPDIR"], "broken")))
    assert cell.error is not None and cell.error.name == "LaunchError", cell
    assert "the template process ended" in cell.error.message
    assert "ImportError: no such luck" in cell.error.message
