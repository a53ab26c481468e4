"""What ranks print, on its way into the cell: whole lines, tagged, in order for each rank."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEPT = 16 << 20
"""Bytes that are kept of each stream of each rank."""

_CUT = "[earlier output was cut: the last 16 MiB are kept]\n"
_BATCH = 0.02  # s between two batches, so that 100,000 lines do not become 100,000 messages
_REPAINT = 0.1  # s between two states of a progress bar
_STATUS_WIDTH = 160  # characters of the line that shows progress
_GLOO_CHATTER = b"[Gloo] Rank "  # "... is connected to 3 peer ranks": not the learner's


@dataclass(frozen=True)
class Rich:
    """Something that a rank gave to `display()`: data by MIME type."""

    data: dict[str, Any]
    metadata: dict[str, Any]


class Tail:
    """The last KEPT bytes of a stream, with the rich output that came between."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | Rich] = deque()
        self._size = 0
        self.cut = False

    def append(self, piece: bytes | Rich) -> None:
        self._pieces.append(piece)
        if isinstance(piece, Rich):
            return
        self._size += len(piece)
        while self._size > KEPT:
            first = self._pieces.popleft()
            self.cut = True
            if isinstance(first, Rich):
                continue
            self._size -= len(first)
            if self._size < KEPT:
                keep = first[self._size - KEPT :]
                self._pieces.appendleft(keep)
                self._size += len(keep)

    @property
    def text(self) -> str:
        data = b"".join(piece for piece in self._pieces if isinstance(piece, bytes))
        return (_CUT if self.cut else "") + _decode(data)

    def parts(self) -> Iterator[str | Rich]:
        """Text and rich output in the order in which they came."""
        text = _CUT.encode() if self.cut else b""
        for piece in self._pieces:
            if isinstance(piece, Rich):
                yield from [_decode(text)] if text else []
                yield piece
                text = b""
            else:
                text += piece
        if text:
            yield _decode(text)


@dataclass(frozen=True)
class RankOutput:
    """What one rank printed in a call: the last 16 MiB of each stream."""

    stdout: str
    stderr: str


class _Stream:
    """Cuts what arrives from one stream of one rank into whole lines."""

    def __init__(self) -> None:
        self.tail = Tail()
        self._begun: list[bytes] = []  # a line that has not ended yet
        self.status = ""  # the line that a progress bar is at

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, each with its end."""
        if b"\n" not in data:
            self._begun.append(data)
            lines = []
        else:
            *lines, rest = (b"".join(self._begun) + data).split(b"\n")
            self._begun = [rest] if rest else []
            if any(_GLOO_CHATTER in line for line in lines):
                lines = [line for line in lines if _GLOO_CHATTER not in line]
            self.status = ""
        if b"\r" in data and self._begun:
            self._begun = [_visible(b"".join(self._begun)) + b"\r"]
            self.status = _decode(self._begun[0].rstrip(b"\r"))
        for line in lines:
            self.tail.append(line + b"\n")
        return lines

    def end(self) -> list[bytes]:
        """What is left of a line without an end."""
        rest = b"".join(self._begun)
        self._begun, self.status = [], ""
        if not rest or _GLOO_CHATTER in rest:
            return []
        self.tail.append(rest)
        return [rest]


class Output:
    """Receives what ranks print in one call, shows it in the cell, and keeps the last of it.

    mode: "live" shows lines as they come, "by-rank" shows them at the end, rank by rank, which
    does not change from run to run, and "quiet" shows nothing.
    """

    def __init__(self, world_size: int, mode: str) -> None:
        self.mode = mode
        self._streams = [{"stdout": _Stream(), "stderr": _Stream()} for _ in range(world_size)]
        self._screen = _Screen()

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take a piece of what a rank wrote to "stdout" or "stderr"."""
        lines = self._streams[rank][stream].feed(data)
        if self.mode == "live":
            self._screen.add(stream, _tagged(rank, lines))

    def rich(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Take what a rank displayed."""
        self._streams[rank]["stdout"].tail.append(Rich(data, metadata))
        if self.mode == "live":
            self._screen.flush(self._status())
            _show_rich(rank, Rich(data, metadata))

    def flush_due(self) -> float | None:
        """Seconds until `flush` has something to do, None if it has nothing to do."""
        return self._screen.due(self._status() if self.mode == "live" else "")

    def flush(self) -> None:
        """Show what is due."""
        self._screen.flush(self._status())

    def finish(self) -> list[RankOutput]:
        """Show all that is left to show; what each rank printed."""
        for rank, streams in enumerate(self._streams):
            for name, stream in streams.items():
                lines = stream.end()
                if self.mode == "live":
                    self._screen.add(name, _tagged(rank, lines))
        self._screen.flush("")
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
                        self._screen.flush("")
                        _show_rich(rank, part)
                    else:
                        lines = part.removesuffix("\n").encode().split(b"\n")
                        self._screen.add(name, _tagged(rank, lines))
        self._screen.flush("")

    def _status(self) -> str:
        """One line for all progress bars that are running."""
        running = [
            f"[rank {rank}] {stream.status}"
            for rank, streams in enumerate(self._streams)
            for stream in streams.values()
            if stream.status
        ]
        return " | ".join(running)[:_STATUS_WIDTH]


class _Screen:
    """Writes to the cell in batches, with a status line that the next batch overwrites."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, str]] = []
        self._shown = ""  # the status line that stands in the cell now
        self._last = 0.0

    def add(self, stream: str, text: str) -> None:
        if text:
            self._pending.append((stream, text))

    def due(self, status: str) -> float | None:
        interval = _BATCH if self._pending else _REPAINT
        if not self._pending and status == self._shown:
            return None
        return max(0.0, self._last + interval - time.monotonic())

    def flush(self, status: str) -> None:
        if not self._pending and status == self._shown:
            return
        self._last = time.monotonic()
        if self._shown:
            self._write("stdout", "\r" + " " * len(self._shown) + "\r")
        pending, self._pending = self._pending, []
        while pending:
            stream = pending[0][0]
            texts = []
            while pending and pending[0][0] == stream:
                texts.append(pending.pop(0)[1])
            self._write(stream, "".join(texts))
        if status:
            self._write("stdout", status)
        self._shown = status

    @staticmethod
    def _write(stream: str, text: str) -> None:
        target = getattr(sys, stream)
        target.write(text)
        target.flush()  # the kernel would hold it back for 0.2 s


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line with carriage returns: the last piece with text."""
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


def _tagged(rank: int, lines: list[bytes]) -> str:
    texts = (_decode(_visible(line) if b"\r" in line else line) for line in lines)
    return "".join(f"[rank {rank}] {text}\n" for text in texts)


def _show_rich(rank: int, rich: Rich) -> None:
    from IPython.core.getipython import get_ipython

    text = rich.data.get("text/plain", "")
    if get_ipython() is None or set(rich.data) == {"text/plain"}:
        print("".join(f"[rank {rank}] {line}\n" for line in str(text).splitlines()), end="")
    else:
        from IPython.display import publish_display_data

        print(f"[rank {rank}]")
        sys.stdout.flush()
        publish_display_data(rich.data, rich.metadata)
    sys.stdout.flush()
