"""The kernel's side of the template: start it once, in the background, and ask it for jobs."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from typing import IO

from ddp_lab.launcher import processes
from ddp_lab.launcher.channel import Channel, ChannelClosed, channel_pair
from ddp_lab.launcher.errors import LaunchError
from ddp_lab.launcher.rank_process import python_command
from ddp_lab.launcher.supervisor import Job


class TemplateClient:
    """A template process, as its kernel sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # a fork of the kernel must start its own
        self.channel, theirs = channel_pair()
        self.import_seconds: float | None = None  # known once it is ready
        self.warm = False
        self._lock = threading.Lock()
        self._messages: IO[bytes] = os.fdopen(processes.anonymous_file("ddp-lab-template"), "w+b")
        with theirs:
            self.process = subprocess.Popen(
                python_command("ddp_lab.launcher.template", "main", theirs.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # OpenBLAS and OpenMP must not start threads that a fork would lose.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Jupyter interrupts the kernel's process group
            )

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def has_ended(self) -> bool:
        """Has it ended, or is it about to?"""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        return not self.usable

    @property
    def ready(self) -> bool:
        """Has it imported everything?"""
        with self._lock:
            for message, _ in self.channel.receive_available():
                if message[0] == "ready":
                    self.import_seconds = message[1]
                elif message[0] == "warm":
                    self.warm = True
        return self.import_seconds is not None

    def fork_supervisor(self, descriptor: int) -> None:
        """Have it fork a supervisor with that socket; returns at once."""
        with self._lock:
            self.channel.send(("job",), [descriptor])

    def last_words(self) -> str:
        """What it printed, for the message when it could not start."""
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.poll()}"


_template: TemplateClient | None = None
_template_lock = threading.Lock()
_warned = False


def forks() -> bool:
    """Ranks are forked from a template on Linux, unless DDP_LAB_START=spawn."""
    choice = os.environ.get("DDP_LAB_START", "")
    if choice not in ("", "fork", "spawn"):
        raise ValueError(
            f"the environment variable DDP_LAB_START is {choice!r}: set it to 'fork' or 'spawn', "
            "or unset it"
        )
    return processes.LINUX and choice != "spawn"


def template() -> TemplateClient:
    """This kernel's template, started now if it is not running."""
    global _template
    with _template_lock:
        if _template is None or not _template.usable:
            _template = TemplateClient()
        return _template


def supported() -> bool:
    """Can this system start ranks at all? Sockets must be able to carry descriptors."""
    return hasattr(socket, "SCM_RIGHTS")


def warm_up() -> None:
    """Start the template, so that the first launch need not wait for its imports."""
    if supported() and forks():
        template()


def wait_until_warm(seconds: float = 60.0) -> TemplateClient:
    """Wait until the template has imported all that it will. For benchmarks and `doctor`."""
    client = template()
    deadline = time.monotonic() + seconds
    while not (client.ready and client.warm):
        left = deadline - time.monotonic()
        if left <= 0 or not client.usable:
            raise LaunchError(f"the template process did not get ready: {client.last_words()}")
        select.select([client.channel], [], [], left)
    return client


def start_job(job: Job) -> tuple[Channel, TemplateClient | None]:
    """Have a supervisor started; the channel to it, and the template that it comes from."""
    if not supported():
        raise LaunchError(
            f"ranks cannot be started on {sys.platform}: run the course in the Windows Subsystem "
            "for Linux (WSL), or on Linux or macOS"
        )
    forked = forks()
    channel, theirs = channel_pair()
    client: TemplateClient | None = None
    if forked:
        client = template()
        try:
            client.fork_supervisor(theirs.detach())
        except ChannelClosed:  # it has ended this very moment
            client.channel.close()
            client.has_ended()
            message = f"the template process ended: {client.last_words()}"
            raise LaunchError(message) from None
    else:
        _spawn_supervisor(theirs)
    channel.post(("start", job))
    return channel, client


def _spawn_supervisor(theirs: socket.socket) -> None:
    global _warned
    if not _warned and os.environ.get("DDP_LAB_START") != "spawn":
        _warned = True
        warnings.warn(
            f"ranks are spawned, not forked, on {sys.platform}: a launch takes seconds, and a "
            "kernel that is killed may leave ranks behind",
            stacklevel=4,
        )
    with theirs:
        process = subprocess.Popen(
            python_command("ddp_lab.launcher.supervisor", "spawned", theirs.fileno()),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # reaps it
