"""The number of this machine among those that a run was started on."""

import pytest

from pipelines.runs.processes import find_machine


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, (2, 4)),
        # torchrun says so itself, also where machines have different numbers of processes
        (
            {"RANK": "2", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            (1, 2),
        ),
    ],
)
def test_a_machine_is_numbered_by_its_processes(variables, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_machine() == expected
