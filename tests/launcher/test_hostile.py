"""Ranks and notebooks that do what nobody should, and what they are told."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_lab import LaunchError, RankFailedError, launch
from ddp_lab.launcher.interrupts import HoldInterrupts
from tests.harness import Traces, assert_nothing_new


def failure(fn: Any, *args: Any, **options: Any) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        launch(fn, *args, output="quiet", **options)
    return caught.value


def test_an_endless_recursion_is_shown_in_a_few_lines() -> None:
    def again() -> None:
        again()

    error = failure(again)
    assert "RecursionError" in str(error).splitlines()[0]
    assert "more times" in str(error)
    assert len(str(error).splitlines()) < 12
    assert [report.state for report in error.reports] == ["raised", "raised"]


@pytest.mark.parametrize("text", ["/a" * 20_000, "x" * 10_000_000], ids=["path-like", "long"])
def test_a_huge_message_is_cut_and_does_not_hold_up_the_cell(text: str) -> None:
    def fail() -> None:
        raise ValueError(text)

    began = time.monotonic()
    error = failure(fail)
    assert time.monotonic() - began < 5
    assert "more characters" in str(error)
    assert len(str(error)) < 25_000


def bad_text() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            sys.exit(4)

    raise Odd


def bad_notes() -> None:
    error = ValueError("odd")
    error.__notes__ = 5  # type: ignore[attr-defined, assignment]
    raise error


def no_stdout() -> None:
    del sys.stdout
    raise ValueError("odd")


@pytest.mark.parametrize("fn", [bad_text, bad_notes, no_stdout])
def test_an_exception_whose_own_code_fails_is_told_all_the_same(fn: Any) -> None:
    error = failure(lambda: fn(), nproc_per_node=3)
    assert str(error).startswith("rank 0 of 3 raised ")
    assert [report.state for report in error.reports] == ["raised"] * 3


def test_a_rank_that_becomes_another_program() -> None:
    error = failure(lambda: os.execvp("sleep", ["sleep", "60"]))
    assert "closed its connection to the notebook" in str(error)


def test_a_time_limit_of_centuries() -> None:
    assert list(launch(lambda: 1, timeout=1e300)) == [1, 1]


def test_an_async_function_is_refused_with_what_to_write() -> None:
    async def train() -> None: ...

    with pytest.raises(TypeError, match=r"launch\(lambda: asyncio.run\(train\(...\)\)\)"):
        launch(train)


def test_a_result_that_leaves_when_it_is_read() -> None:
    class Leaves:
        def __reduce__(self) -> Any:
            return sys.exit, (9,)

    assert "cannot be rebuilt in the notebook" in str(failure(lambda: Leaves()))


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(LaunchError, match=r"os\.chdir"):
        launch(lambda: 1)


@pytest.mark.parametrize("ending", ["returns", "raises", "is killed"])
def test_shared_memory_by_file_name_is_cleared(ending: str) -> None:
    # torch's manager of such memory ends two seconds after those that it serves.
    def share() -> None:
        import torch

        torch.multiprocessing.set_sharing_strategy("file_system")
        shared = torch.zeros(1000).share_memory_()
        if ending == "raises":
            raise ValueError(shared.shape)
        if ending == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    before = Traces.now()
    if ending == "returns":
        launch(share)
    else:
        failure(share)
    assert_nothing_new(before, timeout=10)


def test_an_interrupt_as_interrupts_are_let_go_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pipes() -> int:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link).startswith("pipe:") for link in links)

    before, set_handler, usual = pipes(), signal.signal, signal.getsignal(signal.SIGINT)

    def interrupted(number: int, handler: Any) -> Any:
        previous = set_handler(number, handler)
        if handler == usual:  # the very moment in which SIGINT raises again
            raise KeyboardInterrupt
        return previous

    monkeypatch.setattr(signal, "signal", interrupted)
    hold = HoldInterrupts()
    assert pipes() == before  # nothing is open before SIGINT is held
    with pytest.raises(KeyboardInterrupt), hold:
        assert pipes() == before + 2
    assert pipes() == before
