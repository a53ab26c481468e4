"""Which backend a job gets: NCCL where each rank can have a GPU, else gloo."""

from __future__ import annotations

import os
import subprocess
import sys

from ddp_lab.launcher.options import Options


class Refused(Exception):
    """The job cannot be had on this machine; the text says what to write instead."""


def choose_backend(options: Options, environment: dict[str, str]) -> str:
    """The backend that "auto" stands for here. Raises Refused when "nccl" cannot be had."""
    if options.backend == "gloo":
        return "gloo"
    gpus = count_gpus(environment)
    if gpus >= options.world_size:
        return "nccl"
    if options.backend == "auto":
        return "gloo"
    raise Refused(
        f"backend='nccl' needs a GPU for each of the {options.world_size} ranks, and this machine "
        f"offers {gpus}: write backend='gloo', or leave backend out"
    )


def count_gpus(environment: dict[str, str]) -> int:
    """GPUs that NCCL could use, counted in a child: whoever asks CUDA cannot fork any more."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))):
        return 0
    program = (
        "import sys, torch, torch.distributed as dist; "
        "sys.exit(torch.cuda.device_count() if dist.is_nccl_available() else 0)"
    )
    if "torch" not in sys.modules:
        return subprocess.run([sys.executable, "-c", program], env=environment).returncode
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.environ.clear()
            os.environ.update(environment)
            exec(program)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
