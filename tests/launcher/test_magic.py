"""`%%ranks`: a cell on every rank, with variables that stay from cell to cell."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.harness import Kernel, is_template, marked_processes, wait_until

SIZES = pytest.mark.parametrize("size", [2, 3])


@pytest.fixture(autouse=True)
def extension(kernel: Kernel) -> Iterator[None]:
    """Each test starts without a world and leaves none."""
    kernel.check("%load_ext ddp_lab")
    yield
    kernel.check("%ranks --shutdown")


def lines(text: str) -> dict[int, list[str]]:
    """The lines of each rank."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in text.splitlines():
        tagged = re.fullmatch(r"\[rank (\d+)\] ?(.*)", line)
        assert tagged, line
        found[int(tagged[1])].append(tagged[2])
    return dict(found)


def ranks_of(kernel: Kernel) -> list[int]:
    return sorted(p.pid for p in kernel.others() if p.name.startswith("ddp-lab rank"))


@SIZES
def test_variables_stay_from_cell_to_cell(kernel: Kernel, size: int) -> None:
    first = kernel.check(
        f"%%ranks -n {size}\nimport torch, torch.distributed as dist\nrank = dist.get_rank()\n"
        "seen = torch.tensor([rank + 1])\ndist.all_reduce(seen)"
    )
    assert first.outputs == []
    cell = kernel.check("%%ranks\nseen += rank\nprint('seen', seen.item(), dist.get_world_size())")
    total = size * (size + 1) // 2
    assert lines(cell.stdout) == {r: [f"seen {total + r} {size}"] for r in range(size)}
    assert kernel.value("'seen' in globals()") is False  # the notebook's own are apart
    pids = ranks_of(kernel)
    assert len(pids) == size
    kernel.check("%%ranks\npass")
    assert ranks_of(kernel) == pids  # the same processes all along


@SIZES
def test_the_last_expression_is_shown_as_in_a_normal_cell(kernel: Kernel, size: int) -> None:
    kernel.check(
        f"%%ranks -n {size}\nimport os\nrank = int(os.environ['RANK'])\n"
        "class Table:\n    def __repr__(self): return f'table {rank}'\n"
        "    def _repr_html_(self): return f'<b>{rank}</b>'"
    )
    shown = {
        "rank * 10": "{10 * rank}",
        "print('first')\n'text'": "first|'text'",
        "x = 5\nx": "5",
        "_ + 1": "6",
        "x; x + 1": "6",
        "{'b': 1, 'a': [rank]}": "{{'b': 1, 'a': [{rank}]}}",
        "'two\\nlines'\n# a comment": "'two\\nlines'",
        "(x,\n rank)  # over two lines\n": "(5, {rank})",
    }
    for source, expected in shown.items():
        cell = kernel.check(f"%%ranks\n{source}")
        assert lines(cell.stdout) == {
            r: eval(f"f{expected!r}", {"rank": r}).split("|") for r in range(size)
        }, source
    for source in ("rank;", "rank ; # said nothing", "None", "x = rank", "if True:\n    rank"):
        assert kernel.check(f"%%ranks\n{source}").outputs == [], source
    table = kernel.check("%%ranks\nTable()").outputs
    tables = [o["data"] for o in table if o["type"] == "display_data"]
    assert sorted(data["text/html"] for data in tables) == [f"<b>{r}</b>" for r in range(size)]


def test_rich_values_and_figures(kernel: Kernel) -> None:
    kernel.check("%matplotlib inline")
    cell = kernel.check(
        "%%ranks -n 2 -o by-rank\nimport os\nimport matplotlib.pyplot as plt\n"
        "rank = int(os.environ['RANK'])\nprint('drawing')\n_ = plt.plot([rank, 1])\n"
        "class Table:\n    def _repr_html_(self): return f'<b>{rank}</b>'\n"
        "    def __repr__(self): return 'table'\n"
        "Table()"
    )
    shown = [o for o in cell.outputs if o["type"] == "display_data"]
    assert len(shown) == 4
    assert lines(cell.stdout) == {0: ["drawing", "", ""], 1: ["drawing", "", ""]}
    tables, figures = shown[::2], shown[1::2]
    assert [o["data"].get("text/html") for o in tables] == ["<b>0</b>", "<b>1</b>"]
    # Figures that are open are shown at the end of the cell, and then closed.
    assert all(o["data"]["image/png"].startswith("iVBOR") for o in figures)
    assert lines(kernel.check("%%ranks\nplt.get_fignums()").stdout) == {0: ["[]"], 1: ["[]"]}


@SIZES
def test_some_ranks_only(kernel: Kernel, size: int) -> None:
    kernel.check(f"%%ranks -n {size}\nimport os\nrank = int(os.environ['RANK'])\ntold = 'all'")
    last = size - 1
    cell = kernel.check(f"%%ranks -r 0,{last}\ntold = 'picked'\nrank")
    assert lines(cell.stdout) == {0: ["0"], last: [str(last)]}
    cell = kernel.check("%%ranks\ntold")
    picked = {0, last}
    expected = {r: ["'picked'" if r in picked else "'all'"] for r in range(size)}
    assert lines(cell.stdout) == expected
    assert lines(kernel.check("%%ranks --ranks 1\nrank").stdout) == {1: ["1"]}
    failing = kernel.run("%%ranks -r 1\nraise ValueError('one')")
    assert failing.error is not None
    assert failing.error.message.splitlines() == [
        f"rank 1 of {size} raised ValueError: one",
        f"  In[{failing.number}], line 2:  raise ValueError('one')",
    ]


BAD_LINES = {
    "-r 5": "there is no rank 5 among 2: write ranks from 0 to 1",
    "-r -1": "",
    "-r a": "write ranks such as 0,2",
    "-n 0": "nproc_per_node is 0: write a whole number from 1 to 256",
    "-n 1000": "nproc_per_node is 1000: write a whole number from 1 to 256",
    "-n four": "-n",
    "-b mpi": "write one of 'auto', 'gloo', 'nccl'",
    "-o loud": "write one of 'live', 'by-rank', 'quiet'",
    "-t 0": "write a number of seconds above 0",
    "--threads 0": "write a whole number from 1 to 256",
    "--colour": "--colour",
    "-n 3 -r 3": "there is no rank 3 among 3: write ranks from 0 to 2",
}


def test_bad_arguments_cost_nothing(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 2\nkept = 1")
    pids = ranks_of(kernel)
    for line, message in BAD_LINES.items():
        cell = kernel.run(f"%%ranks {line}\nprint('ran')")
        told = cell.error.message if cell.error else cell.stderr
        assert message in told, line
        assert "ran" not in cell.stdout, line
    assert ranks_of(kernel) == pids
    assert lines(kernel.check("%%ranks\nkept").stdout) == {0: ["1"], 1: ["1"]}


def test_resizing_starts_afresh_and_the_same_size_does_not(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 2\nkept = 'mine'")
    pids = ranks_of(kernel)
    assert lines(kernel.check("%%ranks -n 2\nkept").stdout) == {0: ["'mine'"], 1: ["'mine'"]}
    assert ranks_of(kernel) == pids
    cell = kernel.check("%%ranks -n 3\nimport os; os.environ['WORLD_SIZE'], 'kept' in globals()")
    assert lines(cell.stdout) == {r: ["('3', False)"] for r in range(3)}
    assert not set(ranks_of(kernel)) & set(pids)
    # What was asked for before still holds: three ranks, and now two nodes of them.
    cell = kernel.check("%%ranks --nnodes 2\nimport os; os.environ['GROUP_RANK']")
    assert lines(cell.stdout) == {r: [repr(str(r // 3))] for r in range(6)}
    assert len(ranks_of(kernel)) == 6


def test_options_reach_the_ranks(kernel: Kernel) -> None:
    cell = kernel.check("%%ranks -n 2 --threads 3 -b gloo\nimport torch; torch.get_num_threads()")
    assert lines(cell.stdout) == {0: ["3"], 1: ["3"]}


def test_output_and_timeout_change_without_a_restart(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 2\nkept = 1\nimport time")
    pids = ranks_of(kernel)
    assert kernel.check("%%ranks -o quiet\nprint('hush')").outputs == []
    assert kernel.check("%%ranks\nprint('hush')").outputs == []  # it stays
    assert kernel.check("%%ranks -o by-rank\nkept").stdout == "[rank 0] 1\n[rank 1] 1\n"
    cell = kernel.run("%%ranks -t .3\ntime.sleep(30)")
    assert cell.error is not None
    assert cell.error.name == "LaunchTimeoutError"
    assert f"In[{cell.number}], line 2" in cell.error.message
    assert kernel.check("%%ranks -t 60\nkept").stdout == "[rank 0] 1\n[rank 1] 1\n"
    assert ranks_of(kernel) == pids  # all could be interrupted in their sleep


@SIZES
def test_the_world_of_the_magic(kernel: Kernel, size: int) -> None:
    # `%ranks` gives the world, and starts nothing by itself.
    cell = kernel.check(f"world = %ranks -n {size}\nworld")
    assert cell.result == f"World({size} ranks: not started)"
    assert ranks_of(kernel) == []
    kernel.check("world.put(rate=0.5, names=['a'])")
    assert lines(kernel.check("%%ranks\nrate, names").stdout) == {
        r: ["(0.5, ['a'])"] for r in range(size)
    }
    kernel.check("%%ranks\nimport os\nmine = int(os.environ['RANK']) ** 2")
    assert kernel.value("world.get('mine')") == [r * r for r in range(size)]
    assert kernel.check(
        "(%ranks) is world" if False else "same = %ranks\nsame is world"
    ).result == ("True")
    # Functions and classes of the ranks' cells in `run`, and the other way round.
    kernel.check(
        "%%ranks\ndef double(x): return 2 * x + mine\n"
        "class Counter:\n    def step(self): return double(1)"
    )
    assert kernel.value("list(world.run(lambda: double(3)))") == [6 + r * r for r in range(size)]
    assert kernel.value("list(world.run(lambda: Counter().step()))") == [
        2 + r * r for r in range(size)
    ]
    kernel.check("def declare():\n    global helper\n    def helper(): return mine + 100")
    kernel.check("world.run(declare)")
    assert lines(kernel.check("%%ranks\nhelper()").stdout) == {
        r: [str(r * r + 100)] for r in range(size)
    }
    # A function that `run` brought along stays, and an instance that it made is of its class.
    kernel.check("class Net:\n    def __init__(self): self.x = 1")
    kernel.check("def build():\n    global net\n    net = Net()\nworld.run(build)")
    assert lines(kernel.check("%%ranks\nnet.x, isinstance(net, Net)").stdout) == {
        r: ["(1, True)"] for r in range(size)
    }


@SIZES
def test_an_error_costs_nothing(kernel: Kernel, size: int) -> None:
    kernel.check(f"%%ranks -n {size}\nimport os\nrank = int(os.environ['RANK'])\nkept = [rank]")
    pids = ranks_of(kernel)
    cell = kernel.run("%%ranks\nkept.append('before')\nx = 1\n\nmissing + 1\nkept.append('after')")
    assert cell.error is not None
    assert cell.error.name == "RankFailedError"
    others = "rank 1" if size == 2 else "ranks 1, 2"
    assert cell.error.message.splitlines() == [
        f"rank 0 of {size} raised NameError: name 'missing' is not defined",
        f"  In[{cell.number}], line 5:  missing + 1",  # the magic's own line is line 1
        f"  {others} did the same",
    ]
    assert ranks_of(kernel) == pids
    assert lines(kernel.check("%%ranks\nkept, x").stdout) == {
        r: [f"([{r}, 'before'], 1)"] for r in range(size)
    }


def test_the_failing_line_is_named_across_cells(kernel: Kernel) -> None:
    inner = kernel.check("%%ranks -n 2\n\ndef divide(x):\n    y = x\n    return 1 / y")
    outer = kernel.check("%%ranks\ndef middle(x):\n    return divide(x)")
    cell = kernel.run("%%ranks\n# a comment\nmiddle(0)")
    assert cell.error is not None
    assert cell.error.message.splitlines() == [
        "rank 0 of 2 raised ZeroDivisionError: division by zero",
        f"  In[{cell.number}], line 3:  middle(0)",
        f"  In[{outer.number}], line 3, in middle:  return divide(x)",
        f"  In[{inner.number}], line 5, in divide:  return 1 / y",
        "  rank 1 did the same",
    ]
    kernel.check("world = %ranks")
    cell = kernel.run("def call():\n    middle(0)\nworld.run(call)")
    assert cell.error is not None
    assert f"  In[{cell.number}], line 2, in call:  middle(0)" in cell.error.message.splitlines()
    assert f"  In[{outer.number}], line 3, in middle:  return divide(x)" in cell.error.message
    source = kernel.check("%%ranks -r 0\nimport inspect\nprint(inspect.getsource(divide))").stdout
    assert source == "".join(
        f"[rank 0] {line}\n" for line in ("def divide(x):", "    y = x", "    return 1 / y", "")
    )


SYNTAX = {
    "x = (": (2, "'(' was never closed"),
    "a = 1\nfor i in range(3)\n    pass": (3, "expected ':'"),
    "return 5": (2, "'return' outside function"),
    "a = 1\nbreak": (3, "'break' outside loop"),
    "!ls": (2, "invalid syntax"),
}


def test_a_syntax_error_is_shown_once_before_anything_starts(kernel: Kernel) -> None:
    for source, (number, message) in SYNTAX.items():
        cell = kernel.run(f"%%ranks -n 2\n{source}")
        assert cell.error is not None, source
        text = source.splitlines()[number - 2].strip()
        shown = f"SyntaxError: {message}\n  In[{cell.number}], line {number}:  {text}"
        assert cell.error.shown == shown
        assert cell.outputs == []
    assert ranks_of(kernel) == []
    # Nor does it end what runs, not even when it asks for another size.
    kernel.check("%%ranks -n 2\nkept = 1")
    kernel.run("%%ranks -n 3\nx = (")
    assert lines(kernel.check("%%ranks\nkept").stdout) == {0: ["1"], 1: ["1"]}


def test_a_warning_about_syntax_is_shown_once(kernel: Kernel) -> None:
    cell = kernel.check("%%ranks -n 2\nx = 1\nx is 1")
    assert lines(cell.stdout) == {0: ["True"], 1: ["True"]}
    assert cell.stderr.count("SyntaxWarning") == 1
    assert "[rank" not in cell.stderr


def test_annotations_are_evaluated_as_in_a_normal_cell(kernel: Kernel) -> None:
    cell = kernel.check("%%ranks -n 2\ndef f(x: int): pass\nf.__annotations__")
    assert lines(cell.stdout) == {r: ["{'x': int}"] for r in range(2)}


@pytest.mark.soak
def test_shutdown_leaves_nothing(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 2\nkept = 1")
    assert kernel.check("%ranks --shutdown").outputs == []
    wait_until(lambda: all(map(is_template, kernel.others())), 1, "only the template is left")
    kernel.check("%ranks --shutdown")  # twice does no harm
    # The next cell starts afresh, with the size of the first cell of a notebook.
    cell = kernel.check("%%ranks\n'kept' in globals()")
    assert lines(cell.stdout) == {0: ["False"], 1: ["False"]}


def test_a_world_that_was_shut_down_by_hand_is_replaced(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 3\nkept = 1")
    kernel.check("world = %ranks\nworld.shutdown()")
    cell = kernel.check("%%ranks\n'kept' in globals()")
    assert lines(cell.stdout) == {r: ["False"] for r in range(3)}


def test_loading_again_keeps_the_world(kernel: Kernel) -> None:
    kernel.check("%%ranks -n 2\nkept = 1")
    pids = ranks_of(kernel)
    for load in ("%load_ext ddp_lab", "%reload_ext ddp_lab"):
        kernel.check(load)
        kernel.check("import gc; _ = gc.collect()")
        assert lines(kernel.check("%%ranks\nkept").stdout) == {0: ["1"], 1: ["1"]}
        assert ranks_of(kernel) == pids


@pytest.mark.soak
def test_a_restart_of_the_kernel_leaves_nothing(own_kernel: Kernel) -> None:
    own_kernel.check("%load_ext ddp_lab")
    own_kernel.check("%%ranks -n 2\nimport threading, time\nkept = 1")
    own_kernel.check("%%ranks\nthreading.Thread(target=time.sleep, args=(60,)).start()")
    before = {p.pid for p in own_kernel.others()}
    assert len(before) >= 4  # a template, a supervisor, two ranks
    own_kernel.restart()
    marks = os.environ["DDP_LAB_TESTS"]

    def left() -> set[int]:
        return before & {p.pid for p in marked_processes("DDP_LAB_TESTS", marks)}

    wait_until(lambda: not left(), 2, "the ranks of the old kernel end")
    own_kernel.check("%load_ext ddp_lab")
    cell = own_kernel.check("%%ranks -n 2\n'kept' in globals()")
    assert lines(cell.stdout.partition("imported\n")[2] or cell.stdout) == {
        0: ["False"],
        1: ["False"],
    }
    own_kernel.check("%ranks --shutdown")
