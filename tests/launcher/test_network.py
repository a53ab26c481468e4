"""Nothing that a launch opens listens beyond loopback, whatever the host is called."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness import run_script

SCRIPT = """\
import json, os, socket, subprocess, sys

def listing():
    \"\"\"(process id, address) of all that listens on TCP, as `ss -ltnp` shows it.\"\"\"
    import re
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 5) for line in shown.splitlines()]
    return [(int(pid), row[3].rpartition(":")[0]) for row in rows if len(row) > 5
            for pid in re.findall(r"pid=(\\d+)", row[5])]

def work(kernel):
    import psutil, torch
    import torch.distributed as dist

    def look():
        dist.all_reduce(torch.ones(1))
        found = listing() if dist.get_rank() == 0 else None
        dist.barrier()
        return found

    found = {"at first": look()}
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    dist.all_reduce(torch.ones(1), group=pair)
    found["after new_group"] = look()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    found["after env://"] = look()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    dist.all_reduce(torch.ones(1), group=pair)
    found["after env:// and new_group"] = look()
    family = [kernel, *(p.pid for p in psutil.Process(kernel).children(recursive=True))]
    dist.barrier()
    return found, family, os.getpid(), os.getppid()

if __name__ == "__main__":
    if sys.argv[1]:
        socket.sethostname(sys.argv[1])
    from ddp_lab import launch
    results = launch(work, os.getpid(), nproc_per_node=4, output="quiet", timeout=60)
    (found, family, _, supervisor), ranks = results[0], [result[2] for result in results]
    json.dump({"found": found, "family": family, "ranks": ranks, "supervisor": supervisor,
               "host": socket.gethostname()}, open(sys.argv[0] + ".json", "w"))
"""


def namespace(*options: str) -> list[str]:
    """`unshare` with these options; a user of its own where we are not root."""
    command = ["unshare", *options]
    for prefix in (command, [*command, "--map-root-user"]):
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    pytest.skip("this system lets nobody have a host name of their own")


HOSTS = ["", "192.0.2.2", "192.0.2.2 on an interface"]


@pytest.mark.parametrize("host", HOSTS)
def test_listeners(tmp_path: Path, host: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), host.split(" ")[0]]
    if host == HOSTS[1]:
        command = [*namespace("--uts"), *command]
    elif host == HOSTS[2]:  # gloo could bind to that address if it wanted to
        network = "ip link set lo up && ip address add 192.0.2.2/32 dev lo && exec"
        command = [*namespace("--uts", "--net"), "sh", "-c", f'{network} "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "script.py.json").read_text())
    assert seen["host"] == host.split(" ")[0] or not host

    assert {*seen["ranks"], seen["supervisor"]} <= set(seen["family"])
    for when, rows in seen["found"].items():
        ours = [(pid, address) for pid, address in rows if pid in seen["family"]]
        # Each rank's gloo listens, and so does the store; else we would look at the wrong ones.
        assert {pid for pid, _ in ours} == {*seen["ranks"], seen["supervisor"]}, when
        for pid, address in ours:
            assert address != "*", f"{when} process {pid} listens everywhere"
            host = address.strip("[]").partition("%")[0]
            assert ipaddress.ip_address(host).is_loopback, f"{when} {pid} listens on {address}"


def test_control_data_passes_over_no_port() -> None:
    """What the launcher unpickles comes over socket pairs: nobody listens but gloo and the store,
    and the notebook and the template have no socket of a network at all."""
    source = """\
        import os
        import psutil
        from ddp_lab import launch
        from ddp_lab.launcher import client

        def look():
            sockets = psutil.Process(os.getppid()).net_connections("inet")
            listening = {tuple(s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN}
            return listening, int(os.environ["MASTER_PORT"])

        listening, port = launch(look, nproc_per_node=1, output="quiet")[0]
        assert listening == {("127.0.0.1", port)}, listening
        assert not psutil.Process(client.template().process.pid).net_connections("inet")
        assert not psutil.Process().net_connections("inet")"""
    done = run_script(textwrap.dedent(source))
    assert done.returncode == 0, done.stderr
