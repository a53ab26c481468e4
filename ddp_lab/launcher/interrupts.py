"""Interrupts of the notebook's cell, held until ranks have been stopped in an orderly way."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import TracebackType
from typing import Any

from ddp_lab.launcher.channel import Channel


class HoldInterrupts:
    """Turns the main thread's SIGINT into a flag while ranks run, so that nothing is torn.

    The flag raises KeyboardInterrupt at the end, unless somebody has consumed it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._taken = 0
        self._previous: Any = None
        self._holds = threading.current_thread() is threading.main_thread()
        self._wake = self._woken = -1

    def __enter__(self) -> HoldInterrupts:
        if self._holds:
            # From here to `__exit__` nothing is raised in between, so no descriptor is lost.
            self._previous = signal.signal(signal.SIGINT, self._note)
            self._wake, self._woken = os.pipe()
            os.set_blocking(self._woken, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if self._holds:
            wake, woken = self._wake, self._woken
            self._wake = self._woken = -1
            os.close(wake)
            os.close(woken)
            signal.signal(signal.SIGINT, self._previous)
        if self.count and kind is None:
            raise KeyboardInterrupt

    @property
    def interrupted(self) -> bool:
        return self.count > 0

    def take(self) -> bool:
        """One interrupt that has not been taken yet?"""
        if self._taken < self.count:
            self._taken += 1
            return True
        return False

    def consume(self) -> bool:
        """Was there any? It will not be raised at the end any more."""
        was, self.count = self.count > 0, 0
        return was

    def wait(self, channel: Channel, seconds: float | None) -> None:
        """Wait for something to arrive, an interrupt, or the end of the time."""
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        if self._holds:
            poller.register(self._wake, select.POLLIN)
        poller.poll(None if seconds is None else seconds * 1000)
        if self._holds:
            with contextlib.suppress(BlockingIOError):
                os.set_blocking(self._wake, False)
                os.read(self._wake, 64)

    def _note(self, *_: Any) -> None:
        self.count += 1
        with contextlib.suppress(OSError):  # full, or not open (yet, any more)
            os.write(self._woken, b"!")
