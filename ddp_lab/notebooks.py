"""Find, open, execute and check the course's notebooks.

Lessons are stored with their outputs. `execute` makes those outputs and `validate` compares them
with a fresh run; both work in the same `environment`, so what one stores the other can repeat.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from nbformat import NotebookNode

# Jupyter Server drops what a cell prints beyond 1,000 messages or 1 MB a second. Ranks print more:
# these limits let 100,000 lines through and still stop a loop that would choke the browser.
OUTPUT_LIMITS = {"iopub_msg_rate_limit": 100_000, "iopub_data_rate_limit": 100_000_000}

CELL_TIMEOUT = 300  # seconds; a lesson takes less than 60 in all

# What a reader's shell may hold and would change a notebook's output: buffering, warnings, the
# backend of figures, the width and colour of text.
UNSET = (
    "COLUMNS",
    "FORCE_COLOR",
    "LINES",
    "MPLBACKEND",
    "NO_COLOR",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
)


def repository(start: Path | None = None) -> Path | None:
    """The folder that holds `lessons/`: at or above `start` (the working directory by default),
    else where an editable install of this package lies; None where there is neither."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[1]):
        if (folder / "lessons").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return None


def lessons(root: Path | None = None) -> list[Path]:
    """The lessons' notebooks in the order of their numbers."""
    root = root or repository()
    return sorted((root / "lessons").glob("[0-9][0-9]_*.ipynb")) if root else []


def select(paths: Sequence[Path]) -> list[Path]:
    """The notebooks named, every lesson where none is named.

    Raises FileNotFoundError for a path that does not exist and where there are no lessons,
    ValueError for one that is no notebook.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"There is no notebook {path}")
        if path.suffix != ".ipynb" or not path.is_file():
            raise ValueError(f"{path} is not a notebook (.ipynb)")
    chosen = [path.resolve() for path in paths] or lessons()
    if not chosen:
        raise FileNotFoundError(
            "There are no lessons here. Run this in the course's folder, or name a notebook."
        )
    return chosen


def lab_command(arguments: Sequence[str] = ()) -> list[str]:
    """The command that opens JupyterLab in the course's folder.

    arguments: what to open (a notebook or a folder; the first lesson where the first argument is
    an option or there is none), then options for JupyterLab, which override ours.
    Raises FileNotFoundError when there is nothing at the path.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    target = Path(arguments[0]) if named else next(iter(lessons()), Path.cwd())
    if not target.exists():
        raise FileNotFoundError(f"There is no {target} to open")
    target = target.resolve()
    root = repository()
    if root is None or not target.is_relative_to(root):
        root = target if target.is_dir() else target.parent
    return [
        *(sys.executable, "-m", "jupyterlab"),
        *(f"--ZMQChannelsWebsocketConnection.{k}={v}" for k, v in OUTPUT_LIMITS.items()),
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{quote(target.relative_to(root).as_posix())}",
        # JupyterLab refuses to run as root unless told; in a container there is often no one else.
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *arguments[named:],
    ]


def open_lab(arguments: Sequence[str] = ()) -> int:
    """Become JupyterLab (see `lab_command`); on Windows, run it and return its exit code."""
    command = lab_command(arguments)
    if sys.platform == "win32":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is JupyterLab's to answer
        return subprocess.run(command, check=False).returncode
    os.execv(command[0], command)


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """The environment variables under which outputs are stored and compared.

    Ranks print by rank, since the order of live lines changes from run to run, and IPython runs
    with an empty profile of its own, since the user's may print or configure something.
    """
    # Built once on a machine; the cell that imports it first would say so on stderr.
    importlib.import_module("matplotlib.font_manager")
    with tempfile.TemporaryDirectory(prefix="ddp-lab-") as profile:
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        yield {**kept, "DDP_LAB_OUTPUT": "by-rank", "IPYTHONDIR": profile}


def validate(paths: Sequence[Path] = (), timeout: int = CELL_TIMEOUT) -> int:
    """Run notebooks with nbval and compare every stored output; pytest's exit code.

    timeout: seconds for one cell. Raises as `select` does.
    """
    chosen = select(paths)
    command = [
        *(sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env"),
        f"--nbval-cell-timeout={timeout}",
        # Our settings alone: the folder's own pytest configuration may be another project's.
        *("-c", os.devnull, "--rootdir", os.path.commonpath([path.parent for path in chosen])),
        *("-p", "no:cacheprovider", "-p", "no:playwright", "--disable-warnings"),
        *map(str, chosen),
    ]
    with environment() as env:
        return subprocess.run(command, env=env, check=False).returncode


def execute(path: Path, timeout: int = CELL_TIMEOUT) -> None:
    """Run a notebook in a kernel of this Python and store it, with its outputs, in its place.

    Cells that are meant to fail carry the tag `raises-exception`. When another cell fails,
    nbclient's CellExecutionError is raised and the file stays as it was.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))  # gives every cell an id
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,  # as nbval compares them
        resources={"metadata": {"path": str(path.parent)}},
    )
    with environment() as env:
        client.execute(env=env)
    normalise(notebook)
    fresh = path.with_name(path.name + ".tmp")
    try:
        nbformat.write(notebook, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def normalise(notebook: NotebookNode) -> None:
    """Drop, in place, what differs from run to run and from machine to machine but is no output:
    times of execution, the state of widgets (random ids), Python's version."""
    for cell in notebook.cells:
        for key in ("execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
    metadata: dict[str, Any] = notebook.metadata
    metadata.pop("widgets", None)
    metadata["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    metadata.get("language_info", {}).pop("version", None)
