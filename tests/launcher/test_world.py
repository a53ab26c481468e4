"""What a World keeps from call to call, and what it says when it cannot."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab import LaunchError, LaunchTimeoutError, RankFailedError, World, launch
from tests.harness import Process, is_template, marked_processes, patience, run_script, wait_until

LOST = "the World starts afresh at its next call: its variables are lost"

# Functions defined in a test travel by value, as those of a notebook's cells do; what stands here
# at module level would travel by name, so these make functions.


def summing() -> Callable[[], list[float]]:
    def total() -> list[float]:
        numbers = torch.full((4,), 1.0 + dist.get_rank())
        dist.all_reduce(numbers)
        return numbers.tolist()

    return total


def processes() -> list[Process]:
    """All of this session, zombies aside."""
    every = marked_processes("DDP_LAB_TESTS", os.environ["DDP_LAB_TESTS"])
    return [process for process in every if process.state != "Z"]


def ranks() -> list[Process]:
    return [process for process in processes() if process.name.startswith("ddp-lab rank")]


def templates(owner: int) -> set[int]:
    return {p.pid for p in processes() if is_template(p) and p.parent == owner}


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, output="quiet") as world:
        world.put(kept=5)
        yield world


def pids(world: World) -> list[int]:
    return list(world.run(os.getpid))


def assert_goes_on(world: World, before: list[int]) -> None:
    """The same ranks, with their variables and a process group that works."""
    assert pids(world) == before
    assert world.get("kept") == [5] * world.world_size
    assert_works(world)


def assert_starts_afresh(world: World, before: list[int]) -> None:
    assert not set(pids(world)) & set(before)
    with pytest.raises(RankFailedError, match="NameError: name 'kept' is not defined"):
        world.get("kept")
    assert_works(world)
    world.put(kept=5)


def assert_works(world: World) -> None:
    size = world.world_size
    for _ in range(3):
        assert world.run(summing()) == [[size * (size + 1) / 2] * 4] * size


# Failures


@pytest.mark.soak
def test_an_error_on_all_ranks_keeps_variables(world: World) -> None:
    before = pids(world)
    with pytest.raises(RankFailedError, match="NameError") as caught:
        world.run(lambda: undefined)  # type: ignore[name-defined]  # noqa: F821
    assert LOST not in str(caught.value)
    assert [report.state for report in caught.value.reports] == ["raised"] * world.world_size
    assert_goes_on(world, before)


@pytest.mark.soak
@pytest.mark.parametrize("others", ["return", "take a moment", "are sent the error"])
def test_an_error_on_one_rank_keeps_variables(world: World, others: str) -> None:
    before = pids(world)

    def work() -> str:
        if dist.get_rank() == 1:
            raise ValueError("one")
        if others == "take a moment":
            time.sleep(0.1)
        return "fine"

    with pytest.raises(RankFailedError, match=r"rank 1 of . raised ValueError: one") as caught:
        world.run(work)
    assert LOST not in str(caught.value)
    expected = ["fine"] * world.world_size
    expected[1] = None  # type: ignore[call-overload]
    assert caught.value.results == expected
    assert_goes_on(world, before)


@pytest.mark.soak
def test_a_rank_stuck_in_a_collective_loses_them(world: World) -> None:
    before = pids(world)

    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("one")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailedError) as caught:
        world.run(work)
    *_, place, last = str(caught.value).splitlines()
    assert "in all_reduce" in place
    assert last == f"  {LOST}"
    assert_starts_afresh(world, before)


@pytest.mark.soak
def test_ranks_that_disagree_on_collectives_start_afresh(world: World) -> None:
    """Else a later all_reduce of one rank would silently meet an earlier one of another."""
    before = pids(world)

    def work() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
        raise ValueError(f"rank 0 alone has issued {work is not None}")

    with pytest.raises(RankFailedError) as caught:
        world.run(work)
    assert str(caught.value).endswith(LOST)
    assert_starts_afresh(world, before)


@pytest.mark.soak
def test_ranks_that_disagree_in_a_subgroup_start_afresh(world: World) -> None:
    before = pids(world)

    def make() -> None:
        pair = dist.new_group([0, 1])
        vars(sys.modules["__main__"])["pair"] = pair
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=pair)

    def work() -> None:
        pair = vars(sys.modules["__main__"])["pair"]
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), group=pair, async_op=True)
        raise ValueError

    world.run(make)
    assert_goes_on(world, before)
    with pytest.raises(RankFailedError) as caught:
        world.run(work)
    assert str(caught.value).endswith(LOST)
    assert_starts_afresh(world, before)


@pytest.mark.soak
def test_subgroups_are_no_disagreement(world: World) -> None:
    """Each rank issues its own number of collectives, in groups of its own: that is sound."""
    before = pids(world)

    def work() -> None:
        mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        for _ in range(dist.get_rank() + 1):
            dist.all_reduce(torch.ones(1), group=mine)

    world.run(work)
    assert_goes_on(world, before)
    with pytest.raises(RankFailedError):
        world.run(lambda: 1 / 0)
    assert_goes_on(world, before)


@pytest.mark.soak
@pytest.mark.parametrize("ending", ["os._exit(3)", "SIGKILL"])
def test_a_rank_that_ends_loses_them(world: World, ending: str) -> None:
    before = pids(world)

    def work() -> None:
        if dist.get_rank() == 1:
            os._exit(3) if ending == "os._exit(3)" else os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailedError, match="rank 1 of") as caught:
        world.run(work)
    assert str(caught.value).endswith(LOST)
    assert_starts_afresh(world, before)


@pytest.mark.soak
def test_a_rank_that_ends_between_calls_is_told_at_the_next(world: World) -> None:
    before = pids(world)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(RankFailedError, match=r"^rank 1 of . was killed by SIGKILL") as caught:
        world.run(time.sleep, 0.01)
    assert str(caught.value).endswith(LOST)
    assert_starts_afresh(world, before)


@pytest.mark.soak
def test_timeout(world: World) -> None:
    """A World's limit is that of each call; ranks that can end themselves keep their variables."""
    size = world.world_size
    with World(size, timeout=patience(0.5), output="quiet") as quick:
        quick.put(kept=5)
        before = pids(quick)
        with pytest.raises(LaunchTimeoutError) as caught:
            quick.run(time.sleep, 60)
        assert LOST not in str(caught.value)
        assert_goes_on(quick, before)
        with pytest.raises(LaunchTimeoutError) as caught:
            quick.run(lambda: dist.recv(torch.ones(1)))
        assert str(caught.value).endswith(LOST)
        assert_starts_afresh(quick, before)


@pytest.mark.soak
def test_an_unsendable_result_keeps_variables(world: World) -> None:
    before = pids(world)
    with pytest.raises(RankFailedError, match=r"rank 0 of . returned a generator, which cannot"):
        world.run(lambda: (x for x in "ab"))
    assert_goes_on(world, before)


@pytest.mark.soak
def test_launch_does_not_speak_of_variables() -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError
        dist.barrier()

    with pytest.raises(RankFailedError) as caught:
        launch(work)
    assert "variables" not in str(caught.value)


def test_errors_hold_text_only(world: World) -> None:
    """Neither frames nor tensors, which would keep memory; and they can be pickled."""
    import pickle

    def work() -> torch.Tensor:
        big = torch.ones(1000)
        if dist.get_rank() == 1:
            raise ValueError(big)
        return big

    with pytest.raises(RankFailedError) as caught:
        world.run(work)
    for report in caught.value.reports:
        assert isinstance(pickle.loads(pickle.dumps(report)), type(report))
        assert not any(isinstance(value, torch.Tensor) for value in vars(report).values())
    assert "raise ValueError(big)" in caught.value.reports[1].traceback


# The process group


@pytest.mark.soak
def test_a_destroyed_group_is_there_again_at_the_next_call(world: World) -> None:
    before = pids(world)
    world.run(dist.destroy_process_group)
    assert_goes_on(world, before)


@pytest.mark.soak
def test_a_group_destroyed_by_one_rank_is_there_again(world: World) -> None:
    before = pids(world)

    def work() -> None:
        if dist.get_rank() == 0:
            dist.destroy_process_group()

    world.run(work)
    assert_goes_on(world, before)


@pytest.mark.soak
def test_a_group_of_the_learners_own(world: World) -> None:
    """`env://` works as under torchrun, time and again, and is kept."""
    before = pids(world)

    def own_group(times: int) -> list[float]:
        for _ in range(times):
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method="env://")
            numbers = torch.full((2,), 1.0 + dist.get_rank())
            dist.all_reduce(numbers)
        return numbers.tolist()

    size = world.world_size
    for times in (1, 2, 3):
        assert world.run(own_group, times) == [[size * (size + 1) / 2] * 2] * size
    assert_goes_on(world, before)


@pytest.mark.soak
def test_a_failure_in_a_group_of_the_learners_own(world: World) -> None:
    def work() -> None:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("own")
        dist.barrier()

    before = pids(world)
    with pytest.raises(RankFailedError, match=r"rank 1 of . raised ValueError: own") as caught:
        world.run(work)
    assert "in barrier" in str(caught.value)
    assert_starts_afresh(world, before)


# Simulated nodes


@pytest.mark.soak
@pytest.mark.parametrize("nnodes, nproc", [(1, 1), (1, 3), (2, 2), (3, 1), (2, 3)])
def test_ranks_see_what_torchrun_sets(nnodes: int, nproc: int) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]

    def seen() -> tuple[list[int], tuple[str, int], tuple[int, int]]:
        numbers = [int(os.environ[name]) for name in names]
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return numbers, address, (dist.get_rank(), dist.get_world_size())

    results = launch(seen, nnodes=nnodes, nproc_per_node=nproc)
    size = nnodes * nproc
    assert len(results) == size
    for rank, (numbers, (host, port), group) in enumerate(results):
        assert numbers == [rank, rank % nproc, size, nproc, rank // nproc]
        assert host == "127.0.0.1"
        assert 1024 <= port < 65536 and port == results[0][1][1]
        assert group == (rank, size)


@pytest.mark.soak
def test_two_worlds_at_once_have_a_port_each() -> None:
    with World(2, output="quiet") as first, World(2, output="quiet") as second:
        ports = [w.run(lambda: os.environ["MASTER_PORT"])[0] for w in (first, second)]
        assert ports[0] != ports[1]
        assert_works(first)
        assert_works(second)
        first.shutdown()
        assert_works(second)


# Its end


@pytest.mark.soak
def test_shut_down_twice(world: World) -> None:
    world.shutdown()
    assert not ranks()
    world.shutdown()
    with pytest.raises(LaunchError, match="shut down"):
        world.run(dist.get_rank)
    assert "shut down" in repr(world)


def test_never_used() -> None:
    """It starts nothing."""
    with World(4) as world:
        assert not ranks()
        assert "not started" in repr(world)
    world.shutdown()


@pytest.mark.soak
def test_abandoned(nothing_left: None) -> None:
    """Without `with`, without shutdown: its ranks end with the last reference to it."""
    world = World(3, output="quiet")
    world.put(x=1)
    assert len(ranks()) == 3
    del world
    gc.collect()
    wait_until(lambda: not ranks(), 2, "the ranks' end")


@pytest.mark.soak
def test_abandoned_while_a_child_holds_its_socket() -> None:
    """A loader worker of the notebook's, say, which was forked meanwhile."""
    world = World(2, output="quiet")
    world.put(x=1)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        del world
        gc.collect()
        wait_until(lambda: not ranks(), 2, "the ranks' end")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.soak
def test_exit_handlers_run_and_a_slow_one_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    import atexit

    def work() -> None:
        seconds = 60 * dist.get_rank()
        atexit.register(lambda: (print("leaving", flush=True), time.sleep(seconds)))

    began = time.monotonic()
    results = launch(work, output="quiet")
    assert time.monotonic() - began < patience(5)
    assert [output.stdout for output in results.output] == ["leaving\n"] * 2


@pytest.mark.soak
def test_a_program_that_ends_without_shutting_it_down() -> None:
    done = run_script(
        "from ddp_lab import World\nworld = World(2)\nworld.put(x=1)\nprint(world.get('x'))"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[1, 1]"


# Who calls


@pytest.mark.soak
def test_from_two_threads_one_after_the_other(world: World) -> None:
    """One call at a time: the second waits."""
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(world.run(summing()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    size = world.world_size
    assert results == [[[size * (size + 1) / 2] * 4] * size] * 4


def in_a_fork(work: Callable[[], Any]) -> str:
    """What a forked child of this process finds: "fine", or the traceback."""
    inner, outer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(inner)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  pytest's are not ours
            try:
                work()
                found = "fine"
            except BaseException:
                found = traceback.format_exc()
            os.write(outer, found.encode())
        finally:
            os._exit(0)
    os.close(outer)
    with os.fdopen(inner, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


@pytest.mark.soak
def test_a_launch_in_a_fork_has_a_template_of_its_own() -> None:
    launch(os.getpid, output="quiet")
    mine = templates(os.getpid())
    assert len(mine) == 1

    def work() -> None:
        assert len(launch(os.getpid)) == 2
        assert len(templates(os.getpid())) == 1

    assert in_a_fork(work) == "fine"
    assert templates(os.getpid()) == mine
    assert len(launch(os.getpid, output="quiet")) == 2


@pytest.mark.soak
def test_a_world_in_a_fork_leaves_the_ranks_to_the_notebook() -> None:
    with World(2, output="quiet") as world:
        world.put(kept=5)
        before = pids(world)

        def work() -> None:
            assert_works(world)
            assert not set(pids(world)) & set(before)
            world.shutdown()

        assert in_a_fork(work) == "fine"
        assert in_a_fork(world.shutdown) == "fine"
        assert_goes_on(world, before)


@pytest.mark.soak
@pytest.mark.parametrize("call", [lambda: launch(int), lambda: World(2), "world"])
def test_nested_calls_are_refused(world: World, call: Any) -> None:
    """At once, by the rank itself."""

    def nested() -> None:
        from ddp_lab import World

        (call if callable(call) else World(2).run)(int) if call == "world" else call()

    with pytest.raises(RankFailedError, match=r"LaunchError: .*inside a rank.*from the notebook"):
        world.run(nested)
    assert_works(world)
