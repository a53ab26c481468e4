"""What ranks print reaches the cell: whole lines, tagged, in order for each rank, none lost."""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_lab.launcher import output
from ddp_lab.launcher.output import KEPT, Output, _Stream
from tests.harness import Cell, Kernel, wait_until

SIZES = pytest.mark.parametrize("size", [2, 3])
CUT = "[earlier output was cut: the last 16 MiB are kept]\n"
CHATTER = (
    "[Gloo] Rank {} is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
)


@pytest.fixture(scope="module", autouse=True)
def setting(kernel: Kernel) -> None:
    kernel.check("import ctypes, logging, matplotlib, tqdm, warnings")
    kernel.check("rank = dist.get_rank")


def by_rank(text: str) -> dict[int, list[str]]:
    """The lines of each rank. Every line must carry a tag and end."""
    assert not text or text.endswith("\n")
    found: dict[int, list[str]] = defaultdict(list)
    for line in text.split("\n")[:-1]:
        tagged = re.fullmatch(r"\[rank (\d+)\] (.*)", line)
        assert tagged, f"no tag: {line[:200]!r}"
        found[int(tagged[1])].append(tagged[2])
    return dict(found)


def painted(text: str) -> list[str]:
    """What a notebook shows of a text with carriage returns, line by line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for state in line.split("\r"):
            shown = state + shown[len(state) :]
        lines.append(shown.rstrip() if "\r" in line else line)
    return lines[:-1] if lines[-1] == "" else lines


def messages(cell: Cell, name: str) -> list[str]:
    return [o["text"] for o in cell.outputs if o["type"] == "stream" and o["name"] == name]


# Capture


@SIZES
def test_whatever_writes_to_the_descriptors_is_captured_in_order(kernel: Kernel, size: int) -> None:
    cell = kernel.check(
        textwrap.dedent(f"""\
        def every_way():
            libc = ctypes.CDLL(None)
            for i in range(20):
                print("python", i)
                libc.printf(b"C %d\\n", i)
                os.write(1, b"descriptor %d\\n" % i)
                subprocess.run(["echo", "subprocess", str(i)])
                print("print", end=" ")
                print("in pieces", i)
                os.system(f"echo system {{i}}")
                libc.puts(b"puts %d" % i)
        launch(every_way, nproc_per_node={size})
        """)
    )
    kinds = "python {}", "C {}", "descriptor {}", "subprocess {}", "print in pieces {}"
    kinds = (*kinds, "system {}", "puts {}")
    expected = [kind.format(i) for i in range(20) for kind in kinds]
    assert by_rank(cell.stdout) == {rank: expected for rank in range(size)}
    assert cell.stderr == ""


@SIZES
def test_stderr_is_captured_apart_from_stdout(kernel: Kernel, size: int) -> None:
    cell = kernel.check(
        textwrap.dedent(f"""\
        def complain():
            print("to stdout")
            sys.stderr.write("write\\n")
            print("print", file=sys.stderr)
            os.write(2, b"descriptor\\n")
            subprocess.run("echo subprocess >&2", shell=True)
            logging.warning("logged")
            warnings.warn("warned")
            raw = ctypes.CDLL(None)
            raw.dprintf(2, b"C\\n")
        results = launch(complain, nproc_per_node={size})
        """)
    )
    assert by_rank(cell.stdout) == {rank: ["to stdout"] for rank in range(size)}
    for lines in by_rank(cell.stderr).values():
        assert lines[:4] == ["write", "print", "descriptor", "subprocess"]
        assert lines[4].endswith("logged")
        assert any("UserWarning: warned" in line for line in lines)
        assert lines[-1] == "C"
    assert set(by_rank(cell.stderr)) == set(range(size))
    kept = kernel.value("[(o.stdout, o.stderr) for o in results.output]")
    assert [out for out, _ in kept] == ["to stdout\n"] * size
    assert all(err.startswith("write\nprint\n") and "to stdout" not in err for _, err in kept)


@pytest.mark.soak
def test_lines_never_tear_or_mix(kernel: Kernel) -> None:
    cell = kernel.check(
        textwrap.dedent("""\
        def shout():
            for i in range(300):
                print("hi", rank())
                print("x" * 2000)
                print("oh", rank(), file=sys.stderr)
            for i in range(3):
                print("y" * 1_000_000)
        results = launch(shout, nproc_per_node=4)
        """)
    )
    out, err = by_rank(cell.stdout), by_rank(cell.stderr)
    for rank in range(4):
        assert out[rank][:600] == [f"hi {rank}", "x" * 2000] * 300
        assert out[rank][600:] == ["y" * 1_000_000] * 3
        assert err[rank] == [f"oh {rank}"] * 300


@pytest.mark.soak
def test_many_lines_arrive_whole_in_order_and_none_is_lost(kernel: Kernel) -> None:
    # The benchmark shows .5 to 1 s; the promise is 5 s there.
    cell = kernel.check(
        textwrap.dedent("""\
        def report():
            for i in range(25_000):
                print(f"{i:06}".ljust(80, "."))
        results = launch(report, nproc_per_node=4)
        """)
    )
    expected = [f"{i:06}".ljust(80, ".") for i in range(25_000)]
    assert by_rank(cell.stdout) == {rank: expected for rank in range(4)}
    assert cell.seconds < 25
    assert len(cell.outputs) < 60 * cell.seconds + 10  # in batches: a browser must keep up
    same = "[o.stdout == ''.join(f'{i:06}'.ljust(80, '.') + chr(10) for i in range(25_000))"
    assert kernel.value(f"{same} for o in results.output]") == [True] * 4


def test_one_rank_prints_100_000_lines(kernel: Kernel) -> None:
    cell = kernel.check(
        "def count():\n"
        "    for i in range(100_000 if rank() == 1 else 1): print(i)\n"
        "results = launch(count, nproc_per_node=2)"
    )
    assert by_rank(cell.stdout) == {0: ["0"], 1: [str(i) for i in range(100_000)]}
    assert kernel.value("[len(o.stdout.splitlines()) for o in results.output]") == [1, 100_000]


@pytest.mark.soak
def test_all_is_delivered_before_the_cell_ends(kernel: Kernel) -> None:
    cell = kernel.check(
        textwrap.dedent("""\
        def hurry():
            if rank() == 0:
                subprocess.run("seq 5000", shell=True)
            os.write(1, b"last words\\n")
            os.write(2, b"last complaint")
        for i in range(5):
            launch(hurry, nproc_per_node=3)
            print("done", i)
        """)
    )
    calls = re.split(r"done \d\n", cell.stdout)
    assert calls.pop() == ""
    assert len(calls) == 5
    for call in calls:
        numbers = [str(i) for i in range(1, 5001)]
        assert by_rank(call) == {0: [*numbers, "last words"], 1: ["last words"], 2: ["last words"]}
    assert by_rank(cell.stderr) == {rank: ["last complaint"] * 5 for rank in range(3)}


@SIZES
def test_what_a_world_prints_between_calls_comes_with_the_next(
    kernel: Kernel, tmp_path: Path, size: int
) -> None:
    source = textwrap.dedent(f"""\
        def begin(folder):
            def work():
                while not os.path.exists(folder + "/go"): time.sleep(.01)
                print("from a thread")
                os.write(1, b"without an end")
                open(f"{{folder}}/done {{rank()}}", "w").close()
            threading.Thread(target=work).start()
        folder = {str(tmp_path)!r}
        world = World(nproc_per_node={size})
        world.run(begin, folder)
        open(folder + "/go", "w").close()
        while len(os.listdir(folder)) < 1 + {size}: time.sleep(.01)
        """)
    assert kernel.check(source).outputs == []
    cell = kernel.check("world.run(lambda: print(', then a call'))\nworld.shutdown()")
    lines = ["from a thread", "without an end, then a call"]
    assert by_rank(cell.stdout) == {rank: lines for rank in range(size)}


# Modes


HELD = """\
def talk(flag):
    print("first", rank())
    print("first", rank(), file=sys.stderr)
    while not os.path.exists(flag): time.sleep(.01)
    print("second", rank())
results = launch(talk, {flag!r}, nproc_per_node={size}{options})
"""


@SIZES
def test_live_output_comes_while_the_ranks_run(kernel: Kernel, tmp_path: Path, size: int) -> None:
    flag = tmp_path / "go"
    running = kernel.begin(HELD.format(flag=str(flag), size=size, options=""))
    for rank in range(size):
        running.wait_for(f"[rank {rank}] first {rank}\n")
    assert "second" not in running.stdout
    flag.touch()
    cell = running.finish()
    expected = {rank: [f"first {rank}", f"second {rank}"] for rank in range(size)}
    assert by_rank(cell.stdout) == expected
    assert by_rank(cell.stderr) == {rank: [f"first {rank}"] for rank in range(size)}


@SIZES
@pytest.mark.parametrize("mode", ["by-rank", "quiet"])
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_other_modes_hold_back(
    kernel: Kernel, tmp_path: Path, size: int, mode: str, way: str
) -> None:
    flag = tmp_path / "go"
    options = f", output={mode!r}" if way == "argument" else ""
    if way == "environment":
        kernel.check(f"os.environ['DDP_LAB_OUTPUT'] = {mode!r}")
    source = "open({!r}, 'w').close()\n".format(str(tmp_path / "begun"))
    running = kernel.begin(source + HELD.format(flag=str(flag), size=size, options=options))
    wait_until((tmp_path / "begun").exists, 10)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: running.stdout, 0.5)  # longer than a launch takes
    assert running.stdout == ""
    flag.touch()
    cell = running.finish()
    kernel.check("os.environ.pop('DDP_LAB_OUTPUT', None)")
    lines = [f"[rank {rank}] {word} {rank}\n" for rank in range(size) for word in HELD_WORDS]
    assert cell.stdout == ("".join(lines) if mode == "by-rank" else "")
    errors = [f"[rank {rank}] first {rank}\n" for rank in range(size)]
    assert cell.stderr == ("".join(errors) if mode == "by-rank" else "")
    kept = kernel.value("[(o.stdout, o.stderr) for o in results.output]")
    assert kept == [(f"first {r}\nsecond {r}\n", f"first {r}\n") for r in range(size)]


HELD_WORDS = ("first", "second")


def test_the_argument_goes_before_the_environment(kernel: Kernel) -> None:
    kernel.check("os.environ['DDP_LAB_OUTPUT'] = 'quiet'")
    cell = kernel.check("launch(lambda: print('heard'), nproc_per_node=2, output='by-rank')")
    kernel.check("del os.environ['DDP_LAB_OUTPUT']")
    assert cell.stdout == "[rank 0] heard\n[rank 1] heard\n"


@pytest.mark.soak
@SIZES
def test_by_rank_output_is_the_same_in_every_run(kernel: Kernel, size: int) -> None:
    source = textwrap.dedent(f"""\
        import random
        def work():
            for i in range(50):
                print("step", i, end=random.choice(["", " "]).strip() or "\\n", flush=True)
                print("\\rbar", i, end="", file=sys.stderr, flush=True)
                if random.random() < .1: time.sleep(.002)
                os.write(2, b"\\nwarning %d\\r" % i)
            display({{"text/plain": "a table"}}, raw=True)
            print("without an end", end="")
        launch(work, nproc_per_node={size}, output="by-rank")
        """)
    first, second = kernel.check(source), kernel.check(source)
    assert first.outputs == second.outputs
    assert first.stdout.count("a table") == size


# Lines of all kinds


ODD = {
    "no end": (b"abc", "abc"),
    "an empty line": (b"a\n\nb\n", "a\n\nb"),
    "only an end": (b"\n", ""),
    "invalid UTF-8": (b"\xff caf\xc3\xa9 \xc3\n", "\\xff café \\xc3"),
    "a character cut by the end": (b"\xe2\x82", "\\xe2\\x82"),
    "NUL and escapes": (b"\0 \x1b[31mred\x1b[0m\n", "\0 \x1b[31mred\x1b[0m"),
    "Windows' ends": (b"a\r\nb\r\n", "a\nb"),
    "an overpainted line": (b"1 %\r2 %\r3 %\n", "3 %"),
    "a bar that has not ended": (b"\r1 %\r2 %", "2 %"),
    "a bar that blanks itself": (b"\r50 %\r     \rdone\n", "done"),
    "a bar that leaves nothing": (b"\r50 %\r     \r", None),
    "a tag of its own": (b"[rank 7] no\n", "[rank 7] no"),
    "characters outside the BMP": ("\U0001f600\n".encode(), "\U0001f600"),
}


@SIZES
@pytest.mark.parametrize("mode", ["live", "by-rank"])
def test_odd_lines(kernel: Kernel, size: int, mode: str) -> None:
    # One launch for all of them: a World, a call for each.
    cell = kernel.check(
        textwrap.dedent(f"""\
        def write(data): os.write(1, data); os.write(2, data)
        with World(nproc_per_node={size}, output={mode!r}) as world:
            for data in {[data for data, _ in ODD.values()]}:
                kept = world.run(write, data).output
                print("=== ", kept[0].stdout == kept[1].stderr, repr(kept[-1].stdout))
                print("=== ", file=sys.stderr)
        """)
    )
    outs, errs = (re.split(r"=== .*\n", text)[:-1] for text in (cell.stdout, cell.stderr))
    for name, out, err in zip(ODD, outs, errs, strict=True):
        shown = ODD[name][1]
        lines = {} if shown is None else {rank: shown.split("\n") for rank in range(size)}
        for text in (out, err):
            assert by_rank("".join(line + "\n" for line in painted(text) if line)) == lines, name
    kept = re.findall(r"=== +(\w+) (.*)\n", cell.stdout)
    for (name, (_, shown)), (same, text) in zip(ODD.items(), kept, strict=True):
        assert same == "True", name
        assert text in (repr(shown or ""), repr(f"{shown}\n")), name


def test_a_learners_own_line_about_gloo_stays(kernel: Kernel) -> None:
    cell = kernel.check(
        textwrap.dedent(f"""\
        chatter = {CHATTER!r}
        def talk():
            print("[Gloo] Rank and file")
            print("begun ", end="", flush=True)
            os.write(1, (chatter.format(rank()) + "\\n").encode())
            print("and ended")
            os.write(1, (chatter.format(rank()) + "\\n").encode())
            dist.new_group([0, 1])  # what torch 2.9 does chatters for real
            print("about [Gloo] Rank 0")
        results = launch(talk, nproc_per_node=2)
        """)
    )
    lines = ["[Gloo] Rank and file", "begun and ended", "about [Gloo] Rank 0"]
    assert by_rank(cell.stdout) == {0: lines, 1: lines}
    assert kernel.value("results.output[1].stdout") == "\n".join(lines) + "\n"


# Progress bars


@pytest.mark.parametrize("ranks", ["rank() == 1", "True"])
def test_progress_bars_update_in_place_and_do_not_flood(kernel: Kernel, ranks: str) -> None:
    cell = kernel.check(
        textwrap.dedent(f"""\
        def train():
            if {ranks}:
                for i in tqdm.tqdm(range(10_000), mininterval=0, miniters=1, ncols=60):
                    pass
        results = launch(train, nproc_per_node=3)
        """)
    )
    expected = [1] if ranks != "True" else [0, 1, 2]
    assert cell.stdout == ""
    shown = painted(cell.stderr)
    # In place: what the notebook shows in the end is the last state of each, and no other line.
    assert sorted(re.sub(r"(\[rank \d\] +100%).* 10000/10000 .*", r"\1", s) for s in shown) == [
        f"[rank {rank}] 100%" for rank in expected
    ]
    # 10,000 updates of 60 characters a rank, of which 10 a second are shown.
    assert len(cell.outputs) <= 12 * cell.seconds + 10
    assert len(cell.stderr) <= len(cell.outputs) * 500
    kept = kernel.value("[o.stderr for o in results.output]")
    assert [len(text.splitlines()) for text in kept] == [rank in expected for rank in range(3)]


def test_a_running_bar_is_shown_and_lines_pass_by_it(kernel: Kernel, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    running = kernel.begin(
        textwrap.dedent(f"""\
        def train():
            print("\\r 10 %", end="", flush=True)
            print("\\r 20 %", end="", flush=True)
            if rank() == 1:
                time.sleep(.3); os.write(1, b"\\nrank 1 has a line\\n")
            while not os.path.exists({str(flag)!r}): time.sleep(.01)
            if rank() == 0: print("\\r 30 %")
        launch(train, nproc_per_node=2)
        """)
    )
    running.wait_for("rank 1 has a line")
    wait_until(lambda: painted(running.stdout)[-1] == "[rank 0] 20 %", 5, "the bar of rank 0")
    flag.touch()
    cell = running.finish()
    lines = ["[rank 1]  20 %", "[rank 1] rank 1 has a line", "[rank 0]  30 %"]
    assert painted(cell.stdout) == lines
    assert any("[rank 0] 20 % | [rank 1] 20 %" in text for text in messages(cell, "stdout"))


def test_a_bar_is_written_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    screen = io.StringIO()
    writes = []
    monkeypatch.setattr(output._Screen, "_write", lambda _, *args: writes.append(args))
    received = Output(2, "live")
    for i in range(10_000):  # in 10 s
        received.feed(0, "stderr", b"\r%d" % i)
        received.feed(1, "stderr", b"\r%d" % i)
        if received.flush_due() == 0.0:
            received.flush()
        now += 0.001
    assert 90 <= len(writes) <= 110
    received.finish()
    screen.write("".join(text for _, text in writes))
    assert painted(screen.getvalue()) == ["[rank 0] 9999", "[rank 1] 9999"]


def test_nested_bars_do_not_make_a_line_of_each_update() -> None:
    lines = fed_whole(b"\router 0\n\rinner 1\x1b[A\n\rinner 2\x1b[A\n\rinner 3\x1b[A\router 1\n\n")
    assert lines == b"outer 0\nouter 1\n\n"


# Limits


def test_the_last_16_mib_are_kept_and_the_cut_is_marked(kernel: Kernel) -> None:
    cell = kernel.check(
        textwrap.dedent("""\
        def flood():
            if rank() == 1:
                for i in range(40_000): print(f"{i:07}".ljust(999, "."))
            else: print("little")
        results = launch(flood, nproc_per_node=2, output="by-rank")
        text = results.output[1].stdout
        """)
    )
    shown = by_rank(cell.stdout)
    assert shown[0] == ["little"]
    first, *lines = shown[1]
    assert first + "\n" == CUT
    assert len(lines) == KEPT // 1000
    assert lines == [f"{i:07}".ljust(999, ".") for i in range(40_000 - len(lines), 40_000)]
    assert kernel.value("[o.stdout for o in results.output][0]") == "little\n"
    assert kernel.value("(len(text), text[:51])") == (len(CUT) + 1000 * len(lines), CUT)
    assert kernel.value("(text.splitlines()[1][:7], text[-1000:][:7])") == (lines[0][:7], "0039999")


@pytest.mark.parametrize(
    "piece", [b"\n" * 65536, b"x" * 65536, b"\r" + b"y" * 65535, b"z" * 999_999 + b"\n"]
)
@pytest.mark.parametrize("mode", ["quiet", "by-rank"])
def test_memory_stays_bounded(piece: bytes, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output._Screen, "_write", lambda *_: None)
    received = Output(1, mode)
    tracemalloc.start()
    try:
        for _ in range(120_000_000 // len(piece)):
            received.feed(0, "stdout", bytes(bytearray(piece)))  # a new object each time
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4.5 * KEPT
    (kept,) = received.finish()
    assert len(kept.stdout) <= KEPT + 100
    assert kept.stdout.rstrip("\n").endswith(piece[-1:].decode().strip())
    assert ("cut" in kept.stdout[:100]) == (b"\r" not in piece)


def test_short_lines_do_not_take_much_more_memory_than_their_text() -> None:
    tail = output.Tail()
    tracemalloc.start()
    try:
        for _ in range(200_000):
            tail.append(b"\n")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert tail.text == "\n" * 200_000


def test_rich_output_counts_for_the_limit() -> None:
    received = Output(1, "by-rank")
    for i in range(50):
        received.rich(0, {"image/png": "x" * 1_000_000, "text/plain": str(i)}, {})
    kept = [part for part in received._streams[0]["stdout"].tail.parts()]
    assert kept[0] == CUT.encode()
    texts = [part.data["text/plain"] for part in kept[1:] if isinstance(part, output.Rich)]
    assert texts == [str(i) for i in range(50 - len(texts), 50)]
    assert 14 <= len(texts) <= 17


def test_ranks_wait_for_a_slow_notebook_and_nothing_is_lost(kernel: Kernel) -> None:
    first = kernel.check(
        textwrap.dedent("""\
        import contextlib, psutil
        def begin():
            def work():
                for i in range(20_000): print(f"{i:07}".ljust(999, "."))
            global thread
            thread = threading.Thread(target=work)
            thread.start()
        def end(): thread.join()
        class Slow:
            texts = []
            def write(self, text): time.sleep(.01); self.texts.append(text)
            def flush(self): pass
        world = World(nproc_per_node=2)
        world.run(begin)
        time.sleep(1)  # 40 MB want to come, and nobody reads
        """)
    )
    # No process in between holds them all.
    memory = "[p.memory_full_info().uss for p in psutil.Process().children()[0].children(True)]"
    assert max(kernel.value(memory)) < 80 << 20
    kernel.check("with contextlib.redirect_stdout(Slow()): world.run(end); world.shutdown()")
    kernel.check("open(os.environ['TMPDIR'] + '/slow', 'w').write(''.join(Slow.texts))")
    path = Path(os.environ["TMPDIR"], "slow")
    lines = by_rank(first.stdout + path.read_text())
    path.unlink()
    expected = [f"{i:07}".ljust(999, ".") for i in range(20_000)]
    assert lines == {0: expected, 1: expected}


# Rich display


RICH = """\
%matplotlib inline
import matplotlib.pyplot as plt
from IPython.display import HTML, display, Markdown
class Table:
    def __init__(self): self.rank = rank()
    def __repr__(self): return f"table {self.rank}"
    def _repr_html_(self): return f"<table>{self.rank}</table>"
def show():
    print("before")
    display(HTML(f"<b>{rank()}</b>"))
    print("between", end="")
    display(Table(), Markdown("*text*"))
    print("and on")
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([0, rank()])
    display(figure)
    plt.close(figure)
    print("then")
    plt.plot([1, 2])
    plt.show()
    display("plain")
    print("after")
"""


@pytest.mark.soak
@SIZES
@pytest.mark.parametrize("mode", ["live", "by-rank"])
def test_rich_display_reaches_the_cell_tagged_and_in_order(
    kernel: Kernel, size: int, mode: str
) -> None:
    cell = kernel.check(RICH + f"results = launch(show, nproc_per_node={size}, output={mode!r})")
    told: dict[int, list[Any]] = defaultdict(list)
    tag = 0
    for item in cell.outputs:
        if item["type"] == "stream":
            assert item["name"] == "stdout", item["text"]
            for rank, lines in by_rank_in_order(item["text"]):
                told[rank].append(lines)
                tag = rank
        else:
            assert item["type"] == "display_data"
            assert told[tag].pop() == ""  # a line with nothing but the tag stands above it
            told[tag].append(item["data"])
    for rank in range(size):
        first, html, between, table, markdown, and_on, figure, then, shown, *rest = told[rank]
        assert (first, between, and_on, then) == ("before", "between", "and on", "then")
        assert html["text/html"] == f"<b>{rank}</b>"
        assert table == {"text/plain": f"table {rank}", "text/html": f"<table>{rank}</table>"}
        assert markdown["text/markdown"] == "*text*"
        assert figure["image/png"].startswith("iVBOR")
        assert shown["image/png"].startswith("iVBOR")
        assert rest == ["'plain'", "after"]
    plain = kernel.value("[o.stdout for o in results.output]")
    assert plain == ["before\nbetweenand on\nthen\nafter\n"] * size


def by_rank_in_order(text: str) -> list[tuple[int, str]]:
    assert text.endswith("\n")
    found = [re.fullmatch(r"\[rank (\d+)\] ?(.*)", line) for line in text.split("\n")[:-1]]
    assert all(found), text
    return [(int(match[1]), match[2]) for match in found if match]


def test_display_without_a_notebook_prints_text() -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        received = Output(1, "live")
        received.feed(0, "stdout", b"begun")
        received.rich(0, {"text/plain": "two\nlines", "text/html": "<b>"}, {})
        received.finish()
    assert shown.getvalue() == "[rank 0] begun\n[rank 0] two\n[rank 0] lines\n"


def test_updates_and_clearing_do_no_harm(kernel: Kernel) -> None:
    cell = kernel.check(
        textwrap.dedent("""\
        from IPython.display import clear_output, display
        def show():
            print("before")
            handle = display("one", display_id=True)
            handle.update("two")
            clear_output(wait=True)
            print("after")
        launch(show, nproc_per_node=2, output="by-rank")
        """)
    )
    lines = ["before", "'one'", "'two'", "after"]
    assert by_rank(cell.stdout) == {0: lines, 1: lines}
    assert cell.stderr == ""


# The ends


@SIZES
def test_exit_handlers_are_heard(kernel: Kernel, size: int) -> None:
    cell = kernel.check(
        textwrap.dedent(f"""\
        def work():
            import atexit
            atexit.register(print, "handler of", rank())
            print("work of", rank())
        results = launch(work, nproc_per_node={size})
        """)
    )
    lines = {rank: [f"work of {rank}", f"handler of {rank}"] for rank in range(size)}
    assert by_rank(cell.stdout) == lines
    kept = kernel.value("[o.stdout.splitlines() for o in results.output]")
    assert kept == list(lines.values())


@SIZES
def test_handlers_of_a_world_are_heard_in_the_cell_that_ends_it(kernel: Kernel, size: int) -> None:
    first = kernel.check(
        f"import atexit\nworld = World(nproc_per_node={size}, output='by-rank')\n"
        "world.run(lambda: atexit.register(print, 'handler') and None)"
    )
    assert first.stdout == ""
    cell = kernel.check("world.shutdown()\nworld.shutdown()")
    assert by_rank(cell.stdout) == {rank: ["handler"] for rank in range(size)}


@pytest.mark.parametrize("call", ["input('name? ')", "input()"])
def test_input_is_a_clear_error(kernel: Kernel, call: str) -> None:
    cell = kernel.run(f"def ask():\n    return {call}\nlaunch(ask, nproc_per_node=2)")
    assert cell.error is not None
    assert cell.error.message.splitlines()[0].startswith(
        "rank 0 of 2 raised RuntimeError: a rank cannot ask for input()"
    )
    assert f"In[{cell.number}], line 2, in ask:  return {call}" in cell.error.message


def test_output_of_a_failing_call_is_shown_and_kept(kernel: Kernel) -> None:
    cell = kernel.run(
        textwrap.dedent("""\
        def fail():
            print("said", rank())
            os.write(2, b"half a line")
            if rank() == 1: os._exit(3)
            time.sleep(60)
        launch(fail, nproc_per_node=3)
        """)
    )
    assert cell.error is not None
    assert by_rank(cell.stdout) == {rank: [f"said {rank}"] for rank in range(3)}
    assert by_rank(cell.stderr) == {rank: ["half a line"] for rank in range(3)}
    kept = kernel.value("[(o.stdout, o.stderr) for o in sys.last_value.output]")
    assert kept == [(f"said {rank}\n", "half a line") for rank in range(3)]


def test_the_notebook_can_capture_what_ranks_print(kernel: Kernel) -> None:
    captured = kernel.check("%%capture text\nlaunch(lambda: print('hush'), output='by-rank')")
    assert captured.outputs == []
    assert kernel.value("text.stdout") == "[rank 0] hush\n[rank 1] hush\n"


def test_a_world_goes_on_after_the_cell_could_not_be_written_to(kernel: Kernel) -> None:
    cell = kernel.run(
        textwrap.dedent("""\
        import contextlib, io
        class Broken(io.StringIO):
            def write(self, text): raise OSError("nobody reads")
        world = World(nproc_per_node=2)
        def talk():
            print("x")
            dist.barrier()
        with contextlib.redirect_stdout(Broken()):
            world.run(talk)
        """)
    )
    assert cell.error is not None
    assert cell.error.name == "OSError"
    cell = kernel.check("world.run(talk)\nworld.shutdown()")
    assert by_rank(cell.stdout) == {0: ["x"], 1: ["x"]}


# The assembler of lines


def fed_whole(data: bytes) -> bytes:
    stream = _Stream()
    return stream.feed(data) + stream.end()


plain = [b"a", b"bc", b" ", b"\n", b"\r", b"\r\n", b"\x1b[A", "é".encode(), b"\xff"]
gloo = [CHATTER.format(0).encode(), CHATTER.format(1).encode() + b"\n", b"[Gloo] Rank "]
texts = st.lists(st.sampled_from(plain + gloo), max_size=30).map(b"".join)


@given(texts, st.lists(st.integers(0, 200), max_size=8))
@example(CHATTER.format(0).encode() + b"\ra\r\n", [93])
@example(b"aabc\r\x1b[A\r\n", [9])
def test_pieces_make_no_difference(text: bytes, cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    stream, got = _Stream(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        lines = stream.feed(text[start:end])
        assert lines == b"" or lines.endswith(b"\n")
        got.append(lines)
    got.append(stream.end())
    whole = _Stream()
    assert b"".join(got) == whole.feed(text) + whole.end()
    assert stream.tail.text == whole.tail.text == b"".join(got).decode("utf-8", "backslashreplace")
    assert stream.end() == b""


@given(st.lists(st.binary(max_size=20)))
def test_without_carriage_returns_nothing_changes(chunks: list[bytes]) -> None:
    data = b"".join(chunks).replace(b"\r", b"").replace(b"\x1b", b"")
    assert fed_whole(data) == data


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(1, 500))
def test_the_tail_keeps_whole_lines(lengths: list[int], kept: int) -> None:
    lines = [(b"%d" % i).ljust(length, b".") + b"\n" for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "KEPT", kept)
        patch.setattr(output, "_BLOCK", 64)
        tail = output.Tail()
        for line in lines:
            tail.append(line)
        text = tail.text
    whole = b"".join(lines).decode()
    if len(whole) <= kept:
        assert text == whole
        return
    rest = text.removeprefix(CUT)
    assert rest != text
    assert whole.endswith(rest)
    # As many whole lines as fit, or what fits of the last line if none does.
    fitting = [i for i in range(len(lines)) if len(b"".join(lines[i:])) <= kept]
    if fitting:
        assert rest == b"".join(lines[fitting[0] :]).decode()
    else:
        assert rest == whole[-kept:]
