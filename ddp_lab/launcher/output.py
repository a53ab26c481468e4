"""What ranks print, on its way into the cell: whole lines, tagged, in order for each rank."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEPT = 16 << 20
"""Bytes that are kept of each stream of each rank."""

_CUT = b"[earlier output was cut: the last 16 MiB are kept]\n"
_CUT_LINE = b"[the beginning of this line was cut] "
_BLOCK = 1 << 16  # bytes kept in one piece, so that a million short lines are not a million objects
_BATCH = 0.02  # s between two batches, so that 100,000 lines do not become 100,000 messages
_REPAINT = 0.1  # s between two states of a progress bar
# JupyterLab renders all of a cell's text anew with each message, so a long text must grow in few
# and large steps: with these, it shows 100,000 lines in a quarter of the time.
_SLOWDOWN = 1e-7  # s between two batches for each character that stands in the cell
_SLOWEST = 1.0  # s
_LARGE = 1 << 22  # characters that are too many to wait
_STATUS_WIDTH = 160  # characters of the line that shows progress

# gloo's own words, not the learner's. They may come in the middle of a line that has not ended.
_CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks[^\r\n]*\n")

# A nested progress bar goes down a line, paints, and goes up again; when it then goes down to
# paint once more, that is no new line.
_UP = b"\x1b[A"


@dataclass(frozen=True)
class Rich:
    """Something that a rank gave to `display()`: data by MIME type."""

    data: dict[str, Any]
    metadata: dict[str, Any]

    def __len__(self) -> int:
        return sum(len(v if isinstance(v, str | bytes) else repr(v)) for v in self.data.values())


class Tail:
    """The last KEPT bytes of a stream, with the rich output that came between."""

    def __init__(self) -> None:
        self._pieces: deque[bytearray | Rich] = deque()
        self._size = 0
        self._dropped = False

    def append(self, text: bytes) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, bytearray) and len(last) < _BLOCK:
            last += text
        else:
            self._pieces.append(bytearray(text))
        self._size += len(text)
        self._drop()

    def append_rich(self, rich: Rich) -> None:
        self._pieces.append(rich)
        self._size += len(rich)
        self._drop()

    def _drop(self) -> None:
        while self._size - len(self._pieces[0]) >= KEPT:  # not exact: `parts` cuts the rest
            self._size -= len(self._pieces.popleft())
            self._dropped = True

    def parts(self) -> Iterator[bytes | Rich]:
        """Text and rich output in the order in which they came; text in whole lines."""
        pieces = list(self._pieces)
        excess = self._size - KEPT
        if excess > 0:
            first = pieces.pop(0)
            if isinstance(first, bytearray):
                line = first.find(b"\n", excess - 1) + 1
                if line == len(first) and not pieces:  # one line is longer than what is kept
                    line = excess
                pieces.insert(0, first[line or excess :])
        text = bytearray(_CUT if self._dropped or excess > 0 else b"")
        for piece in pieces:
            if isinstance(piece, bytearray):
                text += piece
            else:
                yield from [bytes(text)] if text else []
                yield piece
                text = bytearray()
        if text:
            yield bytes(text)

    @property
    def text(self) -> str:
        return _decode(b"".join(part for part in self.parts() if isinstance(part, bytes)))


@dataclass(frozen=True)
class RankOutput:
    """What one rank printed in a call: the last 16 MiB of each stream.

    Of a line that was painted over and over (a progress bar) it has the last state.
    """

    stdout: str
    stderr: str

    def __add__(self, later: RankOutput) -> RankOutput:
        return RankOutput(self.stdout + later.stdout, self.stderr + later.stderr)


class _Stream:
    """Cuts what arrives from one stream of one rank into whole lines.

    How it arrives, in how many pieces, makes no difference to what comes out.
    """

    def __init__(self) -> None:
        self.tail = Tail()
        self._begun = bytearray()  # a line that has not ended yet
        self._cut = False  # was it too long to be kept whole?

    def feed(self, data: bytes) -> bytes:
        """The lines that are whole now, as a terminal would show them, each with its end."""
        if b"\n" not in data and b"\r" not in data:
            self._begin(data)
            return b""
        whole = self._take_begun() + data
        if b"[Gloo]" in whole:
            whole = _CHATTER.sub(b"", whole)
        whole = whole.replace(_UP + b"\n", b"\r")
        lines, end, rest = whole.rpartition(b"\n")
        self._begin(_repainted(rest) if b"\r" in rest else rest)
        lines += end
        if b"\r" in lines or _UP in lines:
            lines = b"".join(_visible(line) + b"\n" for line in lines[:-1].split(b"\n"))
        if lines:
            self.tail.append(lines)
        return lines

    def end(self) -> bytes:
        """What is left of a line without an end."""
        rest = _visible(self._take_begun())
        if rest:
            self.tail.append(rest)
        return rest

    @property
    def status(self) -> str:
        """The state that a progress bar is at; empty when none is running."""
        if b"\r" not in self._begun:
            return ""
        return _visible(bytes(self._begun)).decode("utf-8", "ignore").strip()

    def _begin(self, data: bytes) -> None:
        self._begun += data
        if len(self._begun) > KEPT + _BLOCK:
            del self._begun[:-KEPT]
            self._cut = True

    def _take_begun(self) -> bytes:
        begun = (_CUT_LINE if self._cut else b"") + bytes(self._begun)
        self._begun, self._cut = bytearray(), False
        return begun


def _repainted(line: bytes) -> bytes:
    """A line that has not ended, without the states that later ones have painted over."""
    *painted, last = line.split(b"\r")
    shown = next((state for state in reversed(painted) if state.replace(_UP, b"")), b"")
    return shown + b"\r" + last


def _visible(line: bytes) -> bytes:
    """What stays of a line with carriage returns: the last thing painted, nothing if blank."""
    if _UP in line:
        line = line.replace(_UP, b"")
    if b"\r" not in line:
        return line
    shown = next((state for state in reversed(line.split(b"\r")) if state), b"")
    return shown if shown.strip() else b""


class Output:
    """Receives what ranks print in one call, shows it in the cell, and keeps the last of it.

    mode: "live" shows lines as they come, "by-rank" shows them at the end, rank by rank, which
    does not change from run to run, and "quiet" shows nothing.
    """

    def __init__(self, world_size: int, mode: str) -> None:
        self.mode = mode
        self._streams = [{"stdout": _Stream(), "stderr": _Stream()} for _ in range(world_size)]
        self._screen = _Screen()

    def take(self, message: tuple[Any, ...]) -> bool:
        """Take a message of the supervisor's if it is about output."""
        if message[0] == "output":
            self.feed(*message[1:])
        elif message[0] == "display":
            self.rich(*message[1:])
        else:
            return False
        return True

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take a piece of what a rank wrote to "stdout" or "stderr"."""
        lines = self._streams[rank][stream].feed(data)
        if self.mode == "live":
            self._screen.add(stream, _tagged(rank, lines))

    def rich(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Take what a rank displayed."""
        stream, rich = self._streams[rank]["stdout"], Rich(data, metadata)
        begun = stream.end()
        if self.mode == "live":
            self._screen.add("stdout", _tagged(rank, begun))
            self._screen.flush(NO_STATUS)
            _show_rich(rank, rich)
        elif self.mode == "by-rank":
            stream.tail.append_rich(rich)

    def flush_due(self) -> float | None:
        """Seconds until `flush` has something to do, None if it has nothing to do."""
        return self._screen.due(self._status()) if self.mode == "live" else None

    def flush(self) -> None:
        """Show what is due."""
        self._screen.flush(self._status())

    def finish(self) -> list[RankOutput]:
        """Show all that is left to show; what each rank printed."""
        for rank, streams in enumerate(self._streams):
            for name, stream in streams.items():
                rest = stream.end()
                if self.mode == "live":
                    self._screen.add(name, _tagged(rank, rest))
        self._screen.flush(NO_STATUS)
        if self.mode == "by-rank":
            self._show_by_rank()
        return [
            RankOutput(streams["stdout"].tail.text, streams["stderr"].tail.text)
            for streams in self._streams
        ]

    def _show_by_rank(self) -> None:
        for rank, streams in enumerate(self._streams):
            for name, stream in streams.items():
                for part in stream.tail.parts():
                    if isinstance(part, Rich):
                        self._screen.flush(NO_STATUS)
                        _show_rich(rank, part)
                    else:
                        self._screen.add(name, _tagged(rank, part))
        self._screen.flush(NO_STATUS)

    def _status(self) -> tuple[str, str]:
        """(stream, text) of one line for all progress bars that are running."""
        for name in ("stderr", "stdout"):
            states = [(rank, streams[name].status) for rank, streams in enumerate(self._streams)]
            running = [f"[rank {rank}] {state}" for rank, state in states if state]
            if running:
                return name, " | ".join(running)[:_STATUS_WIDTH]
        return NO_STATUS


NO_STATUS = ("stderr", "")


class _Screen:
    """Writes to the cell in batches, with a status line that the next batch overwrites."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, str]] = []
        self._waiting = self._written = 0  # characters
        self._shown = NO_STATUS  # the status line that stands in the cell now
        self._last = 0.0

    def add(self, stream: str, text: str) -> None:
        if text:
            self._pending.append((stream, text))
            self._waiting += len(text)

    def due(self, status: tuple[str, str]) -> float | None:
        if not self._pending and status == self._shown:
            return None
        slow = min(_SLOWDOWN * self._written, _SLOWEST)
        interval = max(_BATCH if self._pending else _REPAINT, slow)
        if self._waiting > _LARGE:
            interval = 0.0
        return max(0.0, self._last + interval - time.monotonic())

    def flush(self, status: tuple[str, str]) -> None:
        if not self._pending and status == self._shown:
            return
        self._last = time.monotonic()
        self._written += self._waiting
        self._waiting = 0
        pending, self._pending = self._pending, []
        stream, shown = self._shown
        if shown:
            blank = "\r" + " " * len(shown) + "\r"
            pending.insert(0, (stream, blank))
        if status[1]:
            pending.append(status)
        self._shown = status
        while pending:
            stream = pending[0][0]
            texts = []
            while pending and pending[0][0] == stream:
                texts.append(pending.pop(0)[1])
            self._write(stream, "".join(texts))

    @staticmethod
    def _write(stream: str, text: str) -> None:
        target = getattr(sys, stream)
        target.write(text)
        target.flush()  # the kernel would hold it back for 0.2 s


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _tagged(rank: int, lines: bytes) -> str:
    """Each line with its rank, and with an end."""
    if not lines:
        return ""
    tag = f"[rank {rank}] "
    return tag + _decode(lines).removesuffix("\n").replace("\n", "\n" + tag) + "\n"


def _show_rich(rank: int, rich: Rich) -> None:
    from IPython.core.getipython import get_ipython

    if get_ipython() is None or set(rich.data) == {"text/plain"}:
        sys.stdout.write(_tagged(rank, str(rich.data.get("text/plain", "")).encode()))
    else:
        from IPython.display import publish_display_data

        sys.stdout.write(f"[rank {rank}]\n")
        sys.stdout.flush()
        publish_display_data(rich.data, rich.metadata)
    sys.stdout.flush()
