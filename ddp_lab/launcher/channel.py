"""Messages, with file descriptors if need be, over one end of a socket pair.

A message is any picklable tuple of plain values. Only processes that the launcher started hold
the other end, so unpickling what arrives is safe.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("!IB")  # bytes of the pickle that follows, descriptors that come with it
_CHUNK = 1 << 18
_MAX_DESCRIPTORS = 8  # in one message


class ChannelClosed(Exception):
    """The other end has gone."""


class Channel:
    """Sends and receives messages; one reader, any number of sending threads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._owner = os.getpid()
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()
        self._lock = threading.Lock()
        self.unsent = 0
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        """Queue a message and send what the socket takes now. Takes over the descriptors."""
        body = pickle.dumps(message, protocol=5)
        frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
        with self._lock:
            self._outbox.append((frame, descriptors))
            self.unsent += len(frame)
        self.flush()

    def send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        """Send a message, waiting until the socket has taken all of it.

        Raises ChannelClosed when the other end has gone.
        """
        self.post(message, descriptors)
        self.drain()

    def drain(self) -> None:
        """Wait until the socket has taken all that was posted.

        Raises ChannelClosed when the other end has gone.
        """
        while self.unsent and not self.closed:
            _wait(self._socket, select.POLLOUT)
            self.flush()
        if self.closed:
            raise ChannelClosed

    def flush(self) -> None:
        """Send as much of the queue as the socket takes without waiting."""
        with self._lock:
            while self._outbox and not self.closed:
                frame, descriptors = self._outbox[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                try:
                    sent = self._socket.sendmsg([frame], rights if descriptors else [])
                except BlockingIOError:
                    return
                except OSError:
                    self.closed = True
                    return
                self.unsent -= sent
                for descriptor in descriptors:  # they travel with the first byte
                    os.close(descriptor)
                if sent == len(frame):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = (frame[sent:], ())

    def receive(self) -> tuple[tuple[Any, ...], list[int]]:
        """Wait for the next message. Raises ChannelClosed when the other end has gone."""
        while True:
            for message in self._parse(limit=1):
                return message
            if self.closed:
                raise ChannelClosed
            _wait(self._socket, select.POLLIN)
            self._read()

    def receive_available(self) -> list[tuple[tuple[Any, ...], list[int]]]:
        """All messages that have arrived. Sets `closed` when the other end has gone."""
        self._read()
        return self._parse()

    def close(self) -> None:
        """Close our end, and the descriptors that nobody took."""
        self.closed = True
        if self._owner == os.getpid():  # forks of this process hold copies, which would delay it
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for _, descriptors in self._outbox:
                self._descriptors.extend(descriptors)
            self._outbox.clear()
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())

    def _read(self) -> None:
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        while not self.closed:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, space)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    received = array.array("i")
                    received.frombytes(content[: len(content) - len(content) % received.itemsize])
                    self._descriptors.extend(received)
            if not data:
                self.closed = True
                return
            self._inbox += data
            if len(self._inbox) > 16 * _CHUNK:  # let the caller digest before reading on
                return

    def _parse(self, limit: int | None = None) -> list[tuple[tuple[Any, ...], list[int]]]:
        messages: list[tuple[tuple[Any, ...], list[int]]] = []
        start = 0
        while len(self._inbox) - start >= _HEADER.size and len(messages) != limit:
            size, count = _HEADER.unpack_from(self._inbox, start)
            end = start + _HEADER.size + size
            if len(self._inbox) < end:
                break
            with memoryview(self._inbox)[start + _HEADER.size : end] as body:
                message = pickle.loads(body)
            messages.append((message, [self._descriptors.popleft() for _ in range(count)]))
            start = end
        del self._inbox[:start]
        return messages


def _wait(sock: socket.socket, event: int) -> None:
    poller = select.poll()
    poller.register(sock, event)
    poller.poll()


def channel_pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket for whoever gets the other end."""
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs
