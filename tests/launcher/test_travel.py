"""Functions, arguments and results reach the other side whole, and leave nothing behind."""

from __future__ import annotations

import ast
import gc
import os
import pickle
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ddp_lab
from ddp_lab.launcher import travel
from ddp_lab.launcher.call import prepare
from tests.harness import Kernel, line_of, run_script

SIZES = pytest.mark.parametrize("size", [2, 3])


@pytest.fixture(scope="module", autouse=True)
def worlds(kernel: Kernel) -> Iterator[None]:
    """`worlds[2]` and `worlds[3]` in the kernel, started before what is left behind is counted."""
    kernel.check(
        "import abc, contextlib, dataclasses, enum, functools, numpy as np, torch.nn as nn"
    )
    kernel.check("rank = dist.get_rank")
    kernel.check("torch.optim.Adam(nn.Linear(1, 1).parameters())")  # torch 2.9 makes a folder then
    kernel.check("worlds = {size: World(nproc_per_node=size, timeout=50) for size in (2, 3)}")
    kernel.check("_ = [world.run(rank) for world in worlds.values()]")
    yield
    kernel.check("_ = [world.shutdown() for world in worlds.values()]")


# Functions

DEFINITIONS = """\
import abc, asyncio, collections, dataclasses, enum, functools, math
factor = 10
table = {"a": 1}

def plain(x): return x * factor
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def is_even(n): return n == 0 or is_odd(n - 1)
def is_odd(n): return n != 0 and is_even(n - 1)

def doubled(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return 2 * fn(*args, **kwargs)
    return inner

@doubled
def decorated(x, *, y=factor): return x + y

@functools.lru_cache
def cached(n): return n + factor
@functools.cache
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def counter():
    count = 0
    def step():
        nonlocal count
        count += 1
        return count
    return step
step = counter()

class Base(abc.ABC):
    made = 0
    def __init__(self, x): self.x = x
    @abc.abstractmethod
    def value(self): ...
    def __call__(self, y): return self.value() + y

class Child(Base):
    __slots__ = ("extra",)
    def value(self): return super().__getattribute__("x") * factor
    @property
    def double(self): return 2 * self.x
    @classmethod
    def build(cls, x): return cls(x)
    @staticmethod
    def helper(x): return x - 1

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)

class Color(enum.Enum):
    RED = "r"
    BLUE = "b"

Pair = collections.namedtuple("Pair", "left right")
async def later(x): return x + factor
def numbers(n): yield from range(n)
def writes():
    global written
    written = factor
    return written
"""

CALLS = {
    "a function with a global": ("plain, 3", 30),
    "recursion": ("factorial, 5", 120),
    "functions that call each other": ("is_even, 10", True),
    "a decorated function": ("decorated, 1", 22),
    "a cached function": ("cached, 1", 11),
    "a cached function that calls itself": ("fibonacci, 80", 23416728348467685),
    "a closure with a state": ("step", 1),
    "a lambda": ("lambda: factor + table['a']", 11),
    "a lambda in a list": ("[lambda x: x + factor][0], 1", 11),
    "a partial": ("functools.partial(decorated, y=1), 1", 4),
    "a builtin": ("math.sqrt, 4", 2.0),
    "a bound method": ("Child(2).value", 20),
    "an object that can be called": ("Child(2), 1", 21),
    "a class method": ("Child.build(3).value", 30),
    "a static method": ("Child.helper, 3", 2),
    "a class": ("lambda: Child(2).double", 4),
    "a dataclass": ("lambda p: (p == Point(1), p.x, Point(2).y), Point(1)", (True, 1, [])),
    "an enumeration": ("lambda c: (c is Color.RED, Color('b').name), Color.RED", (True, "BLUE")),
    "a named tuple": ("lambda p: p.left + p.right, Pair(1, 2)", 3),
    "a coroutine": ("lambda: asyncio.run(later(1))", 11),
    "a generator function": ("lambda: list(numbers(3))", [0, 1, 2]),
    "a function as an argument": ("lambda fn, x: fn(x), plain, 2", 20),
    "a nested lambda": ("(lambda a: lambda b: a * b)(3), 4", 12),
    "a comprehension": ("lambda: [plain(i) for i in range(2) if i in {0, 1}]", [0, 10]),
    "a global that is written": ("writes", 10),
    "a module of the notebook": ("lambda: collections.Counter('aa')['a']", 2),
}


@SIZES
def test_functions_of_cells(kernel: Kernel, size: int) -> None:
    kernel.check(DEFINITIONS)
    runs = "".join(f"    list(worlds[{size}].run({call})),\n" for call, _ in CALLS.values())
    kernel.check(f"got = [\n{runs}]")
    for (name, (_, expected)), got in zip(CALLS.items(), kernel.value("got"), strict=True):
        assert got == [expected] * size, name
    assert kernel.value("('written' in globals(), Base.made, step())") == (False, 0, 1)


def test_functions_of_a_script(tmp_path: Path) -> None:
    runs = "".join(f"        list(world.run({call})),\n" for call, _ in CALLS.values())
    script = tmp_path / "program.py"
    script.write_text(
        f"{DEFINITIONS}\nfrom ddp_lab import World\nif __name__ == '__main__':\n"
        f"    with World(nproc_per_node=2, output='quiet') as world:\n        got = [\n{runs}]\n"
        "    print(repr(got))\n"
    )
    root = str(Path(ddp_lab.__file__).parents[1])
    ran = run_script(str(script), "env", f"PYTHONPATH={root}", sys.executable)
    assert ran.returncode == 0, ran.stderr
    expected = [[value] * 2 for _, value in CALLS.values()]
    assert ast.literal_eval(ran.stdout.splitlines()[-1]) == expected
    assert ran.stderr == ""


@SIZES
def test_an_instance_that_comes_back_is_of_the_notebooks_own_class(
    kernel: Kernel, size: int
) -> None:
    kernel.check(
        textwrap.dedent("""\
        unit = 1
        class Model:
            steps = 0
            def __init__(self, rank): self.rank = rank
            def value(self): return self.rank * unit
        before = Model.value
        def train():
            Model.steps = 99
            return Model(1 + rank())
        """)
    )
    kernel.check(f"got = worlds[{size}].run(train)\nunit = 10")
    assert kernel.value("[isinstance(m, Model) for m in got]") == [True] * size
    assert kernel.value("[m.value() for m in got]") == [10 * (1 + r) for r in range(size)]
    # The notebook's class is as it was, and still sees the notebook's variables.
    assert kernel.value("(Model.steps, Model.value is before, Model(7).value())") == (0, True, 70)
    # What the notebook changes in its class reaches the ranks with the next call.
    kernel.check("Model.steps = 5\nModel.value = lambda self: -unit")
    assert kernel.value(f"list(worlds[{size}].run(lambda: Model.steps))") == [5] * size
    assert kernel.value(f"list(worlds[{size}].run(Model(1).value))") == [-10] * size


@SIZES
def test_a_function_runs_in_the_namespace_of_its_rank(kernel: Kernel, size: int) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        world = worlds[{size}]
        shared, brought = "notebook", 1
        def keep():
            global kept
            kept = rank() + brought
        def read(): return kept, brought
        def only_placed(): return placed
        world.put(brought=50)
        world.run(keep)
        """)
    )
    # The global that the function brings along overwrites what was put.
    assert kernel.value("world.get('kept')") == [rank + 1 for rank in range(size)]
    assert kernel.value("world.get('brought')") == [1] * size
    kernel.check("brought = 2")
    assert kernel.value("list(world.run(read))") == [(rank + 1, 2) for rank in range(size)]
    kernel.check("world.put(placed=['p'])")
    assert kernel.value("list(world.run(only_placed))") == [["p"]] * size
    assert kernel.value("'kept' in globals() or 'placed' in globals()") is False


@SIZES
def test_sources_travel_too(kernel: Kernel, size: int) -> None:
    source = textwrap.dedent("""\
        import inspect, traceback
        # a comment line
        def helper():
            raise ValueError("here")
        def look():
            try:
                helper()
            except ValueError:
                code = helper.__code__
                return traceback.format_exc(), inspect.getsource(helper), code.co_filename
        """)
    number = kernel.check(source).number
    for trace, text, filename in kernel.value(f"list(launch(look, nproc_per_node={size}))"):
        assert filename == f"In[{number}]"
        assert f'File "In[{number}]", line {line_of(source, "raise")}, in helper' in trace
        assert '    raise ValueError("here")' in trace
        assert text == 'def helper():\n    raise ValueError("here")\n'


# What cannot travel: (definitions, call, the name that the message must give)

HELD = """\
import functools, socket
lock = threading.Lock()
numbers = (i for i in range(3))
log = open(os.devnull, "w")
channel = socket.socket()
nested = {"model": [1, {"lock": lock}]}
"""
CULPRITS = {
    "a global": ("def f(): return lock", "f", "`lock` (a _thread.lock)"),
    "a generator": ("def f(): return next(numbers)", "f", "`numbers` (a generator)"),
    "an open file": ("def f(): log.write('x')", "f", "`log` (a _io.TextIOWrapper)"),
    "a socket": ("def f(): return channel", "f", "`channel` (a socket.socket)"),
    "in a list": ("def f(): return nested", "f", "`nested['model'][1]['lock']` (a _thread.lock)"),
    "a closure": (
        "def make():\n    guard = threading.Lock()\n    def f():\n        with guard: pass\n"
        "    return f",
        "make()",
        "`guard` (a _thread.lock)",
    ),
    "a default": ("def f(guard=lock): pass", "f", "`guard` (a _thread.lock)"),
    "a keyword's default": ("def f(*, guard=lock): pass", "f", "`guard` (a _thread.lock)"),
    "an argument": ("def f(x, guard): pass", "f, 1, lock", "`guard` (a _thread.lock)"),
    "in an argument": ("def f(*parts): pass", "f, 1, [lock]", "`parts[1][0]` (a _thread.lock)"),
    "in a helper": (
        "def helper(): return lock\ndef f(): return helper()",
        "f",
        "`lock` in `helper` (a _thread.lock)",
    ),
    "in functions that call each other": (
        "def f(n): return g(n)\ndef g(n): return f(n) if n else lock",
        "f, 3",
        "`lock` in `g` (a _thread.lock)",
    ),
    "an attribute": (
        "class Inner:\n    def __init__(self): self.lock = threading.Lock()\n"
        "class Outer:\n    def __init__(self): self.model = Inner()\n    def train(self): pass",
        "Outer().train",
        "`self.model.lock` (a _thread.lock)",
    ),
    "a slot": (
        "class S:\n    __slots__ = ('a', 'guard')\n    def __init__(self): self.guard = lock\n"
        "thing = S()\ndef f(): return thing",
        "f",
        "`thing.guard` (a _thread.lock)",
    ),
    "a class's attribute": (
        "class C:\n    guard = lock\ndef f(): return C",
        "f",
        "`C.guard` (a _thread.lock)",
    ),
    "a method's global": (
        "class D:\n    def work(self): return lock\nd = D()\ndef f(): return d.work()",
        "f",
        "`lock` in `D.work` (a _thread.lock)",
    ),
    "a decorator": (
        "def guarded(fn):\n    guard = threading.Lock()\n    @functools.wraps(fn)\n"
        "    def inner():\n        with guard: return fn()\n    return inner\n"
        "@guarded\ndef f(): pass",
        "f",
        "`guard` (a _thread.lock)",
    ),
    "a partial": (
        "def f(x, guard): pass",
        "functools.partial(f, guard=lock), 1",
        "`guard` (a _thread.lock)",
    ),
    "a lambda": ("pass", "lambda: numbers", "`numbers` (a generator)"),
    "a loader's iterator": (
        "batches = iter(torch.utils.data.DataLoader([1, 2]))\ndef f(): return next(batches)",
        "f",
        "`batches._sampler_iter` (a generator)",
    ),
}


def test_what_cannot_travel_is_named_at_the_door(kernel: Kernel) -> None:
    # Each in a cell of its own and nothing is started: the count of jobs stays the same.
    kernel.check(HELD)
    kernel.check("from ddp_lab.launcher import world as _world")
    kernel.check("started, start = [], _client.start_job")
    kernel.check("_client.start_job = lambda job: started.append(job) or start(job)")
    for name, (definitions, call, named) in CULPRITS.items():
        kernel.check(definitions)
        for source in (f"launch({call})", f"worlds[2].run({call})"):
            cell = kernel.run(source)
            assert cell.error is not None, name
            assert cell.error.name == "TypeError", name
            assert named in cell.error.message, name
            assert "create it inside the function" in cell.error.message
    assert kernel.value("len(started)") == 0
    kernel.check("_ = launch(rank)")
    assert kernel.value("len(started)") == 1
    kernel.check("_client.start_job = start; log.close(); channel.close()")
    assert kernel.value("list(worlds[2].run(rank))") == [0, 1]


def test_a_culprit_among_large_data_is_found_without_copying_it() -> None:
    import threading

    large, guard = torch.zeros(50_000_000), threading.Lock()

    def work() -> Any:
        return large, guard

    with pytest.raises(TypeError, match="`guard`"):
        prepare(work, ())


# Results


def make_tied() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def make_views() -> list[torch.Tensor]:
    base = torch.arange(12.0)
    return [base, base[2:5], base.view(3, 4).t(), base[::3]]


def same(left: Any, right: Any) -> bool:
    """Equal in type, shape, layout and content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
            return False
        if left.requires_grad != right.requires_grad:
            return False
        if left.layout is not torch.strided:
            return torch.equal(left.to_dense(), right.to_dense())
        if left.stride() != right.stride() or left.is_conj() != right.is_conj():
            return False
        if left.element_size() == 1:
            return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        return torch.equal(
            left.double() if left.dtype == torch.uint16 else left,
            right.double() if right.dtype == torch.uint16 else right,
        )
    if isinstance(left, np.ndarray):
        alike = (left.dtype, left.shape, left.flags.f_contiguous, left.flags.writeable)
        other = (right.dtype, right.shape, right.flags.f_contiguous, right.flags.writeable)
        return alike == other and bool(np.array_equal(left, right))
    if isinstance(left, torch.nn.Module):
        return same(left.state_dict(), right.state_dict())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


RESULTS: dict[str, Callable[[], Any]] = {
    "None and numbers": lambda: [None, True, 1, 2.5, 1j, 10**50, "text", b"bytes"],
    "1 MiB of bytes": lambda: bytes(range(256)) * 4096,
    "a bytearray": lambda: bytearray(b"x" * 200_000),
    "nested containers": lambda: {"a": [1, (2, {3}, frozenset([4]))], (1, 2): {"b": ...}},
    "floats": lambda: [torch.rand(3, 4), torch.zeros(()), torch.ones(100_000)],
    "integers and bools": lambda: [torch.arange(5), torch.tensor([True, False])],
    "bfloat16 and half": lambda: [torch.rand(3).bfloat16(), torch.rand(3).half()],
    "float8 and uint16": lambda: [torch.ones(4).to(torch.float8_e4m3fn),
                                  torch.tensor([1, 65535], dtype=torch.uint16)],
    "complex": lambda: [torch.rand(3, dtype=torch.complex64), torch.rand(3) * 1j,
                        torch.full((2,), 1 + 2j).conj()],
    "empty": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "not contiguous": lambda: [torch.rand(4, 6).t(), torch.rand(1000, 400)[::2, 1::3],
                               torch.rand(3, 1).expand(3, 4)],
    "requires_grad": lambda: [torch.ones(2, requires_grad=True),
                              torch.nn.Parameter(torch.rand(3)),
                              torch.ones(2, requires_grad=True) * 2],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "a module": lambda: make_tied(),
    "a state_dict": lambda: make_tied().state_dict(),
    "an optimizer's state": lambda: torch.optim.Adam(make_tied().parameters()).state_dict(),
    "arrays": lambda: [np.arange(6).reshape(2, 3), np.zeros((300, 400)), np.float32(3),
                       np.array(["a", None], dtype=object), np.empty((0, 2))],
    "Fortran's order": lambda: [np.asfortranarray(np.random.default_rng(0).random((300, 400))),
                                np.asfortranarray(np.ones((2, 3)))],
    "slices of arrays": lambda: np.arange(200_000)[::2].copy()[::-1].copy(),
    "types and devices": lambda: [torch.float32, torch.device("cpu"), torch.Size([2]), int],
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_a_parcel_holds_what_was_packed(name: str) -> None:
    torch.manual_seed(0)
    original = RESULTS[name]()
    parcel, _ = travel.pack(original)
    assert same(travel.unpack(parcel), original)


@SIZES
def test_results_arrive_as_they_were(kernel: Kernel, size: int, tmp_path: Path) -> None:
    def results() -> dict[str, Any]:
        torch.manual_seed(0)
        return {name: make() for name, make in RESULTS.items()}

    program = tmp_path / "program.pickle"
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        program.write_bytes(cloudpickle.dumps((results, same)))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    kernel.check(f"import pickle\nresults, same = pickle.load(open({str(program)!r}, 'rb'))")
    kernel.check(f"expected, got = results(), launch(results, nproc_per_node={size})")
    wrong = "[(r, name) for r in range(len(got)) for name in expected"
    assert kernel.value(f"{wrong} if not same(got[r][name], expected[name])]") == []
    assert kernel.value("len(got)") == size


def test_tensors_that_share_memory_still_do() -> None:
    parcel, _ = travel.pack({"model": make_tied(), "views": make_views()})
    received = travel.unpack(parcel)
    first, second = received["model"]
    assert first.weight is second.weight
    base, part, turned, every = received["views"]
    base[3] = 99
    assert part[1] == turned[3, 0] == every[1] == 99
    state = travel.unpack(travel.pack(make_tied().state_dict())[0])
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


@SIZES
def test_large_results_arrive(kernel: Kernel, size: int) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        def large():
            return torch.full((25_000_000,), 1.0 + rank()), bytes([rank()]) * (1 << 20)
        got = launch(large, nproc_per_node={size})
        """)
    )
    first_and_last = "[(t[0].item(), t[-1].item(), t.numel(), b == bytes([r]) * (1 << 20))"
    values = kernel.value(f"{first_and_last} for r, (t, b) in enumerate(got)]")
    assert values == [(1.0 + rank, 1.0 + rank, 25_000_000, True) for rank in range(size)]
    kernel.check("for t, _ in got: t += 1  # the notebook may change what it got")
    kernel.check("del got, t, _")


def test_functions_and_exceptions_come_back(kernel: Kernel) -> None:
    kernel.check(
        textwrap.dedent("""\
        class Odd(Exception):
            def __init__(self, code, reason):
                super().__init__(f"{code}: {reason}")
                self.code = code
        def work():
            odd = Odd(7, "why")
            odd.add_note("a note") if hasattr(odd, "add_note") else None
            return (lambda x: x + rank_now), odd, ValueError("plain"), OSError(2, "no file")
        rank_now = 1
        fn, odd, plain, missing = launch(work)[1]
        """)
    )
    assert kernel.value("(fn(1), type(odd) is Odd, str(odd), odd.code)") == (2, True, "7: why", 7)
    assert kernel.value("(repr(plain), missing.errno, type(missing).__name__)") == (
        "ValueError('plain')",
        2,
        "FileNotFoundError",
    )


UNSENDABLE = {
    "a lock": ("threading.Lock()", "returned a _thread.lock, which cannot be sent"),
    "a generator": ("(i for i in range(3))", "returned a generator, which cannot be sent"),
    "inside a dict": ("{'a': [threading.Lock()]}", "returned a dict, which cannot be sent"),
    "a process group": ("dist.group.WORLD", "ProcessGroup, which cannot be sent"),
    "what needs its process group": (
        "nn.parallel.DistributedDataParallel(nn.Linear(2, 2))",
        "returned something that cannot be rebuilt in the notebook (ValueError: Default process",
    ),
    "what cannot be unpickled": (
        "Broken()",
        "returned something that cannot be rebuilt in the notebook (ZeroDivisionError: ",
    ),
}


@SIZES
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_a_result_that_cannot_be_sent_is_a_clear_failure(
    kernel: Kernel, size: int, kind: str
) -> None:
    value, message = UNSENDABLE[kind]
    kernel.check(
        "class Broken:\n    def __reduce__(self): return (lambda: 1 / 0), ()\n"
        "kept = 'still here'\n"
        f"world = worlds[{size}]\nworld.put(kept=kept)"
    )
    # Rank 0 returns something good: the others' fate must not hide behind it.
    cell = kernel.run(f"world.run(lambda: ({value}, 'good')[not rank()])")
    assert cell.error is not None
    assert cell.error.name == "RankFailedError"
    first, *rest = cell.error.message.splitlines()
    assert first.startswith(f"rank 1 of {size} ")
    assert message in first
    assert "return numbers, tensors, a state_dict or other plain data" in first
    assert ("  rank 2 did the same" in rest) == (size == 3)
    assert kernel.value("sys.last_value.results") == ["good"] + [None] * (size - 1)
    assert kernel.value("world.get('kept')") == ["still here"] * size


@SIZES
def test_the_notebooks_model_is_untouched(kernel: Kernel, size: int) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        torch.manual_seed(0)
        model = nn.Linear(300, 300)
        before = {{k: v.clone() for k, v in model.state_dict().items()}}
        def train(mine):
            mine.weight.data.add_(1 + rank())
            model.bias.data.add_(1 + rank())
            return mine.state_dict(), model.bias
        got = launch(train, model, nproc_per_node={size})
        """)
    )
    assert kernel.value("all(v.equal(before[k]) for k, v in model.state_dict().items())")
    for part, key in (("[0]['weight']", "weight"), ("[1]", "bias")):
        grown = f"[torch.allclose(got[r]{part}, before['{key}'] + 1 + r) for r in range({size})]"
        assert kernel.value(grown) == [True] * size


# Arguments


def test_large_arguments_are_shared_until_a_rank_writes(kernel: Kernel) -> None:
    kernel.check(
        textwrap.dedent("""\
        def work(large):
            def copied():
                rollup = open("/proc/self/smaps_rollup").read()
                return 1024 * int(rollup.split("Anonymous:")[1].split()[0])
            before = copied()
            read = large[::1024].sum().item(), large[-1].item()
            grown = copied() - before
            large[rank()] = 100 + rank()
            dist.barrier()
            return read, grown, large[:3].tolist()
        large = torch.ones(100_000_000)
        got = list(launch(work, large, nproc_per_node=3))
        """),
        timeout=120,
    )
    for rank, (read, grown, start) in enumerate(kernel.value("got")):
        assert read == (97657.0, 1.0)
        assert grown < 50 << 20  # not 400 MB more for each
        assert start == [100.0 + rank if i == rank else 1.0 for i in range(3)]
    assert kernel.value("(large.sum() == large.numel()).item()")
    kernel.check("del large")


@SIZES
def test_a_loader_with_workers_over_a_dataset_of_a_cell(kernel: Kernel, size: int) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 12
            def __getitem__(self, i): return torch.tensor(i * i), os.getpid()
        def load():
            data = Squares()
            sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
            loader = torch.utils.data.DataLoader(data, 2, sampler=sampler, num_workers=2)
            seen, pids = [], set()
            for _ in range(2):
                for squares, workers in loader:
                    seen += squares.tolist()
                    pids |= set(workers.tolist())
            return seen, len(pids), os.getpid() in pids
        got = list(launch(load, nproc_per_node={size}))
        """)
    )
    for rank, (seen, workers, itself) in enumerate(kernel.value("got")):
        assert seen == [i * i for i in range(rank, 12, size)] * 2
        assert (workers, itself) == (4, False)


# Sizes around the limits of what goes apart and what goes inline

_edges = [travel._APART, travel._INLINE, travel._INLINE - travel._APART]
sizes = st.one_of(
    st.integers(0, 300),
    st.sampled_from(_edges).flatmap(lambda edge: st.integers(edge - 200, edge + 200)),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(sizes, max_size=4))
@example([travel._APART, travel._APART])
@example([travel._INLINE])
def test_sizes_around_the_limits(lengths: list[int]) -> None:
    tensors = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in lengths]
    arrays = [np.arange(n).astype(np.float64) for n in lengths]
    texts = [bytes(n % 251 for n in range(length)) for length in lengths[:2]]
    before = len(os.listdir("/proc/self/fd"))
    parcel, _ = travel.pack((tensors, arrays, texts))
    inline = sum(parcel.sizes) <= travel._INLINE
    assert (parcel.descriptor is None) == inline == (parcel.inline is not None)
    share = pickle.loads(pickle.dumps(parcel.share())) if inline else parcel.share()
    for each in (parcel, share):
        assert same(travel.unpack(each), (tensors, arrays, texts))
        assert each.descriptor is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # the fork does no harm
def test_what_one_receiver_writes_the_others_do_not_see() -> None:
    parcel, _ = travel.pack(torch.zeros(100_000))
    second = parcel.share()
    mine, theirs = travel.unpack(parcel), travel.unpack(second)
    mine += 1
    if (child := os.fork()) == 0:  # as a loader's worker
        mine[0] = 7  # one element: a fork has none of its parent's threads
        os._exit(0)
    os.waitpid(child, 0)
    assert (theirs.sum(), mine.sum()) == (0, 100_000)


def test_mapped_memory_goes_with_the_last_thing_that_refers_to_it() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("ddp-lab-parcel")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    maps, open_files = mapped(), descriptors()
    parcels = [travel.pack([torch.ones(100_000), np.ones(100_000)])[0] for _ in range(20)]
    received = [travel.unpack(parcel) for parcel in parcels]
    assert descriptors() == open_files  # a notebook may keep thousands of results
    assert mapped() == maps + 20
    parts = [(tensor[:10], None) for tensor, _ in received]
    del received
    gc.collect()
    assert mapped() == maps + 20
    assert all(part.sum() == 10 for part, _ in parts)
    del parts
    gc.collect()
    assert mapped() == maps


@pytest.mark.soak
@SIZES
def test_no_descriptor_is_left_open_by_calls(kernel: Kernel, size: int) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        import psutil
        world = worlds[{size}]
        def family():
            found = psutil.Process().children(recursive=True)
            return [psutil.Process(), *found]
        def opened():  # but not files, such as that of IPython's history
            links = [(p.pid, f"/proc/{{p.pid}}/fd/{{n}}") for p in family()
                     for n in os.listdir(f"/proc/{{p.pid}}/fd")]
            kinds = [(pid, os.readlink(link)) for pid, link in links if os.path.islink(link)]
            return len([kind for _, kind in kinds if kind[:2] in ("so", "pi", "an", "/m")])
        def mapped(): return sum("ddp-lab-parcel" in open(f"/proc/{{p.pid}}/maps").read()
                                 for p in family())
        def echo(thing): return thing
        def fail(thing): raise ValueError
        def displays(): display({{"text/plain": "d"}}, raw=True)
        def call():
            small, large = world.run(echo, 1), world.run(echo, torch.ones(100_000))
            with contextlib.suppress(RuntimeError): world.run(fail, torch.ones(100_000))
            with contextlib.suppress(TypeError): world.run(echo, threading.Lock())
            world.run(displays)
            return large
        call()
        before = opened()
        for _ in range(50): call()
        kept = [call() for _ in range(5)]
        """)
    )
    assert kernel.value("opened() == before"), kernel.value("(before, opened())")
    kernel.check("del kept\nimport gc\n_ = gc.collect()\n_ = world.run(gc.collect)")
    assert kernel.value("opened() == before")
    assert kernel.value("mapped()") == 0


@pytest.mark.soak
@SIZES
def test_a_rank_that_dies_half_way_through_its_result_leaves_nothing(
    kernel: Kernel, size: int
) -> None:
    kernel.check(
        textwrap.dedent(f"""\
        def size(name):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(f"/dev/shm/{{name}}").st_size
            return 0
        def shm():  # other programs use that folder, too, for small things
            return [name for name in os.listdir("/dev/shm") if size(name) > 100_000_000]
        before = shm()
        def die_while_sending():
            tensor = torch.ones(100_000_000)
            real = os.pwrite
            def half(descriptor, data, at):
                if len(data) > 1_000_000:
                    real(descriptor, data[: len(data) // 2], at)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(descriptor, data, at)
            if rank() == 1: os.pwrite = half
            return tensor if rank() < 2 else None
        world = World(nproc_per_node={size})
        """)
    )
    cell = kernel.run("world.run(die_while_sending)")
    assert cell.error is not None
    assert cell.error.message.startswith(f"rank 1 of {size} was killed by SIGKILL")
    assert "variables are lost" in cell.error.message
    assert kernel.value("shm() == before")
    assert kernel.value("[r is None for r in sys.last_value.results]")[1]
    kernel.check("sys.last_value = None")
    # The World starts afresh, and a whole tensor arrives.
    kernel.check("got = world.run(lambda: torch.full((100_000_000,), 1.0 * rank()))")
    assert kernel.value("[(t[0].item(), t[-1].item()) for t in got]") == [
        (1.0 * rank, 1.0 * rank) for rank in range(size)
    ]
    kernel.check("del got\nworld.shutdown()")
    assert kernel.value("shm() == before")


def test_messages_name_no_addresses(kernel: Kernel) -> None:
    cell = kernel.run("launch(lambda: threading.Lock(), nproc_per_node=2)")
    assert cell.error is not None
    assert not re.search("0x[0-9a-f]+", cell.error.message)
