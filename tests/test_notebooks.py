"""Stored lessons are whole and tidy; `execute` stores what `validate` can repeat."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_lab import notebooks

ROOT = Path(__file__).parents[1]
LESSONS = notebooks.lessons(ROOT)
# Modules of ddp_lab that no lesson builds up: the rooms around the topics.
NOT_TOPICS = {
    *("cli", "datasets", "doctor", "notebooks"),
    *("instruments", "figures", "widgets", "grading"),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(*sources) makes a notebook of code cells, not yet executed."""

    def write(*cells: str | NotebookNode, name: str = "toy.ipynb") -> Path:
        made = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
        path = tmp_path / name
        nbformat.write(new_notebook(cells=made), path)
        return path

    return write


def run_validate(path: Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of `ddp-lab validate path` in an environment with `variables`."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_lab", "validate", str(path)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def rewrite(path: Path, change: Callable[[NotebookNode], None]) -> None:
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


# Validate


def test_validate_passes_what_execute_stored_twice_in_a_row(write) -> None:
    planned = new_code_cell("raise ValueError('planned')", metadata={"tags": ["raises-exception"]})
    path = write("x = 20\nprint('x is', x)", "x + 1", planned, "print(x)")
    notebooks.execute(path)
    for _ in range(2):
        code, text = run_validate(path)
        assert code == 0, text
        assert "4 passed" in text


def test_validate_catches_every_kind_of_change(write) -> None:
    planned = new_code_cell("raise ValueError('one')", metadata={"tags": ["raises-exception"]})
    path = write("import sys", *["print('one')"] * 4, "6 * 7", planned, "print('the same')")
    notebooks.execute(path)

    def change(notebook: NotebookNode) -> None:
        cells = notebook.cells
        cells[1].outputs[0].text = "two\n"
        cells[2].outputs = []
        cells[3].source += "; _ = sys.stderr.write('a warning')"
        cells[4].source += "; raise ValueError('unplanned')"
        cells[5].outputs[0].data["text/plain"] = "43"
        cells[6].outputs[0].evalue = "two"

    rewrite(path, change)
    code, text = run_validate(path)
    assert code == 1
    assert "6 failed, 2 passed" in text, text
    assert re.findall(r"FAILED .*toy\.ipynb::Cell (\d)", text) == list("123456"), text


def test_validate_stops_a_cell_that_never_ends(write) -> None:
    path = write("pass")
    notebooks.execute(path)
    rewrite(path, lambda notebook: notebook.cells[0].update(source="while True: pass"))
    assert notebooks.validate([path], timeout=2) == 1


def test_kernels_see_the_projects_environment_and_not_the_shells(write, tmp_path: Path) -> None:
    startup = tmp_path / "home" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "hello.py").write_text("intruder = 1")
    names = ["COLUMNS", "FORCE_COLOR", "MPLBACKEND", "PYTHONUNBUFFERED", "PYTHONWARNINGS"]
    path = write(
        f"import os\n[os.environ.get(name) for name in {names}]",
        "os.environ['DDP_LAB_OUTPUT'], 'intruder' in globals()",
    )
    notebooks.execute(path)
    last = nbformat.read(path, as_version=4).cells[-1].outputs[0]
    assert last.data["text/plain"] == "('by-rank', False)"
    shell = dict.fromkeys(names, "1") | {"MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"}
    shell |= {"IPYTHONDIR": str(tmp_path / "home"), "DDP_LAB_OUTPUT": "live"}
    code, text = run_validate(path, **shell)
    assert code == 0, text


def test_validate_ignores_the_pytest_settings_of_the_notebooks_folder(write) -> None:
    path = write("print(1)")
    (path.parent / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    notebooks.execute(path)
    code, text = run_validate(path)
    assert code == 0, text
    assert sorted(p.name for p in path.parent.iterdir()) == ["pytest.ini", "toy.ipynb"]


def test_select_names_what_is_wrong(write, tmp_path: Path, monkeypatch) -> None:
    path = write("1")
    with pytest.raises(FileNotFoundError, match=r"no notebook .*missing\.ipynb"):
        notebooks.select([path, tmp_path / "missing.ipynb"])
    with pytest.raises(ValueError, match="is not a notebook"):
        notebooks.select([tmp_path])
    assert notebooks.select([path]) == [path]
    monkeypatch.setattr(notebooks, "repository", lambda: None)
    with pytest.raises(FileNotFoundError, match="no lessons here"):
        notebooks.select([])


def test_lessons_are_found_from_a_folder_inside_the_repository(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "lessons" / "deep").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for name in ("10_z.ipynb", "02_b.ipynb", "notes.ipynb"):
        (tmp_path / "lessons" / name).touch()
    monkeypatch.chdir(tmp_path / "lessons" / "deep")
    assert [path.name for path in notebooks.lessons()] == ["02_b.ipynb", "10_z.ipynb"]
    monkeypatch.chdir("/")
    assert notebooks.repository() == ROOT  # an editable install knows where it lies


# Execute


def test_execute_is_repeatable_and_leaves_no_traces_of_the_run(write) -> None:
    slider = "import ipywidgets, sys\nipywidgets.IntSlider()"
    streams = "print('a', flush=True)\nprint('e', file=sys.stderr, flush=True)\nprint('b')"
    path = write(new_markdown_cell("# Title"), slider, streams)
    ids = [cell.id for cell in nbformat.read(path, as_version=4).cells]

    def soil(notebook: NotebookNode) -> None:
        times = {"iopub.execute_input": "2024-01-01T00:00:00Z"}
        notebook.cells[1].metadata.update(execution=times, ExecuteTime={}, tags=["kept"])
        notebook.metadata.update(widgets={"state": {}}, kernelspec={"name": "mine"}, title="kept")

    rewrite(path, soil)
    notebooks.execute(path)
    first = path.read_text()
    notebook = nbformat.reads(first, as_version=4)
    assert [cell.id for cell in notebook.cells] == ids
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2]
    assert [cell.metadata for cell in notebook.cells] == [{}, {"tags": ["kept"]}, {}]
    assert [output.text for output in notebook.cells[2].outputs] == ["a\nb\n", "e\n"]
    assert set(notebook.metadata) == {"kernelspec", "language_info", "title"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    notebooks.execute(path)
    model = r'"model_id": "\w+"'
    assert re.sub(model, "", path.read_text()) == re.sub(model, "", first)
    assert [p.name for p in path.parent.iterdir()] == ["toy.ipynb"]


def test_execute_leaves_the_file_alone_when_an_untagged_cell_fails(write) -> None:
    path = write("print(1)", "raise ValueError('unplanned')")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="unplanned"):
        notebooks.execute(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["toy.ipynb"]


def test_execute_gives_cells_of_an_older_format_an_id(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    old = {"cells": [cell | {"source": "1"}], "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps(old))
    notebooks.execute(path)
    new = json.loads(path.read_text())
    assert new["nbformat_minor"] >= 5
    assert new["cells"][0]["id"]


def test_execute_runs_where_the_notebook_lies(write) -> None:
    path = write("open('data.txt').read()")
    (path.parent / "data.txt").write_text("found")
    notebooks.execute(path)
    (output,) = nbformat.read(path, as_version=4).cells[0].outputs
    assert output.data["text/plain"] == "'found'"


# The stored lessons


def test_there_are_lessons_and_each_number_has_one() -> None:
    numbers = [path.name[:2] for path in LESSONS]
    assert "00" in numbers
    assert len(set(numbers)) == len(numbers)
    others = {path.name for path in (ROOT / "lessons").glob("*.ipynb")}
    assert others == {path.name for path in LESSONS}, "a lesson is named NN_topic.ipynb"


def test_the_readmes_table_links_the_lessons_that_exist_and_no_others() -> None:
    rows = re.findall(r"^\| (\d\d) \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"{n:02}" for n in range(14)]
    linked = {number: re.search(r"\((lessons/.*?)\)", title) for number, title in rows}
    assert {n: match[1] for n, match in linked.items() if match} == {
        path.name[:2]: f"lessons/{path.name}" for path in LESSONS
    }


@pytest.mark.parametrize("page", ["README.md", "exercises/README.md", "solutions/README.md"])
def test_links_of_the_readmes_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert links
    assert not [link for link in links if "://" not in link and not (folder / link).exists()]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_a_module_and_tests_of_its_name(path: Path) -> None:
    topic = path.stem[3:]
    assert (ROOT / "ddp_lab" / f"{topic}.py").exists() or (ROOT / "ddp_lab" / topic).is_dir()
    assert (ROOT / "tests" / f"test_{topic}.py").exists() or (ROOT / "tests" / topic).is_dir()


def test_each_module_belongs_to_a_lesson_or_is_a_known_room() -> None:
    package = ROOT / "ddp_lab"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    public = {name for name in modules if not name.startswith("_")}
    assert public - NOT_TOPICS <= {path.stem[3:] for path in LESSONS}


def output_texts(cell: NotebookNode) -> list[str]:
    """Every text that a cell's outputs hold, pictures left out."""
    texts: list[str] = []
    for output in cell.get("outputs", []):
        texts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        texts += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
    return texts


def private(text: str) -> list[str]:
    """What in a text belongs to the machine or the run that made it."""
    paths = {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())} - {"/"}
    patterns = [
        *(rf"{re.escape(path)}(?=[/\s\"':,)]|$)" for path in sorted(paths)),
        *(r"/home/\w+", r"/Users/\w+", r"\w:\\Users\\", r"/tmp/\w+", r"site-packages"),
        *(r"~/\S+", r"0x[0-9a-f]{6,}", r"ipykernel_\d+", r"\bpid[ =:]*\d+", r"127\.0\.0\.1:\d+"),
    ]
    if socket.gethostname() not in ("localhost", ""):
        patterns.append(rf"\b{re.escape(socket.gethostname())}\b")
    return [match.group() for pattern in patterns for match in re.finditer(pattern, text)]


@pytest.mark.parametrize(
    "text",
    [
        f"{ROOT}/x.py",
        "/home/ada/lab",
        "in ~/lab/x.py",
        "<Tensor at 0x7f3a12c4>",
        "pid 4711",
        "ipykernel_99/1.py",
        "127.0.0.1:45123",
        f"{sys.prefix}/lib",
    ],
)
def test_private_finds(text: str) -> None:
    assert private(text)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_stored_lesson_is_whole_and_tidy(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.get("id") for cell in raw["cells"]]
    assert all(ids), "every cell has an id"
    assert len(set(ids)) == len(ids)

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run from top to bottom in a fresh kernel"
    for cell in code:
        planned = "raises-exception" in cell.metadata.get("tags", [])
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert planned == failed, f"cell {cell.execution_count}:\n{cell.source}"
        leaks = [leak for text in output_texts(cell) for leak in private(text)]
        assert not leaks, f"cell {cell.execution_count} shows {leaks}"
        assert not any(
            output.output_type == "stream" and output.name == "stderr" and not planned
            for output in cell.outputs
        ), f"cell {cell.execution_count} prints to stderr"

    tidied = nbformat.from_dict(raw)
    notebooks.normalise(tidied)
    assert json.loads(json.dumps(tidied)) == raw, "stored by `make notebooks`"
