"""What all tests share: a clean environment of their own, and repeats for the soak."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest

# PYTHONUNBUFFERED hides bugs in how output is buffered; the others would change what is tested.
for _name in ("PYTHONUNBUFFERED", "DDP_LAB_OUTPUT", "DDP_LAB_START"):
    os.environ.pop(_name, None)

# Every process that a test starts inherits this, whoever its parent becomes later.
os.environ["DDP_LAB_TESTS"] = uuid.uuid4().hex

# Programs that tests run elsewhere import the course from here, installed or not.
_path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _path))

_folder = Path(tempfile.mkdtemp(prefix="ddp-lab-tests-"))
for _name, _sub in (("TMPDIR", "tmp"), ("JUPYTER_RUNTIME_DIR", "run"), ("IPYTHONDIR", "ipython")):
    (_folder / _sub).mkdir()
    os.environ[_name] = str(_folder / _sub)


def pytest_unconfigure() -> None:
    shutil.rmtree(_folder, ignore_errors=True)


@pytest.fixture
def repeat(request: pytest.FixtureRequest) -> int:
    """How often this test has run before in the same session."""
    return getattr(request, "param", 0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked `soak` DDP_LAB_REPEAT times (`make soak`), once by default."""
    times = int(os.environ.get("DDP_LAB_REPEAT") or 1)
    if times > 1 and metafunc.definition.get_closest_marker("soak"):
        if "repeat" not in metafunc.fixturenames:
            metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(times), indirect=True)
