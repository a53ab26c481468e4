"""The stop button: every rank ends, the cell raises KeyboardInterrupt, the next launch works."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.harness import (
    Cell,
    Kernel,
    Running,
    Traces,
    assert_gone_already,
    assert_nothing_new,
    patience,
)

# .5 s of grace for ranks to end by themselves, .2 s between SIGTERM and SIGKILL: .1 to .9 s seen.
PROMISE = 2.0

TOTAL = """\
def total():
    numbers = torch.ones(4)
    dist.all_reduce(numbers)
    return numbers.tolist()
"""


@pytest.fixture(scope="module", autouse=True)
def setting(kernel: Kernel) -> None:
    kernel.check(TOTAL)


@pytest.fixture
def kernel_still_works(kernel: Kernel, nothing_left: None) -> Iterator[None]:
    """After the test: nothing but the template is left as soon as the cell has ended, and the
    next launch works."""
    before = Traces.now()
    yield
    assert_gone_already(before)
    assert kernel.check("print(list(launch(total)))").stdout == f"{[[2.0] * 4] * 2}\n"


def interrupted(kernel: Kernel, running: Running) -> Cell:
    """The cell after a press of the stop button."""
    kernel.interrupt()
    pressed = time.monotonic()
    cell = running.finish()
    assert time.monotonic() - pressed < patience(PROMISE)
    assert cell.error is not None, f"nothing was interrupted: {cell}"
    assert cell.error.name == "KeyboardInterrupt", cell.error.shown
    return cell


# What two ranks are at when the button is pressed; they say "there" just before.
SCENES = {
    "one-waits-for-the-other": """\
        def work():
            print("there")
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(3))
            else:
                time.sleep(600)""",
    "all-sleep": """\
        def work():
            print("there")
            time.sleep(600)""",
    "all-compute": """\
        def work():
            print("there")
            while True: pass""",
    "matmul": """\
        def work():
            print("there")
            numbers = torch.ones(1000, 1000)
            while True: numbers @ numbers""",
    "in-C": """\
        def work():
            print("there")
            sum(range(10**12))""",
    "ignore-interrupts": """\
        def work():
            for number in signal.SIGINT, signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
            print("there")
            time.sleep(600)""",
    "catch-interrupts": """\
        def work():
            print("there")
            while True:
                try: time.sleep(600)
                except BaseException: pass""",
    "stopped": """\
        def work():
            print("there")
            os.kill(os.getpid(), signal.SIGSTOP)""",
    "one-has-ended": """\
        def work():
            print("there")
            if dist.get_rank() == 0:
                time.sleep(600)""",
    "print": """\
        def work():
            print("there")
            while True: print("x" * 100)""",
    "loader-workers": """\
        def work():
            batches = iter(torch.utils.data.DataLoader(range(10**9), num_workers=2))
            next(batches)
            print("there")
            for _ in batches: pass""",
    "daemon": """\
        def work():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    print("there", flush=True)
                    time.sleep(600)
                os._exit(0)
            time.sleep(600)""",
    "training": """\
        def work():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            print("there")
            while True: model(torch.ones(2, 3)).sum().backward()""",
}


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
@pytest.mark.parametrize("scene", SCENES)
def test_while_ranks_are_busy(kernel: Kernel, scene: str) -> None:
    running = kernel.begin(f"{textwrap.dedent(SCENES[scene])}\nlaunch(work, nproc_per_node=2)")
    running.wait_for("[rank 0] there")
    running.wait_for("[rank 1] there")
    time.sleep(random.uniform(0, 0.1))
    cell = interrupted(kernel, running)
    if scene != "print":
        assert cell.stdout.count("there") == 2


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
@pytest.mark.parametrize("longest", [0.02, 0.3])
def test_at_a_random_moment(kernel: Kernel, longest: float) -> None:
    """While the launch starts, or just after."""
    moment = random.uniform(0, longest)
    print(f"interrupted after {moment:.4f} s")
    source = textwrap.dedent("""\
        def work():
            for _ in range(10**9):
                total()

        print("begins", flush=True)
        launch(work, nproc_per_node=2)""")
    running = kernel.begin(source)
    running.wait_for("begins")
    time.sleep(moment)
    interrupted(kernel, running)


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
def test_at_any_line_of_the_launcher(kernel: Kernel) -> None:
    """Whichever line of ours it hits, and though somebody keeps the exception and its frames."""
    source = textwrap.dedent("""\
        import collections, random, psutil, ddp_lab.launcher
        folder = os.path.dirname(ddp_lab.launcher.__file__)
        kept = []

        def launch_interrupted(place, turn):
            \"\"\"Launch, with an interrupt when a line runs for the nth time; what ran.\"\"\"
            run = collections.Counter()
            def trace(frame, event, argument):
                if not frame.f_code.co_filename.startswith(folder):
                    return None
                if event == "line":
                    here = frame.f_code.co_filename, frame.f_lineno
                    run[here] += 1
                    if here == place and run[here] == turn:
                        os.killpg(os.getpgid(0), signal.SIGINT)
                return trace
            try:
                sys.settrace(trace)
                launch(total)
                sys.settrace(None)
            except KeyboardInterrupt as error:
                sys.settrace(None)
                kept.append(error)
            return run

        every = launch_interrupted(None, 0)
        assert len(every) > 100 and not kept
        template = psutil.Process(_client.template().process.pid)
        while len(kept) < 12:
            place, so_far = random.choice(list(every)), len(kept)
            turn = random.choice([1, every[place]])
            if launch_interrupted(place, turn)[place] < turn:
                continue  # how often a loop is run changes a bit from launch to launch
            assert len(kept) == so_far + 1, f"the interrupt at {place}, turn {turn}, was lost"
            deadline = time.monotonic() + 2
            while template.children() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not template.children(), f"ranks are left after {place}, turn {turn}"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        del kept[:]""")
    kernel.check(source)


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
def test_pressed_twice(kernel: Kernel) -> None:
    """The second press ends the ranks' time of grace; neither is felt after the cell."""
    running = kernel.begin("launch(lambda: [print('there'), dist.recv(torch.ones(1))])")
    running.wait_for("[rank 1] there")
    kernel.interrupt()
    time.sleep(0.02)
    interrupted(kernel, running)


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
def test_results_before_it_are_not_mixed_up(kernel: Kernel) -> None:
    """Output that a rank printed until then is shown."""
    running = kernel.begin("launch(lambda: [print('there'), time.sleep(600)], output='by-rank')")
    time.sleep(0.5)
    cell = interrupted(kernel, running)
    assert cell.stdout == "[rank 0] there\n[rank 1] there\n"


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
def test_a_world_in_which_all_could_end_goes_on(kernel: Kernel) -> None:
    kernel.check("world = World(3)\nworld.put(kept=5)")
    running = kernel.begin("world.run(lambda: [print('there'), time.sleep(600)])")
    running.wait_for("[rank 2] there")
    cell = interrupted(kernel, running)
    assert cell.error is not None and "variables are lost" not in cell.error.shown
    assert kernel.value("world.get('kept')") == [5, 5, 5]
    assert kernel.value("list(world.run(total))") == [[3.0] * 4] * 3
    kernel.check("world.shutdown()")


@pytest.mark.soak
@pytest.mark.usefixtures("kernel_still_works")
def test_a_world_with_a_stuck_rank_starts_afresh(kernel: Kernel) -> None:
    """And says so."""
    kernel.check("world = World(2)\nworld.put(kept=5)")
    running = kernel.begin(f"{textwrap.dedent(SCENES['one-waits-for-the-other'])}\nworld.run(work)")
    running.wait_for("[rank 0] there")
    running.wait_for("[rank 1] there")
    cell = interrupted(kernel, running)
    assert cell.error is not None and "variables are lost" in cell.error.shown
    assert kernel.value("list(world.run(total))") == [[2.0] * 4] * 2
    cell = kernel.run("world.get('kept')")
    assert cell.error is not None and "NameError: name 'kept'" in cell.error.message
    kernel.check("world.shutdown()")


@pytest.mark.soak
def test_in_a_fresh_kernel(cold_kernel: Kernel) -> None:
    """While the template still imports torch, or soon after."""
    kernel = cold_kernel
    before = Traces.now()
    kernel.check("import time\nfrom ddp_lab import launch")
    moment = random.uniform(0, 3)
    print(f"interrupted after {moment:.3f} s")
    running = kernel.begin("print('begins', flush=True)\nlaunch(lambda: time.sleep(600))")
    running.wait_for("begins")
    time.sleep(moment)
    interrupted(kernel, running)
    assert_nothing_new(before)
    kernel.check("import torch, torch.distributed as dist")
    kernel.check(TOTAL)
    assert kernel.check("print(list(launch(total)))").stdout.endswith(f"{[[2.0] * 4] * 2}\n")


@pytest.mark.soak
def test_in_a_fresh_kernel_while_it_imports(cold_kernel: Kernel) -> None:
    """The same with the import of ddp_lab in the same cell."""
    kernel = cold_kernel
    moment = random.uniform(0, 1)
    print(f"interrupted after {moment:.3f} s")
    source = "print('begins', flush=True)\nfrom ddp_lab import launch\n"
    running = kernel.begin(source + "launch(lambda: __import__('time').sleep(600))")
    running.wait_for("begins")
    time.sleep(moment)
    interrupted(kernel, running)
    kernel.check("from ddp_lab import launch")
    kernel.check("import torch, torch.distributed as dist")
    kernel.check(TOTAL)
    assert kernel.check("print(list(launch(total)))").stdout.endswith(f"{[[2.0] * 4] * 2}\n")
