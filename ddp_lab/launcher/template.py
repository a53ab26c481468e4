"""The template: a process that has imported what ranks need, and forks a supervisor a job.

It is small and dull on purpose. It has one thread, has run no parallel operation, and has touched
no GPU, so what it forks is as good as a fresh process; the notebook's kernel is none of that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from typing import NoReturn

from ddp_lab.launcher import processes, supervisor
from ddp_lab.launcher.channel import Channel, ChannelClosed
from ddp_lab.launcher.rank_process import close_descriptors

PRELOAD = ("numpy", "torch", "torch.distributed", "torchvision", "IPython.display", "ddp_lab")
"""What every rank finds imported."""

LATER = ("torchvision.transforms.v2", "torch.nn.parallel", "sklearn.datasets")
"""What it finds imported, too, once the template has had an idle moment."""

_IDLE = 1.0  # s without a job that make such a moment
_LAST_MOMENT = 4.0  # s for supervisors to end once the kernel has gone


def main(control: int, kernel: int) -> NoReturn:
    """Serve the kernel with process id `kernel` until it goes."""
    processes.name_process("ddp-lab template")
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=control))
    template = Template(channel, kernel)
    try:
        template.serve()
    except ChannelClosed:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    template.end()


class Template:
    def __init__(self, channel: Channel, kernel: int) -> None:
        self.channel = channel
        self.kernel = kernel
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.supervisors: set[int] = set()  # process ids of those that run
        self.pastime = self._pass_time()
        self.warm = False

    def serve(self) -> NoReturn:
        watch = processes.watch_process(self.kernel)
        if watch is not None:
            self.selector.register(watch, selectors.EVENT_READ, "kernel")
        began = time.perf_counter()
        for name in PRELOAD:
            self._import(name)
        _remove_scratch_folder()
        self.channel.send(("ready", time.perf_counter() - began))
        pause = _IDLE
        while True:
            idle = not (self.warm or self.supervisors)  # a job's ranks need all the cores
            ready = self.selector.select(pause if idle else None)
            self._bury()
            if ready:
                pause = _IDLE
            elif idle:
                pause = 0.0
                self.warm = next(self.pastime, True)
            for key, _ in ready:
                if key.data == "kernel":
                    raise ChannelClosed
                if key.data == "supervisor":  # it has ended, and was buried above
                    self.selector.unregister(key.fileobj)
                    os.close(key.fd)
                else:
                    self._take_requests()

    def _bury(self) -> None:
        """Collect supervisors that have ended. What one leaves that was killed ends, too."""
        processes.reap()
        ended = self.supervisors - set(processes.children())
        if ended:
            self.supervisors -= ended
            processes.kill_descendants(spare=self.supervisors)

    def end(self) -> NoReturn:
        """Let the supervisors clear up, who see the kernel go, too; then end whatever is left."""
        deadline = time.monotonic() + _LAST_MOMENT
        while self.supervisors and time.monotonic() < deadline:
            self._bury()
            time.sleep(0.002)
        processes.kill_descendants()
        os._exit(0)

    def _pass_time(self) -> Iterator[bool]:
        """Get faster, in small steps between which a job can be taken."""
        for name in LATER:
            with contextlib.suppress(ImportError):
                self._import(name)
            yield False
        gc.collect()
        for _ in processes.merge_pages():
            yield False
        self.channel.send(("warm",))

    def _import(self, name: str) -> None:
        """Import a module, and look now and then whether the kernel has died meanwhile."""

        def look(*_: object) -> None:
            if os.getppid() != self.kernel:
                self.end()

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        try:
            importlib.import_module(name)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _take_requests(self) -> None:
        for _, descriptors in self.channel.receive_available():
            self._fork_supervisor(descriptors[0])
        if self.channel.closed:
            raise ChannelClosed

    def _fork_supervisor(self, descriptor: int) -> None:
        gc.freeze()  # what is here stays shared: no collection in a rank writes to it
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            finalizer.atexit = False  # ours; running them costs each rank 20 ms at its end
        if (pid := os.fork()) == 0:
            code = 70
            try:
                close_descriptors(keep={0, 1, 2, descriptor})
                supervisor.run_job(socket.socket(fileno=descriptor), forks=True)
                code = 0
            except ChannelClosed:
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        os.close(descriptor)
        self.supervisors.add(pid)
        watch = processes.watch_process(pid)
        if watch is not None:
            self.selector.register(watch, selectors.EVENT_READ, "supervisor")


def _remove_scratch_folder() -> None:
    """Remove the folder that torch 2.9 makes when imported, for remote modules.

    It would stay behind, since neither the template nor a killed rank ends as a program does.
    """
    instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
    folder = getattr(instantiator, "_TEMP_DIR", None)
    if folder is not None:
        atexit.unregister(folder.cleanup)
        folder.cleanup()
