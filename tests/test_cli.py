"""What a user sees of the `ddp-lab` command."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
import websocket
from nbformat.v4 import new_code_cell, new_notebook
from typer.testing import CliRunner

from ddp_lab import doctor, notebooks
from ddp_lab.cli import app
from ddp_lab.launcher import limits

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-for-tests"
PAIRS = [("--version", "ddp-lab 0.1.0"), ("--help", "doctor"), ("lab --help", "JupyterLab")]


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


# Help and version


@pytest.mark.parametrize(("arguments", "expected"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_help_and_version(arguments: str, expected: str) -> None:
    done = run(*arguments.split())
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("ddp-lab")
    assert subprocess.check_output([script, "--version"], text=True).startswith("ddp-lab ")


def test_every_command_has_a_line_of_help_that_is_not_cut() -> None:
    text = run("--help", env={**os.environ, "COLUMNS": "80"}).stdout
    for command in ("doctor", "lab", "validate", "execute"):
        assert re.search(rf"^  {command} +\w.*\.$", text, re.MULTILINE), text
    assert "..." not in text.partition("Commands:")[2]


def test_help_imports_neither_torch_nor_jupyter() -> None:
    """They take seconds, and help is what a newcomer asks for first."""
    code = """
        import sys
        from ddp_lab.cli import app
        try:
            app(["--help"])
        except SystemExit:
            slow = {"torch", "numpy", "jupyterlab", "nbformat", "nbclient", "IPython"}
            print("imported:", slow & set(sys.modules))
    """
    text = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    assert text.endswith("imported: set()\n")


def test_no_command_shows_help_and_a_wrong_one_says_so() -> None:
    nothing = run()
    assert "Usage: ddp-lab " in nothing.stdout + nothing.stderr
    assert "Commands:" in nothing.stdout + nothing.stderr
    wrong = run("vaildate")
    assert wrong.returncode == 2
    assert "No such command 'vaildate'" in wrong.stderr


# Doctor


def test_doctor_reports_and_launches() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split("  ")[0] for line in done.stdout.splitlines() if line[0] != " "]
    expected = ["ddp-lab", "cores", "memory", "torch", "GPUs", "JupyterLab", "notebooks"]
    assert [name for name in names if name != "/dev/shm"] == [*expected, "launcher", "test launch"]
    assert re.search(r"^test launch +2 ranks, all_reduce: \d+\.\d\d s", done.stdout, re.MULTILINE)
    assert done.stderr == ""


def test_doctor_fails_when_ranks_cannot_start(monkeypatch) -> None:
    monkeypatch.setenv("DDP_LAB_START", "teleport")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert re.search(r"^test launch +failed: ValueError: .*teleport", done.output, re.MULTILINE)


def test_doctor_fails_when_ranks_answer_wrongly(monkeypatch) -> None:
    monkeypatch.setattr("ddp_lab.launch", lambda *args, **options: [1.0, 1.0])
    monkeypatch.setattr("ddp_lab.launcher.client.wait_until_warm", lambda: None)
    finding = doctor.test_launch()
    assert finding.fatal
    assert "[1.0, 1.0]" in finding.value


def test_doctor_advises_where_something_is_missing(monkeypatch, tmp_path: Path) -> None:
    missing = doctor._packages("notebooks", ["nbformat", "no_such_package"])
    assert missing.value.endswith("no_such_package missing")
    assert missing.advice == "pip install no_such_package"
    assert doctor.shared_memory(tmp_path / "none").value == "none on this system"
    usage = doctor.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    assert "--shm-size" in doctor.shared_memory(tmp_path).advice
    monkeypatch.setenv("DDP_LAB_START", "spawn")
    assert doctor.launcher().value.startswith("spawns ranks")


def test_doctor_names_gpus_and_what_they_speak(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "H200")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert re.fullmatch(r"2 x H200, CUDA .*, NCCL 2\.30\.7", doctor.gpus().value)
    assert doctor.launcher().value.endswith("NCCL for up to 2 ranks, gloo for more")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert "without NCCL" in doctor.gpus().advice


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5, []),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, []),
        (
            {
                "proc/self/cgroup": "0::/a",
                "sys/fs/cgroup/a/memory.max": "max",
                "sys/fs/cgroup/memory.max": "4096",
            },
            None,
            [4096],
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "75000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192",
            },
            0.75,
            [8192],
        ),
        ({}, None, []),
    ],
    ids=["v2 quota of a parent", "v2 no quota", "v2 memory", "v1 in a container", "none"],
)
def test_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], cores: float | None, memory: list[int]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    affinity = float(len(os.sched_getaffinity(0)))
    assert limits.usable_cores(tmp_path) == (affinity if cores is None else cores)
    assert limits.memory_limits(tmp_path) == memory


# Validate and execute


@pytest.mark.parametrize("command", ["validate", "execute"])
def test_a_missing_notebook_is_named(command: str, tmp_path: Path) -> None:
    done = run(command, str(tmp_path / "missing.ipynb"))
    assert done.returncode == 2
    assert done.stderr == f"ddp-lab: There is no notebook {tmp_path / 'missing.ipynb'}\n"


def test_execute_stores_what_it_can_and_says_what_failed(tmp_path: Path) -> None:
    for name, source in (("bad.ipynb", "1 / 0"), ("good.ipynb", "6 * 7")):
        nbformat.write(new_notebook(cells=[new_code_cell(source)]), tmp_path / name)
    done = run("execute", "bad.ipynb", "good.ipynb", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "bad.ipynb failed, left as it was\ngood.ipynb stored\n"
    assert "ZeroDivisionError" in done.stderr
    assert "'42'" in str(nbformat.read(tmp_path / "good.ipynb", as_version=4).cells[0].outputs)
    assert not nbformat.read(tmp_path / "bad.ipynb", as_version=4).cells[0].outputs


# Lab


def test_lab_opens_the_first_lesson_from_anywhere_in_the_course(monkeypatch) -> None:
    monkeypatch.chdir(ROOT / "tests")
    command = notebooks.lab_command()
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={ROOT}" in command
    assert "--LabApp.default_url=/lab/tree/lessons/00_launcher.ipynb" in command
    assert ("--allow-root" in command) == (os.geteuid() == 0)


def test_lab_passes_options_on_and_opens_other_paths(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    options = ["--no-browser", "--port", "8890"]
    assert notebooks.lab_command(options)[-3:] == options
    (tmp_path / "my notes.ipynb").touch()
    command = notebooks.lab_command([str(tmp_path / "my notes.ipynb"), *options])
    assert command[-3:] == options
    assert str(tmp_path / "my notes.ipynb") not in command
    assert f"--ServerApp.root_dir={tmp_path}" in command
    assert "--LabApp.default_url=/lab/tree/my%20notes.ipynb" in command
    assert "--LabApp.default_url=/lab/tree/tests" in notebooks.lab_command(["tests"])
    done = run("lab", str(tmp_path / "missing.ipynb"))
    assert done.returncode == 2
    assert "There is no" in done.stderr


@contextmanager
def jupyter_server(command: list[str], log: Path, **variables: str) -> Iterator[str]:
    """A server started by a command; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    env = os.environ | {f"JUPYTER_{name}_DIR": str(log.parent) for name in ("CONFIG", "RUNTIME")}
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *options, f"--IdentityProvider.token={TOKEN}"],
            env=env | variables,
            stdout=file,
            stderr=file,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                urllib.request.urlopen(f"{address}/login", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        server.terminate()  # SIGTERM: Jupyter shuts its kernels down
        psutil.wait_procs(family, timeout=20)
        for process in family:
            if process.is_running():
                process.kill()
        server.wait()


def run_cell(address: str, source: str) -> tuple[str, str]:
    """stdout and stderr of a cell in a new kernel, as a browser on that server receives them."""
    login = {"Authorization": f"token {TOKEN}"}
    request = urllib.request.Request(f"{address}/api/kernels", b'{"name": "python3"}', login)
    with urllib.request.urlopen(request, timeout=60) as response:
        kernel = json.load(response)["id"]
    url = f"{address.replace('http', 'ws')}/api/kernels/{kernel}/channels?session_id=test"
    connection = websocket.create_connection(url, timeout=120, header=login)
    text = {"stdout": [], "stderr": []}
    try:
        header = {"msg_id": "cell", "msg_type": "execute_request", "version": "5.3"}
        header |= {"session": "test", "username": "", "date": ""}
        content = {"code": source, "silent": False, "store_history": False, "allow_stdin": False}
        parts = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        connection.send(json.dumps({**parts, "channel": "shell", "buffers": []}))
        while True:
            message = json.loads(connection.recv())
            ours = message["parent_header"].get("msg_id") == "cell"
            content = message["content"]
            if message["msg_type"] == "stream":  # the server's own complaint has no parent
                text[content["name"]].append(content["text"])
            elif ours and content.get("execution_state") == "idle":
                return "".join(text["stdout"]), "".join(text["stderr"])
    finally:
        connection.close()


LOUD = """
from ddp_lab import launch

def shout():
    for line in range(25_000):
        print(f"{line:06d} " + "x" * 73)

_ = launch(shout, nproc_per_node=4)
"""


def test_lab_lets_100_000_lines_of_4_ranks_through(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddp_lab", "lab"]
    with jupyter_server(command, tmp_path / "log") as address:
        text, errors = run_cell(address, LOUD)
    assert errors == ""
    lines = [line for line in text.splitlines() if line.startswith("[rank ")]
    assert len(lines) == 100_000
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert own == [f"[rank {rank}] {line:06d} " + "x" * 73 for line in range(25_000)]


def test_without_raised_limits_lines_are_lost(tmp_path: Path) -> None:
    """The test above would pass for nothing if Jupyter's defaults let that much through."""
    command = [word for word in notebooks.lab_command() if "rate_limit" not in word]
    with jupyter_server(command, tmp_path / "log") as address:
        text, errors = run_cell(address, LOUD)
    assert "rate exceeded" in errors
    assert len(text.splitlines()) < 100_000
