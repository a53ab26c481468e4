"""A real Jupyter kernel to run cells in, and a look at what processes leave behind."""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class CellError:
    """What a cell raised: the class, its message, and the text that the notebook shows."""

    name: str
    message: str
    shown: str


@dataclass
class Cell:
    """A cell that has run: its number (`In[number]`), outputs as nbformat has them, its error."""

    number: int = 0
    outputs: list[dict[str, Any]] = field(default_factory=list)
    error: CellError | None = None
    seconds: float = 0.0

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def result(self) -> str | None:
        """The text of the cell's last expression."""
        texts = [o["data"]["text/plain"] for o in self.outputs if o["type"] == "execute_result"]
        return texts[-1] if texts else None

    def _stream(self, name: str) -> str:
        return "".join(
            o["text"] for o in self.outputs if o["type"] == "stream" and o["name"] == name
        )


class KernelDied(Exception):
    """The kernel ended while a cell ran."""


class Kernel:
    """A running IPython kernel: `kernel.run("launch(f)")`, `kernel.interrupt()`, `kernel.kill()`.

    `environment` comes on top of this process's own.
    """

    _count = 0

    def __init__(self, **environment: str) -> None:
        Kernel._count += 1
        self.mark = f"{os.environ['DDP_LAB_TESTS']}-{Kernel._count}"
        self.manager = KernelManager()
        marked = {**os.environ, **environment, "DDP_LAB_TESTS_KERNEL": self.mark}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  what the kernel itself says
        self.manager.start_kernel(env=marked, stdout=self._log, stderr=self._log)
        self._connect()

    def _connect(self) -> None:
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def run(self, source: str, timeout: float = 60) -> Cell:
        """Run a cell to its end. Raises KernelDied, and TimeoutError when it takes too long."""
        return self.begin(source).finish(timeout)

    def check(self, source: str, timeout: float = 60) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(source, timeout)
        assert cell.error is None, cell.error.shown
        return cell

    def begin(self, source: str) -> Running:
        """Start a cell; the caller does something meanwhile and then calls `.finish()`."""
        return Running(self, source)

    def value(self, expression: str) -> Any:
        """What an expression of plain data is worth in the kernel."""
        return ast.literal_eval(self.check(f"print(repr({expression}))").stdout)

    def interrupt(self) -> None:
        """What the stop button does."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """What the restart button does."""
        self.manager.restart_kernel()
        self.client.stop_channels()
        self._connect()

    def kill(self) -> None:
        """SIGKILL, as the system does it when memory is short."""
        os.kill(self.pid, signal.SIGKILL)

    def others(self) -> list[Process]:
        """All processes that the kernel has started, at whatever distance, apart from itself."""
        found = marked_processes("DDP_LAB_TESTS_KERNEL", self.mark)
        return [process for process in found if process.pid != self.pid]

    def template(self) -> Process | None:
        """The kernel's template process."""
        return next((p for p in self.others() if is_template(p) and p.parent == self.pid), None)

    def prepare(self) -> None:
        """Import the launcher, as a notebook's first cell does, but not torch, to be quick."""
        self.check("import os, signal, subprocess, sys, threading, time")
        self.check("from ddp_lab import World, launch")

    def warm_up(self) -> None:
        """Import the launcher and torch; wait until the template has imported all that it will."""
        self.prepare()
        self.check("import torch, torch.distributed as dist")
        self.check("from ddp_lab.launcher import client as _client")
        self.check("_ = _client.forks() and _client.wait_until_warm()")

    def shutdown(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self._log.close()


class Running:
    """A cell that runs."""

    def __init__(self, kernel: Kernel, source: str) -> None:
        self._kernel = kernel
        self._cell = Cell()
        self._began = time.monotonic()
        self._id = kernel.client.execute(source)
        self._idle = False

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        self._take(0)
        return self._cell.stdout

    def wait_for(self, text: str, timeout: float = 30) -> None:
        """Wait until the cell has printed a text."""
        wait_until(lambda: text in self.stdout, timeout, f"{text!r} in the output")

    def finish(self, timeout: float = 60) -> Cell:
        """Wait for its end."""
        deadline = time.monotonic() + timeout
        while not self._idle:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cell still ran after {timeout} s: {self._cell}")
            self._take(0.2)
        self._cell.seconds = time.monotonic() - self._began
        while True:  # the execution count comes with the reply
            reply = self._kernel.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == self._id:
                self._cell.number = reply["content"].get("execution_count", 0)
                return self._cell

    def _take(self, wait: float) -> None:
        """Take in the messages that are there, waiting for the first one."""
        while True:
            try:
                message = self._kernel.client.get_iopub_msg(timeout=wait)
            except queue.Empty:
                if wait and not self._kernel.manager.is_alive():
                    raise KernelDied(f"the kernel died: {self._cell}") from None
                return
            wait = 0
            if message["parent_header"].get("msg_id") != self._id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                self._idle = True
            elif kind in ("stream", "display_data", "execute_result", "update_display_data"):
                self._cell.outputs.append({"type": kind, **content})
            elif kind == "error":
                shown = _ANSI.sub("", "\n".join(content["traceback"]))
                self._cell.error = CellError(content["ename"], content["evalue"], shown)


def line_of(source: str, text: str) -> int:
    """The number of the line of a cell that contains a text."""
    numbers = [i for i, line in enumerate(source.splitlines(), 1) if text in line]
    assert len(numbers) == 1, f"{text!r} is on lines {numbers}"
    return numbers[0]


def patience(seconds: float) -> float:
    """So many seconds; more, in proportion, while more processes want to run than there are cores.

    What takes .7 s on a machine of our own takes 5 s where others run their tests, too.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], Any], timeout: float, what: str = "") -> float:
    """Wait until a condition holds; the seconds that it took. Fails when the time is up."""
    began, limit = time.monotonic(), patience(timeout)
    while not condition():
        elapsed = time.monotonic() - began
        assert elapsed < limit, f"not within {limit:.1f} s: {what or condition}"
        time.sleep(0.005)
    return time.monotonic() - began


def run_script(source: str, *command: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own, or in the command given."""
    return subprocess.run(
        [*(command or (sys.executable, "-c")), source],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


# What is left behind


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it. Equal to another look at the same one."""

    pid: int
    started: int  # clock ticks since the machine started: pids are used again
    name: str = field(compare=False)
    parent: int = field(compare=False)
    state: str = field(compare=False)  # R, S, Z, ...
    command: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.pid} [{self.name}] state {self.state}, parent {self.parent}: {self.command}"


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def look_at(pid: int) -> Process | None:
    """The process with that number, if there is one."""
    name, _, rest = _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")
    fields = rest.split()
    if not fields:
        return None
    command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
    name = name.partition("(")[2]
    return Process(pid, int(fields[19]), name, int(fields[1]), fields[0], command[-160:].strip())


def all_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := look_at(int(entry))) is not None:
            yield process


def marked_processes(variable: str, value: str) -> list[Process]:
    """All processes that inherited a variable of the environment, and their zombies."""
    wanted = f"{variable}={value}".encode()
    found: list[Process] = []
    zombies: list[Process] = []
    for process in all_processes():
        if process.state == "Z":
            zombies.append(process)
        elif wanted in _read(f"/proc/{process.pid}/environ").split(b"\0"):
            found.append(process)
    parents = {process.pid for process in found} | {os.getpid()}
    return found + [zombie for zombie in zombies if zombie.parent in parents]


def is_template(process: Process) -> bool:
    return "ddp_lab.launcher.template" in process.command


def listeners(pid: int) -> set[str]:
    """The addresses of the TCP sockets on which a process listens."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _read(f"/proc/net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1])
    return found


@dataclass
class Traces:
    """All that this session's tests have around: processes, listening sockets, files."""

    processes: set[Process]
    sockets: set[tuple[int, str]]
    memory: set[str]  # in /dev/shm
    files: set[str]  # in the temporary folder

    @classmethod
    def now(cls) -> Traces:
        processes = set(marked_processes("DDP_LAB_TESTS", os.environ["DDP_LAB_TESTS"]))
        pids = {process.pid for process in processes} | {os.getpid()}
        return cls(
            processes,
            {(pid, address) for pid in pids for address in listeners(pid)},
            _entries("/dev/shm"),
            _entries(os.environ["TMPDIR"]),
        )

    def new_since(self, before: Traces, zombies: bool = True) -> dict[object, str]:
        """What is here now and was not before, one template for each kernel aside; each with a
        description."""
        owners = {process.pid for process in before.processes} | {os.getpid()}
        owners -= {p.parent for p in self.processes & before.processes if is_template(p)}
        left: dict[object, str] = {}
        for process in sorted(self.processes - before.processes, key=lambda p: p.pid):
            if process.state == "Z" and not zombies:
                continue
            if is_template(process) and process.parent in owners and process.state != "Z":
                owners.discard(process.parent)  # one is enough
            else:
                left[process] = f"process {process}"
        for pid, address in self.sockets - before.sockets:
            left[pid, address] = f"listener {address} of {pid}"
        for name in self.memory - before.memory:
            if _is_ours(name):
                left[name] = f"/dev/shm/{name}"
        for name in self.files - before.files:
            left[name] = f"temporary file {name}"
        return left


def _entries(folder: str) -> set[str]:
    with contextlib.suppress(OSError):  # torch's cache is made when torchvision is imported
        return {name for name in os.listdir(folder) if not name.startswith("torchinductor_")}
    return set()


# What torch and multiprocessing call what they keep in /dev/shm, and what we might.
_SHARED = re.compile(r"torch_(?P<pid>\d+)_|psm_|sem\.|mp-|pymp-|ddp-lab|gloo|nccl")


def _is_ours(name: str) -> bool:
    """May an entry of /dev/shm be of our making? Other programs use that folder, too."""
    match = _SHARED.match(name)
    if match is None:
        return False
    ours = {p.pid for p in marked_processes("DDP_LAB_TESTS", os.environ["DDP_LAB_TESTS"])}
    for process in all_processes():
        if process.pid in ours or process.pid == os.getpid():
            continue
        maps = _read(f"/proc/{process.pid}/maps")
        if str(process.pid) == match["pid"] or f"/dev/shm/{name}".encode() in maps:
            return False
    return os.path.exists(f"/dev/shm/{name}")


def assert_gone_already(before: Traces) -> None:
    """Fail when something is left at the end of a cell, the last bit of a supervisor aside: it
    has closed its socket, and the template is about to reap it."""
    assert_nothing_new(before, timeout=0.25, zombies=False)


def assert_nothing_new(before: Traces, timeout: float = 1.0, zombies: bool = True) -> None:
    """Fail when something stays that was not there before; the system gets a moment to reap."""
    deadline = time.monotonic() + patience(timeout)
    left = Traces.now().new_since(before, zombies)
    while left:
        if time.monotonic() > deadline:
            raise AssertionError("left behind:\n  " + "\n  ".join(left.values()))
        time.sleep(0.02)
        now = Traces.now().new_since(before, zombies)
        left = {key: now[key] for key in left if key in now}
