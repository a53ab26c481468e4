"""What learners see in JupyterLab: the lesson, long output, the stop button, progress bars."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat import NotebookNode
from playwright.sync_api import expect

from tests.browser.driver import ROOT, NotebookPage

pytestmark = pytest.mark.browser

Open = Callable[..., NotebookPage]
LESSON = ROOT / "lessons" / "00_launcher.ipynb"
IMPORTS = """\
import os, time, torch
import torch.distributed as dist
from ddp_lab import launch"""


def own_lines(text: str) -> list[str]:
    """The lines of an output, without the one that a first launch shows while it waits."""
    return [line for line in text.splitlines() if not line.startswith("ddp-lab is warming up")]


def shown(cell: NotebookNode) -> dict[str, list[str]]:
    """What a cell shows, by kind; streams as sorted lines, since live lines mix ranks."""
    found: dict[str, list[str]] = {}
    for output in cell.outputs:
        if output.output_type == "stream":
            found.setdefault(output.name, []).extend(own_lines(output.text))
        elif output.output_type == "error":
            found.setdefault("error", []).extend([output.ename, output.evalue])
        else:
            found.setdefault("data", []).append(output.data["text/plain"])
    return {
        kind: sorted(texts) if kind.startswith("std") else texts
        for kind, texts in found.items()
        if texts
    }


def test_lesson_00_runs_in_jupyterlab_as_it_is_stored(open_notebook: Open) -> None:
    notebook = open_notebook(LESSON)
    notebook.run_all()
    notebook.wait_until_run()
    stored = nbformat.read(LESSON, as_version=4).cells
    now = notebook.saved().cells
    assert [cell.id for cell in now] == [cell.id for cell in stored]
    for then, cell in zip(stored, now, strict=True):
        if cell.cell_type == "code" and "nbval-ignore-output" not in cell.metadata.get("tags", []):
            assert shown(cell) == shown(then), cell.source

    number = next(i for i, cell in enumerate(now) if cell.id == "hello")
    notebook.show(number)
    lines = notebook.output(number).inner_text().strip().splitlines()
    tagged = [f"[rank {r}] hello, I am rank {r} of 4" for r in range(4)]
    assert sorted(line for line in lines if line.startswith("[")) == tagged

    number = next(i for i, cell in enumerate(now) if cell.id == "failing-rank")
    notebook.show(number)
    (error,) = now[number].outputs
    message = f"{error.ename}: {error.evalue}"  # and neither a traceback nor a frame of ours
    assert "\n".join(error.traceback) == message
    assert notebook.output(number).inner_text().strip() == message
    assert notebook.complaints == []
    assert [url for url in notebook.requests if not local(url, notebook)] == []


def local(url: str, notebook: NotebookPage) -> bool:
    return url.startswith((notebook.lab.url, "data:", "blob:"))


def test_100_000_lines_arrive_complete(open_notebook: Open) -> None:
    source = """\
def count():
    for line in range(25_000):
        print(f"line {line:5} ".ljust(80, "."))
launch(count, nproc_per_node=4)"""
    notebook = open_notebook(IMPORTS, source)
    notebook.run_all()
    notebook.wait_until_run()
    text = "".join(output.text for output in notebook.saved().cells[1].outputs)
    lines: dict[str, list[int]] = {}
    for line in own_lines(text):
        whole = re.fullmatch(r"\[rank (\d)\] line +(\d+) \.{69}", line)
        assert whole, line
        lines.setdefault(whole[1], []).append(int(whole[2]))
    assert lines == {str(rank): list(range(25_000)) for rank in range(4)}
    assert notebook.complaints == []


def test_stop_button_ends_the_ranks_and_restart_leaves_nothing(open_notebook: Open) -> None:
    wait = """\
def wait():
    print("begins")
    if dist.get_rank() == 1:
        dist.barrier()
    while True:
        time.sleep(60)
launch(wait, nproc_per_node=3)"""
    total = """\
def total():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()
sum(launch(total, nproc_per_node=3))"""
    notebook = open_notebook(IMPORTS, wait, total)
    notebook.run(0)
    notebook.wait_until_run(0)

    notebook.run(1)
    for rank in range(3):
        expect(notebook.output(1)).to_contain_text(f"[rank {rank}] begins")
    notebook.expect_kernel("Busy")
    notebook.stop()
    expect(notebook.output(1)).to_contain_text("KeyboardInterrupt")
    notebook.expect_kernel("Idle")
    notebook.run(2)
    expect(notebook.output(2)).to_have_text(re.compile(r"9\.0$"))

    notebook.run(1)  # and once more, to be restarted
    for rank in range(3):
        expect(notebook.output(1)).to_contain_text(f"[rank {rank}] begins")
    before = psutil.Process(notebook.lab.process.pid).children(recursive=True)
    assert sum(process.name().startswith("ddp-lab rank") for process in before) == 3
    notebook.restart()
    _, alive = psutil.wait_procs(before, timeout=10)
    assert alive == []
    notebook.run(0)
    notebook.run(2)
    expect(notebook.output(2)).to_have_text(re.compile(r"9\.0$"))


def test_a_progress_bar_updates_in_place(open_notebook: Open, tmp_path: Path) -> None:
    source = f"""\
def work(folder):
    for step in range(1, 4):
        print(f"step {{step}} of 3", end="\\r", flush=True)
        while not os.path.exists(f"{{folder}}/{{step}}"):
            time.sleep(0.01)
    print("done       ")
launch(work, {str(tmp_path)!r}, nproc_per_node=2)"""
    notebook = open_notebook(IMPORTS, source)
    notebook.run_all()
    for step in range(1, 4):
        expect(notebook.output(1)).to_contain_text(
            f"[rank 0] step {step} of 3 | [rank 1] step {step} of 3"
        )
        assert notebook.output(1).inner_text().count("[rank 0]") == 1
        (tmp_path / str(step)).touch()
    notebook.wait_until_run()
    expect(notebook.output(1)).not_to_contain_text("step")
    lines = [line.strip() for line in own_lines(notebook.output(1).inner_text())]
    assert sorted(filter(None, lines)) == ["[rank 0] done", "[rank 1] done"]
