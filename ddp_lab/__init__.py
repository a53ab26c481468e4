"""ddp-lab: distributed training made visible, from a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ddp_lab.launcher import LaunchError, LaunchTimeoutError, RankFailedError, World, launch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["LaunchError", "LaunchTimeoutError", "RankFailedError", "World", "launch"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext ddp_lab` gives the magic `%%ranks`."""
    from ddp_lab.launcher.magic import RanksMagics

    shell.register_magics(RanksMagics)


def _inside_kernel() -> bool:
    """Is this process the kernel of a notebook?"""
    if "ipykernel" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


if _inside_kernel():
    from ddp_lab.launcher import client

    client.warm_up()
