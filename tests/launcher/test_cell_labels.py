"""`In[5]` in a message is the cell that the notebook shows under 5, in every kind of client."""

from __future__ import annotations

import pytest

from tests.harness import Kernel

HELPER = "def helper():\n    raise ValueError('planned')"
CALL = "def call():\n    pass\n    helper()\n\nlaunch(call)"
MAGIC = "%%ranks -n 2\nx = 1\nmissing"


def test_labels_are_the_prompts_numbers(kernel: Kernel) -> None:
    helper = kernel.check(HELPER).number
    for _ in range(2):  # run again, the same text has another number
        cell = kernel.run(CALL)
        assert cell.error is not None
        assert cell.error.message.splitlines()[1:3] == [
            f"  In[{cell.number}], line 3, in call:  helper()",
            f"  In[{helper}], line 2, in helper:  raise ValueError('planned')",
        ]


def test_label_of_a_ranks_cell_is_the_prompts_number(kernel: Kernel) -> None:
    kernel.check("%load_ext ddp_lab")
    try:
        for _ in range(2):
            cell = kernel.run(MAGIC)
            assert cell.error is not None
            assert cell.error.message.splitlines()[1] == f"  In[{cell.number}], line 3:  missing"
    finally:
        kernel.check("%ranks --shutdown")


def test_cells_without_numbers_go_by_their_place(cold_kernel: Kernel) -> None:
    """As nbval runs them: every cell has the number 1, and stored messages must still match."""

    def run(source: str) -> str:
        reply = cold_kernel.client.execute_interactive(
            source, store_history=False, timeout=60, output_hook=lambda _: None
        )["content"]
        assert reply["execution_count"] <= 2
        return str(reply.get("evalue", ""))

    for source in ("from ddp_lab import launch", "%load_ext ddp_lab", HELPER):
        assert run(source) == ""
    assert run(CALL).splitlines()[1:3] == [
        "  In[4], line 3, in call:  helper()",
        "  In[3], line 2, in helper:  raise ValueError('planned')",
    ]
    assert run(MAGIC).splitlines()[1] == "  In[5], line 3:  missing"
    assert run("%ranks --shutdown") == ""


@pytest.mark.parametrize("counted", [True, False])
def test_source_goes_with_its_own_cell(cold_kernel: Kernel, counted: bool) -> None:
    """Two cells are never taken for one another, whatever their numbers."""
    evalue = ""
    for source in ("from ddp_lab import launch", HELPER, "y = 1\n" * 9, CALL):
        reply = cold_kernel.client.execute_interactive(
            source, store_history=counted, timeout=60, output_hook=lambda _: None
        )["content"]
        evalue = reply.get("evalue", "")
    assert "raise ValueError('planned')" in evalue
    assert "helper()" in evalue
