"""A bad argument is refused at the door: what is wrong, what to write instead, nothing started."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_lab import World, launch
from ddp_lab.launcher import client
from ddp_lab.launcher.options import Options
from tests.harness import Kernel

NAN, INFINITE = float("nan"), float("inf")
WHOLE = "write a whole number from 1 to 256"
SECONDS = "write a number of seconds above 0, such as timeout=30, or None for no limit"

# (arguments, kind of error, what the message must say)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, kind, f"{name} is {re.escape(repr(value))}.*{WHOLE}, such as {name}=")
        for name in ("nproc_per_node", "nnodes", "threads")
        for value, kind in [
            (0, ValueError),
            (-1, ValueError),
            (1000, ValueError),
            ("4", TypeError),
            (True, TypeError),
            (2.0, TypeError),
            ([2], TypeError),
        ]
    ),
    ({"nproc_per_node": None}, TypeError, WHOLE),
    ({"nnodes": None}, TypeError, WHOLE),
    ({"nnodes": 16, "nproc_per_node": 17}, ValueError, "is 272; at most 256 ranks.*write a small"),
    ({"nnodes": 256, "nproc_per_node": 2}, ValueError, "is 512; at most 256 ranks"),
    ({"backend": "mpi"}, ValueError, "backend is 'mpi': write one of 'auto', 'gloo', 'nccl'"),
    ({"backend": "NCCL"}, ValueError, "backend is 'NCCL': write one of"),
    ({"backend": None}, TypeError, "backend is None.*write one of 'auto', 'gloo', 'nccl'"),
    *(
        ({"timeout": value}, kind, f"timeout is {value!r}.*{SECONDS}")
        for value, kind in [
            (0, ValueError),
            (-1, ValueError),
            (NAN, ValueError),
            (INFINITE, ValueError),
            ("5", TypeError),
            (True, TypeError),
        ]
    ),
    ({"output": "loud"}, ValueError, "output is 'loud': write one of 'live', 'by-rank', 'quiet'"),
    ({"output": ""}, ValueError, "output is '': write one of 'live', 'by-rank', 'quiet'"),
    ({"output": 1}, TypeError, "output is 1.*write one of 'live', 'by-rank', 'quiet'"),
]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The jobs and templates that were started: none in all of these tests."""
    found: list[Any] = []

    def note(*args: Any, **_: Any) -> None:
        found.append(args)
        raise AssertionError("something was started")

    monkeypatch.setattr(client, "start_job", note)
    monkeypatch.setattr(client, "TemplateClient", note)
    yield found
    assert found == []


def work() -> None:
    raise AssertionError("it ran in the notebook")


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=lambda x: str(x)[:30])
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    for call in (functools.partial(launch, work), World, Options):
        with pytest.raises(kind, match=message) as raised:
            call(**arguments)
        assert type(raised.value) is kind


@pytest.mark.parametrize(
    "arguments",
    [
        {"nproc_per_node": 256},
        {"nnodes": 16, "nproc_per_node": 16},
        {"threads": 1, "timeout": 0.5, "output": "quiet", "backend": "nccl"},
        {"timeout": None, "threads": None, "output": None},
    ],
)
def test_good_arguments(arguments: dict[str, Any]) -> None:
    assert World(**arguments).world_size in (2, 256)


@pytest.mark.parametrize("value", ["loud", "LIVE", " "])
def test_bad_output_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DDP_LAB_OUTPUT", value)
    message = f"DDP_LAB_OUTPUT is {value!r}: write one of 'live', 'by-rank', 'quiet'"
    with pytest.raises(ValueError, match=message):
        launch(work)
    with pytest.raises(ValueError, match=message):
        World().run(work)
    assert Options(output="live").output_mode == "live"  # the argument goes first
    monkeypatch.setenv("DDP_LAB_OUTPUT", "")
    assert Options().output_mode == "live"


@pytest.mark.parametrize("value", ["thread", "Spawn", "1"])
def test_bad_start_of_the_environment(kernel: Kernel, value: str) -> None:
    kernel.check(f"os.environ['DDP_LAB_START'] = {value!r}")
    cell = kernel.run("launch(lambda: None)")
    kernel.check("del os.environ['DDP_LAB_START']")
    assert cell.error is not None
    assert (cell.error.name, cell.outputs) == ("ValueError", [])
    assert f"DDP_LAB_START is {value!r}: set it to 'fork' or 'spawn'" in cell.error.message
    assert kernel.value("list(launch(lambda: 1))") == [1, 1]


@pytest.mark.parametrize("thing", [3, None, "train", [work], {"fn": work}])
def test_not_a_function(thing: Any) -> None:
    message = rf"must be a function, but it is {re.escape(repr(thing))} \(a {type(thing).__name__}"
    for call in (launch, World().run):
        with pytest.raises(TypeError, match=message + r".*write launch\(train, 100\), not"):
            call(thing)


def steps(count: int, *, rate: float = 0.1) -> None: ...


class Trainer:
    def train(self, count: int) -> None: ...

    def __call__(self, count: int) -> None: ...


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (work, (1,), r"work\(\).* with 1 argument.*too many positional"),
        (steps, (), r"steps\(count.* with 0 argument.*missing a required argument: 'count'"),
        (steps, (1, 2), r"steps\(count.* with 2 argument.*too many positional"),
        (lambda a, b: a, (1,), r"<lambda>\(a, b\) cannot be called with 1 argument.*'b'"),
        (functools.partial(steps, 1), (2,), "cannot be called with 1 argument"),
        (Trainer().train, (), r"train\(count.*'count'"),
        (Trainer(), (1, 2), r"Trainer\(count.*too many positional"),
    ],
)
def test_wrong_number_of_arguments(fn: Any, args: tuple[Any, ...], message: str) -> None:
    hints = "nothing else; a rank learns its number from dist.get_rank.*use a lambda"
    for call in (launch, World().run):
        with pytest.raises(TypeError, match=f"{message}.*{hints}"):
            call(fn, *args)


def test_keyword_arguments_of_the_function_are_refused() -> None:
    with pytest.raises(TypeError, match="rate"):
        launch(steps, 1, rate=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="rate"):
        World().run(steps, 1, rate=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("size", [2, 3])
def test_nccl_with_too_few_gpus(kernel: Kernel, size: int) -> None:
    if kernel.value(f"torch.cuda.device_count() >= {size}"):
        pytest.skip("this machine has enough GPUs")
    gpus = kernel.value("torch.cuda.device_count()")
    for source in (
        f"launch(lambda: print('ran'), nproc_per_node={size}, backend='nccl')",
        f"World({size}, backend='nccl').run(lambda: print('ran'))",
    ):
        cell = kernel.run(source)
        assert cell.error is not None
        assert (cell.error.name, cell.outputs) == ("ValueError", [])
        assert cell.error.message == (
            f"backend='nccl' needs a GPU for each of the {size} ranks, and this machine offers "
            f"{gpus}: write backend='gloo', or leave backend out"
        )
    # "auto" takes what there is.
    assert kernel.value(f"list(launch(dist.get_backend, nproc_per_node={size}))") == ["gloo"] * size
