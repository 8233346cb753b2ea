"""The benchmarks of optimizers and of rates: which settings they train with."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.training import rate_control
from benchmarks.training.optimizer_scores import Experiment, Fitted
from distill.data.splits.examples import Examples, Splits
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig


@pytest.mark.parametrize("trained", [False, True])
def test_embeddings_are_frozen_unless_the_command_trains_them(trained: bool, tmp_path: Path, monkeypatch):
    nothing = Examples([])
    options = argparse.Namespace(output=tmp_path, epochs=1, trained_embeddings=trained)
    experiment = Experiment(options, Splits((), nothing, nothing, nothing, nothing, {}), TextClassification(("a", "b")))
    trainings = []

    def fit(train: TrainConfig, seed: int, folder: Path) -> Fitted:
        trainings.append(train)
        return Fitted(0.5, 0.5, 1.0)

    monkeypatch.setattr(experiment, "fit", fit)
    assert experiment.train("lion", 3.0, 0)["rate"] == 3 * TrainConfig(optimizer="lion").choose_rate()
    assert [train.freeze_embeddings for train in trainings] == [not trained]


@pytest.mark.parametrize("case", rate_control.CASES.values(), ids=rate_control.CASES)
def test_the_settings_of_every_training_are_valid(case: rate_control.Case):
    dataclasses.replace(TrainConfig(), **case.changes)


def test_plateau_is_also_compared_in_as_many_epochs():
    assert "epochs" not in rate_control.CASES["rate too high, plateau"].changes


def test_only_the_loss_of_the_outlier_batch_is_multiplied():
    callback, trainer = rate_control.OutlierBatch(1e4), argparse.Namespace(current_epoch=0)
    usual, outlier = ({"labels": torch.tensor([0, 1]), "attention_mask": torch.ones(2, 3)} for _ in range(2))
    callback.on_train_batch_start(trainer, None, usual, rate_control.CORRUPTED_BATCH - 1)
    callback.on_train_batch_start(trainer, None, outlier, rate_control.CORRUPTED_BATCH)
    assert "shares" not in usual
    assert set(outlier["shares"].values()) == {1e4}
