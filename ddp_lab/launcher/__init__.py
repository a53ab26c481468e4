"""Ranks in a notebook: start, watch, stream, stop."""

from ddp_lab.launcher.errors import LaunchError, LaunchTimeoutError, RankFailedError, RankReport
from ddp_lab.launcher.results import Results
from ddp_lab.launcher.world import World, launch

__all__ = [
    "LaunchError",
    "LaunchTimeoutError",
    "RankFailedError",
    "RankReport",
    "Results",
    "World",
    "launch",
]
