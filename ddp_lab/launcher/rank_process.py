"""A rank as its supervisor sees it, and how it is started: by a fork, or as a new Python."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass, field

from ddp_lab.launcher import processes, rank
from ddp_lab.launcher.channel import Channel, channel_pair
from ddp_lab.launcher.errors import RankReport


@dataclass
class RankProcess:
    """The supervisor's side of one rank."""

    number: int
    pid: int
    channel: Channel
    pipes: dict[int, str]  # descriptor -> "stdout" or "stderr"
    dump: int
    watch: int | None
    answered: bool = True  # nothing is outstanding
    report: RankReport | None = None  # of the current call, when it failed
    alive: bool = True
    group: dict[str, int] | None = field(default_factory=dict)


def start_rank(seat: rank.Seat, meeting: int, forks: bool) -> RankProcess:
    """Start the rank for a seat. `meeting`: the descriptor of the file that the ranks meet in."""
    channel, theirs = channel_pair()
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    dump = processes.anonymous_file("ddp-lab-stack")
    start = _fork if forks else _spawn
    pid = start(seat, theirs, out_end, err_end, dump, meeting)
    theirs.close()
    os.close(out_end)
    os.close(err_end)
    for pipe in (out, err):
        os.set_blocking(pipe, False)
    if not forks:
        channel.post((os.getpid(), seat))
    pipes = {out: "stdout", err: "stderr"}
    return RankProcess(seat.rank, pid, channel, pipes, dump, processes.watch_process(pid))


def _fork(
    seat: rank.Seat, control: socket.socket, out: int, err: int, dump: int, meeting: int
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        processes.die_with_parent(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        close_descriptors(keep={0, 1, 2, control.fileno(), dump, meeting})
        rank.main(seat, Channel(control), dump)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _spawn(
    seat: rank.Seat, control: socket.socket, out: int, err: int, dump: int, meeting: int
) -> int:
    inherited = (control.fileno(), dump, meeting)
    process = subprocess.Popen(
        python_command("ddp_lab.launcher.rank", "spawned", *inherited[:2]),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        pass_fds=inherited,
        env={**seat.environment, **seat.variables},
    )
    process.returncode = 0  # we reap it ourselves
    return process.pid


def close_descriptors(keep: set[int]) -> None:
    """Close every descriptor of this process but those."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def python_command(module: str, function: str, *arguments: int) -> list[str]:
    """A command that calls a function of ours with numbers, importing as this process does."""
    program = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from {module} import {function}; {function}({', '.join(map(str, arguments))})"
    )
    return [sys.executable, "-c", program]
