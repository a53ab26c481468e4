"""Whose line was it? Labels for code, the text of lines, and which frames are the learner's.

A cell's code is called `In[5]` everywhere, as in the notebook's margin; a file goes by its base
name, so that no message carries a path of the machine that ran it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import FrameType, TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAUNCHER = os.path.join(_PACKAGE, "launcher") + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for key in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(key))
    }
    | {_PACKAGE + os.sep}
)


@dataclass(frozen=True)
class Line:
    """A place in the learner's code."""

    file: str  # "In[5]", or the base name of a file
    number: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """`In[5], line 8, in train`"""
        inside = "" if self.function == "<module>" else f", in {self.function}"
        return f"{self.file}, line {self.number}{inside}"

    def __str__(self) -> str:
        return f"{self.place}:  {self.text}" if self.text else self.place


def cell_label(filename: str) -> str | None:
    """`In[5]` for the file name under which IPython compiled a cell, else None."""
    shell = _shell()
    name = shell.compile.format_code_name(filename) if shell else None
    if not name or name[0] != "Cell":
        return None
    if _counts_cells(shell):
        return str(name[1])
    return f"In[{list(_compiled(shell)).index(filename) + 1}]"


def running_cell_label() -> str:
    """`In[5]` for the cell that is running now. Only under IPython."""
    shell = _shell()
    numbers = _compiled(shell)  # not shell.execution_count: IPython 9 has raised it by now
    return f"In[{max(numbers.values()) if _counts_cells(shell) else len(numbers)}]"


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _counts_cells(shell: Any) -> bool:
    """Does the running cell have a number of its own?

    Clients that keep no history, such as nbval, leave every cell at the number 1. Then a cell
    goes by its place among all that ran, the number that it has where they are counted.
    """
    kernel = getattr(shell, "kernel", None)
    request = kernel.get_parent("shell") if kernel is not None else {}
    counted = request.get("content", {}).get("store_history", True)
    return bool(counted)


def _compiled(shell: Any) -> dict[str, int]:
    """The number of each cell that IPython has compiled, by file name, in order."""
    return shell.compile._filename_map  # type: ignore[no-any-return]


def source_of(filename: str) -> str:
    """The text that a code object of this process was compiled from, as far as it is known."""
    return "".join(linecache.getlines(filename))


def remember_source(label: str, text: str) -> None:
    """Let tracebacks and `inspect.getsource` of this process find the text of code `label`."""
    linecache.cache[label] = (len(text), None, text.splitlines(True), label)


@cache
def is_learners(filename: str) -> bool:
    """Neither Python's, nor an installed package's, nor ours."""
    if filename.startswith("<"):  # <frozen runpy>, <string>
        return False
    if re.fullmatch(r"In\[\d+\]", filename):
        return True
    return not os.path.realpath(filename).startswith(_LIBRARIES)


def line_at(filename: str, number: int, function: str) -> Line:
    """The line of a file or a labelled cell; its source text where this process knows it."""
    text = linecache.getline(filename, number).strip()
    return Line(os.path.basename(filename), number, function, text)


def learners_lines(places: Iterable[tuple[str, int, str]]) -> list[Line]:
    """The learner's lines among (file, line number, function), in the given order."""
    return [line_at(*place) for place in places if is_learners(place[0])]


def traceback_places(traceback: TracebackType | None) -> list[tuple[str, int, str]]:
    """(file, line number, function) of each frame of a traceback, outermost first."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return places


def library_function(traceback: TracebackType | None) -> str | None:
    """`torch.nn.functional.linear` when a library's own frame is the innermost, else None.

    That is the function that the learner's line called last; line numbers and what lies deeper
    change from version to version, so they are left out.
    """
    below: FrameType | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        if is_learners(frame.f_code.co_filename):
            below = None
        elif below is None:
            below = frame
        traceback = traceback.tb_next
    if below is None or below.f_code.co_filename.startswith(_LAUNCHER):
        return None
    name = getattr(below.f_code, "co_qualname", below.f_code.co_name)  # Python 3.11 has the former
    return f"{below.f_globals.get('__name__', '?')}.{name}"


_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<number>\d+) in (?P<function>.*)$')


def dumped_places(dump: str) -> list[tuple[str, int, str]]:
    """The frames of the last thread that `faulthandler` has dumped, innermost first."""
    places: list[tuple[str, int, str]] = []
    for line in dump.splitlines():
        if match := _DUMPED.match(line):
            places.append((match["file"], int(match["number"]), match["function"]))
        elif line.endswith("(most recent call first):"):
            places = []
    return places
