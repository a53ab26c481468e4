"""What runs in a rank: take a seat, then run the calls that come in, one after the other."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import random
import signal
import socket
import sys
import traceback
import types
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ddp_lab.launcher import display, processes, source, travel
from ddp_lab.launcher.channel import Channel, ChannelClosed
from ddp_lab.launcher.errors import RankReport
from ddp_lab.launcher.rendezvous import renew_env_rendezvous
from ddp_lab.launcher.reports import UnsendableResult, describe
from ddp_lab.launcher.travel import Parcel

STACK_SIGNAL: int = getattr(signal, "SIGRTMAX", 0) or getattr(signal, "SIGUSR2", 0)
"""A rank that gets this signal writes its main thread's stack, whatever it is doing."""

current: int | None = None
"""This process's rank, when it is one (or the child of one)."""


@dataclass(frozen=True)
class Seat:
    """Everything that a rank is told when it starts."""

    rank: int
    nproc_per_node: int
    nnodes: int
    backend: str
    threads: int
    environment: dict[str, str]
    directory: str
    path: list[str]
    master_port: int
    store: str  # the path of the file that the ranks meet in
    temporary: str  # a folder that goes when the job ends

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes

    @property
    def node(self) -> int:
        return self.rank // self.nproc_per_node

    @property
    def variables(self) -> dict[str, str]:
        """What torchrun sets, and what keeps every connection on this machine."""
        loopback = "lo" if processes.LINUX else "lo0"
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank % self.nproc_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.nproc_per_node),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.master_port),
            # The supervisor serves that port, so rank 0 must not open one of its own, which
            # would listen on every interface.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "OPENBLAS_NUM_THREADS": str(self.threads),
            **self._devices,
        }

    @property
    def _devices(self) -> dict[str, str]:
        if self.backend != "nccl" or self.nnodes == 1:
            return {}
        every = ",".join(map(str, range(self.world_size)))
        visible = self.environment.get("CUDA_VISIBLE_DEVICES", every).split(",")
        mine = visible[self.node * self.nproc_per_node : (self.node + 1) * self.nproc_per_node]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def main(seat: Seat, channel: Channel, dump: int) -> NoReturn:
    """Be a rank until told to leave. Descriptors 1 and 2 must be the capturing pipes already."""
    rank = Rank(seat, channel)
    rank.take_seat(dump)
    rank.serve()


def spawned(control: int, dump: int) -> NoReturn:
    """The entry point of a rank that was not forked: its seat comes as the first message."""
    channel = Channel(socket.socket(fileno=control))
    (parent, seat), _ = channel.receive()
    processes.die_with_parent(parent)
    main(seat, channel, dump)


class Rank:
    def __init__(self, seat: Seat, channel: Channel) -> None:
        self.seat = seat
        self.channel = channel
        self.namespace: dict[str, Any] = {}
        self.calling = False
        self.pid = os.getpid()

    def take_seat(self, dump: int) -> None:
        global current
        current = self.seat.rank
        processes.name_process(f"ddp-lab rank {self.seat.rank}")
        os.setpgid(0, 0)  # a rank that signals its process group must not hit the others
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable(dump)
        faulthandler.register(STACK_SIGNAL, dump, all_threads=False)
        os.environ.clear()
        os.environ.update({**self.seat.environment, **self.seat.variables})
        os.chdir(self.seat.directory)
        sys.path[:] = self.seat.path
        sys.argv = [""]
        self._open_streams()
        self._become_main()
        self._settle_libraries()

    def serve(self) -> NoReturn:
        failure = self._join_group("start")
        while True:
            try:
                message, descriptors = self.channel.receive()
            except ChannelClosed:
                os._exit(0)
            if message[0] == "leave":
                self._leave()
            _, parcel, sources, rejoin = message
            for label, text in sources.items():
                source.remember_source(label, text)
            if rejoin:
                failure = self._join_group(rejoin)
            if failure is not None:
                self.channel.send(("done", False, failure, None))
            elif parcel is None:
                self.channel.send(("done", True, None, group_state()))
            else:
                parcel.descriptor = descriptors[0] if descriptors else None
                self._answer(parcel)

    def _answer(self, parcel: Parcel) -> None:
        """Run one call and send what came of it, after everything that it printed."""
        result: Parcel | None = None
        report: RankReport | None = None
        try:
            result = self._call(parcel)
        except BaseException as error:
            self.calling = False
            if os.getpid() != self.pid:
                _end_fork(error)
            report = describe(self.seat.rank, error)
        finally:
            self.calling = False
        flush_streams()
        if result is not None:
            self.channel.send(("done", True, result, group_state()), result.descriptors)
        else:
            self.channel.send(("done", False, report, group_state()))

    def _call(self, parcel: Parcel) -> Parcel:
        self.calling = True
        fn, args = travel.unpack(parcel, self.namespace)
        try:
            value = fn(*args)
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            value = None
        self.calling = False
        if os.getpid() != self.pid:
            _end_fork()
        try:
            return travel.pack(value)[0]
        except Exception as error:
            raise UnsendableResult(value, error) from None

    def _on_interrupt(self, *_: Any) -> None:
        if self.calling:
            raise KeyboardInterrupt

    def _join_group(self, prefix: str) -> RankReport | None:
        """Initialise the default process group with all ranks; a report if that fails."""
        import torch.distributed as dist

        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.FileStore(self.seat.store, self.seat.world_size)
            dist.init_process_group(
                self.seat.backend,
                store=dist.PrefixStore(prefix, store),
                rank=self.seat.rank,
                world_size=self.seat.world_size,
            )
        except Exception as error:
            flush_streams()
            report = describe(self.seat.rank, error)
            return replace(report, summary=f"could not join its process group: {report.summary}")
        return None

    def _open_streams(self) -> None:
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            raw = os.fdopen(descriptor, "wb", closefd=False)
            stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
            with contextlib.suppress(ValueError, OSError, AttributeError):
                libc = ctypes.CDLL(None)  # so that C's prints keep their place among Python's
                libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, 1, 0)
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the rank lives
        builtins.input = _no_input
        display.install(self._publish)

    def _publish(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        flush_streams()
        relayed, relay = os.pipe()
        try:
            self.channel.send(("display", data, metadata), [relay])
            os.read(relayed, 1)  # what this rank prints next must not overtake it
        finally:
            os.close(relayed)

    def _become_main(self) -> None:
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        self.namespace = module.__dict__

    def _settle_libraries(self) -> None:
        """Undo what forks share but fresh processes would not, and set the number of threads."""
        import numpy
        import torch

        random.seed()
        numpy.random.seed()
        torch.set_num_threads(self.seat.threads)
        # Folders of multiprocessing's would stay behind when a rank is killed.
        multiprocessing.current_process()._config["tempdir"] = self.seat.temporary  # type: ignore[attr-defined]
        if processes.LINUX and sys.version_info >= (3, 14):
            # Loader workers need classes of the notebook, which only a fork hands on.
            multiprocessing.set_start_method("fork", force=True)
        renew_env_rendezvous()

    def _leave(self) -> NoReturn:
        """End as a program would, except that nothing of the interpreter is taken down."""
        dist = sys.modules["torch.distributed"]
        with contextlib.suppress(BaseException):
            if self.seat.backend == "nccl" and dist.is_initialized():
                dist.destroy_process_group()
            atexit._run_exitfuncs()
        flush_streams()
        os._exit(0)


def _end_fork(error: BaseException | None = None) -> NoReturn:
    """End a process that the learner's function has forked and that has come back from it.

    It must not answer in its parent's place; it ends as it would in a program.
    """
    code = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    elif error is not None:
        traceback.print_exception(error)
    flush_streams()
    os._exit(code)


def group_state() -> dict[str, int] | None:
    """How many collectives each process group has issued here, None without a default group.

    Ranks whose numbers differ would mistake each other's calls from now on.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    names = dist.distributed_c10d._world.pg_names
    counter = "_get_sequence_number_for_group"  # torch's stubs do not know it
    return {name: getattr(group, counter)() for group, name in names.items()}


def flush_streams() -> None:
    """Push out what Python and C have buffered."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _no_input(prompt: object = "", /) -> NoReturn:
    raise RuntimeError(
        "a rank cannot ask for input(): several ranks share one cell. Ask in the notebook, and "
        "give the answer to launch as an argument"
    )
