"""Where a learner's own `init_process_group(init_method="env://")` meets the other ranks."""

from __future__ import annotations

import importlib
import socket
import sys
from datetime import timedelta
from typing import Any


def serve_store(listener: socket.socket, world_size: int) -> Any:
    """A TCPStore on a socket that is bound to 127.0.0.1 already, for MASTER_ADDR's port.

    TCPStore by itself listens on every interface, whatever host name it is given.
    """
    import torch.distributed as dist

    host, port = listener.getsockname()
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=5),  # without a loopback interface there is no answer
    )


def renew_env_rendezvous() -> None:
    """Let a second `init_process_group(init_method="env://")` not meet the first one's keys."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    dist = sys.modules["torch.distributed"]
    original = rendezvous._rendezvous_handlers["env"]
    uses = 0

    def handler(*args: Any, **kwargs: Any) -> Any:
        nonlocal uses
        for store, rank, world_size in original(*args, **kwargs):
            uses += 1
            yield dist.PrefixStore(f"use-{uses}", store), rank, world_size

    rendezvous._rendezvous_handlers["env"] = handler
