"""What a run says of a finished stage that it reuses."""

from pathlib import Path

import pytest

from pipelines.runs.console import Console
from pipelines.runs.manifest import OPTIMIZER_BITS
from pipelines.runs.stage import Run


def build_stage(output: Path, metrics: dict[str, float]) -> None:
    run = Run(output, 0, Console())
    run.stage("distill", {"epochs": 1}, {}, lambda folder: metrics, version=1)


@pytest.mark.parametrize("bits", [8.0, None])
def test_a_reused_student_whose_optimizer_states_were_reduced_is_named_with_the_way_to_retrain_it(
    bits, tmp_path, capsys
):
    metrics = {"val/score": 0.9} | ({OPTIMIZER_BITS: bits} if bits else {})
    build_stage(tmp_path / "run", metrics)
    assert "bits" not in capsys.readouterr().out
    build_stage(tmp_path / "run", metrics)
    printed = capsys.readouterr().out
    assert "distill: already complete, skipped" in printed
    remark = "distill: was trained with AdamW's states in 8 bits to fit into machine.memory"
    assert (remark in printed) == bool(bits)
    assert ("remove its folder and run again with more memory or without a limit" in printed) == bool(bits)
