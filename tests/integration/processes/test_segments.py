"""Language models trained on processes with segments of the same rows equal those trained on one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.losses.config import LossConfig
from support.processes.ranks import run_ranks
from support.processes.segment_training import TRAIN, SegmentJob, save_models, train_jobs

KL = LossConfig(kl=1, ce=0, temperature=1.0)
# Adam scales the gradients of key biases, which are rounding errors, to full steps.
SLOW = replace(TRAIN, learning_rate=2e-4)
FUSED = ("labels", "sampled", "chat-labels", "by-tokens")  # their loss is computed without all logits
DROPPED = SegmentJob("dropped", loss=LossConfig(kl=1, ce=0.5), train=replace(TRAIN, dropout=0.1, checkpoint_every=2))
JOBS = [
    SegmentJob("labels"),
    SegmentJob("sampled", loss=KL, cached="sampled"),
    SegmentJob("topk", loss=replace(KL, ce=0.5), cached="topk"),
    SegmentJob("logits", loss=replace(KL, ce=0.5, temperature=2.0), cached="logits"),
    SegmentJob("online", loss=LossConfig(kl=1, ce=0.5, temperature=2.0)),
    SegmentJob("online-hidden", loss=LossConfig(kl=1, hidden=0.3, temperature=2.0)),
    SegmentJob("learned-map", loss=LossConfig(kl=1, hidden=0.3, layer_map="learned", temperature=2.0)),
    SegmentJob("chat-labels", "chat"),
    SegmentJob("chat-online", "chat", LossConfig(kl=1, ce=0.5)),
    SegmentJob("packed", "packed", LossConfig(kl=1, ce=0.5)),
    SegmentJob("masked", "masked", LossConfig(kl=1, ce=0.5), cached="logits", train=SLOW),
    SegmentJob("masked-online", "masked", LossConfig(kl=1), train=SLOW),
    SegmentJob("checkpointed", loss=LossConfig(kl=1, ce=0.5), train=replace(TRAIN, checkpointing="full")),
    SegmentJob("by-tokens", train=replace(TRAIN, batch_tokens=90)),
]
FEW = [job for job in JOBS if job.name in ("labels", "sampled", "online", "chat-labels", "packed", "masked")]
OTHERS = [job for job in JOBS if job not in FEW]
FOUR = [job for job in JOBS if job.name in ("sampled", "online", "learned-map", "chat-online", "packed", "masked")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def single_process(models, tmp_path_factory) -> dict[str, Any]:
    return train_jobs(0, 1, models, tmp_path_factory.mktemp("alone"), FOUR, "replicated")


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-5)
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [FEW, OTHERS], ids=["few", "others"])
def test_segments_train_the_student_of_one_process(jobs, models, tmp_path):
    single_process = train_jobs(0, 1, models, tmp_path / "alone", jobs, "replicated")
    parallel = run_ranks(train_jobs, 2, 2, models, tmp_path / "together", jobs, "cp=2", limit=400)
    for name in (job.name for job in jobs):
        for found in parallel:
            check_equal(found[name], single_process[name])
        weights = (each[name]["weights"].values() for each in parallel)
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True)), name
        assert single_process[name]["fused"] is parallel[0][name]["fused"] is (True if name in FUSED else None), name


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_same_bits(models, tmp_path):
    whole = run_ranks(train_jobs, 2, 2, models, tmp_path / "whole", [DROPPED], "cp=2", limit=240)
    for stop in (3, 2, None):
        job = replace(DROPPED, stop=stop)
        results = run_ranks(train_jobs, 2, 2, models, tmp_path / "stopped", [job], "cp=2", limit=240)
        assert stop is None or all(each["dropped"] == {} for each in results)
        (tmp_path / "stopped" / "dropped.world").unlink()
    for resumed, expected in zip(results, whole, strict=True):
        weights = resumed["dropped"]["weights"]
        assert all(torch.equal(weights[name], value) for name, value in expected["dropped"]["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=2,cp=2", "fsdp=2,cp=2", "cp=4"])
def test_segments_and_shares_of_rows_train_the_student_of_one_process(layout, models, single_process, tmp_path):
    jobs = [job for job in FOUR if layout != "cp=4" or job.rows == "masked"]  # four heads, of which two have keys
    for found in run_ranks(train_jobs, 4, 4, models, tmp_path, jobs, layout, limit=500):
        for job in jobs:
            check_equal(found[job.name], single_process[job.name])


@pytest.mark.slow
def test_replicas_of_shards_with_segments_train_the_student_of_one_process(models, single_process, tmp_path):
    job = next(job for job in JOBS if job.name == "online")
    for found in run_ranks(train_jobs, 8, 8, models, tmp_path, [job], "hsdp=2x2,cp=2", limit=500):
        check_equal(found["online"], single_process["online"])
