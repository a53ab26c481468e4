"""Kernels to launch from, and the check after each test that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Kernel, Traces, assert_nothing_new


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test: no process but one template, no socket, shared memory or file is left."""
    before = Traces.now()
    yield
    assert_nothing_new(before)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A warm kernel that the tests of a module share."""
    kernel = Kernel()
    kernel.warm_up()
    yield kernel
    kernel.shutdown()


@pytest.fixture
def own_kernel() -> Iterator[Kernel]:
    """A kernel that the test may kill, with the launcher imported and its template warming up."""
    kernel = Kernel()
    kernel.prepare()
    yield kernel
    kernel.shutdown()


@pytest.fixture
def cold_kernel() -> Iterator[Kernel]:
    """A kernel in which nothing was imported yet."""
    kernel = Kernel()
    yield kernel
    kernel.shutdown()
