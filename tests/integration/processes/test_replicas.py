"""Replicas of a student in processes of their own: averaged, with shared weights, killed, restarted and resumed."""

import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertTokenizerFast

from distill.data.batches.data_module import TextDataModule
from distill.losses.config import LossConfig
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.replicas.hogwild import SharedCounter, SharedWeights
from pipelines.runs.replicas.replica import Replica, load_result
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from pipelines.settings.outer_config import OuterConfig
from pipelines.stages.train.replicas import ReplicaJob, run_replicas
from support.processes.forking import fork_server
from support.processes.training_ranks import Training, splits, train
from support.run_outputs import weights_that_differ
from support.tiny_models import saved

ROWS, NEAR = 40, 1e-5  # rows of the training data; of weights
PLAIN = TrainConfig(
    epochs=3, batch_size=8, optimizer="sgd", learning_rate=0.05, max_grad_norm=0, dropout=0.0, schedule="linear",
    checkpoint_every=2,
)  # fmt: skip
STEPS = PLAIN.epochs * ROWS // PLAIN.batch_size


@dataclass(frozen=True)
class ReplicaTraining:
    """Trains a tiny student as one of two replicas; kills replica 1 after the step `dies_after`, once."""

    student: Path
    machine: MachineConfig
    outer: OuterConfig = field(default_factory=OuterConfig)
    train: TrainConfig = PLAIN
    dies_after: int = 0

    def __call__(self, replica: Replica) -> None:
        torch.set_num_threads(1)
        module, data = self.build()
        death = Death(self.dies_after, replica.shared / "died") if self.dies_after and replica.index == 1 else None
        job = TrainingJob(
            label="student", train=self.train, machine=self.machine, precision="32", seed=0,
            console=Console(quiet=True), wandb_folder=replica.folder,
        )  # fmt: skip
        ReplicaJob(replica, self.outer, job).fit(module, data, [death] if death else [])

    def build(self) -> tuple[DistillationModule, TextDataModule]:
        lightning.seed_everything(0, verbose=False)
        student = AutoModelForSequenceClassification.from_pretrained(self.student)
        module = DistillationModule(student, loss=LossConfig(kl=0, ce=1), train=self.train)
        tokenizer = BertTokenizerFast.from_pretrained(self.student)
        return module, TextDataModule(splits(), tokenizer, batch_size=self.train.batch_size, max_length=32)

    def run(self, shared: Path) -> tuple[dict[int, dict], dict[str, Tensor]]:
        """Returns the outcomes of the replicas and the weights of the first."""
        shared.mkdir(exist_ok=True)
        module, _ = self.build()
        if self.machine.strategy == "hogwild":
            SharedWeights(shared, module).create()
        outcomes = run_replicas(self, shared, self.machine, Console(quiet=True))
        load_result(shared, min(outcomes), module)
        return outcomes, weights_of(module)


class Death(Callback):
    """Kills its process once, after a step."""

    def __init__(self, step: int, flag: Path):
        self.step, self.flag = step, flag

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def weights_of(module: DistillationModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.student.state_dict().items()}


def build_machine(strategy: str, **more) -> MachineConfig:
    return MachineConfig(accelerator="cpu", devices=2, threads=1, strategy=strategy, timeout=60, **more)


@pytest.fixture(scope="module")
def student(tmp_path_factory, tokenizer, tiny_model) -> Path:
    fork_server()  # the replicas' processes are forked from the tests' own server, which has imported everything
    return saved(tiny_model("bert", num_hidden_layers=2), tokenizer, tmp_path_factory.mktemp("student") / "model")


def test_replicas_averaged_after_every_step_are_the_student_of_one_process(student, tmp_path):
    job = ReplicaTraining(student, build_machine("local-sgd"), OuterConfig(every=1))
    outcomes, found = job.run(tmp_path / "averaged")
    alone = train(0, 1, Training(student, tmp_path / "alone", train=PLAIN), "replicated")["weights"]
    assert [each["steps"] for each in outcomes.values()] == [STEPS, STEPS]
    assert [each["averagings"] for each in outcomes.values()] == [STEPS, STEPS]
    assert weights_that_differ(found, alone, NEAR) == {}


@pytest.mark.slow
def test_an_outer_rate_of_one_without_momentum_is_plain_averaging(student, tmp_path):
    _, plain = ReplicaTraining(student, build_machine("local-sgd"), OuterConfig(every=4)).run(tmp_path / "plain")
    outer = OuterConfig(every=4, learning_rate=1.0, momentum=0.0)
    _, found = ReplicaTraining(student, build_machine("diloco"), outer).run(tmp_path / "outer")
    started = weights_of(ReplicaTraining(student, build_machine("diloco")).build()[0])
    assert weights_that_differ(found, plain, NEAR) == {}
    assert weights_that_differ(found, started, 100 * NEAR)


@pytest.mark.slow
def test_fragments_are_averaged_in_turns(student, tmp_path):
    outer = OuterConfig(every=4, fragments=2, delay=1)
    outcomes, found = ReplicaTraining(student, build_machine("diloco"), outer).run(tmp_path / "parts")
    module, _ = ReplicaTraining(student, build_machine("diloco")).build()
    started = weights_of(module)
    load_result(tmp_path / "parts", 1, module)
    # The last one that training went on beside, and both parts at the end.
    assert {each["averagings"] for each in outcomes.values()} == {STEPS // 2 + 1 + 2}
    assert weights_that_differ(found, weights_of(module), 0) == {}
    assert weights_that_differ(found, started, 100 * NEAR)


def test_processes_with_shared_weights_claim_every_batch_once(student, tmp_path):
    job = ReplicaTraining(student, build_machine("hogwild"))
    outcomes, found = job.run(tmp_path / "shared")
    assert sum(each["steps"] for each in outcomes.values()) == STEPS
    assert SharedCounter(tmp_path / "shared").read() >= STEPS
    alone = train(0, 1, Training(student, tmp_path / "alone", train=PLAIN), "replicated")["weights"]
    started = weights_of(job.build()[0])
    changes = [torch.cat([(each[name] - started[name]).flatten() for name in started]) for each in (found, alone)]
    assert torch.cosine_similarity(*changes, dim=0) > 0.4  # 0 for unrelated changes


@pytest.mark.slow
def test_a_killed_replica_is_left_out_and_joins_again(student, tmp_path, capfd):
    job = ReplicaTraining(
        student, build_machine("local-sgd", restarts=1), OuterConfig(every=3), replace(PLAIN, epochs=60), dies_after=20
    )
    shared = tmp_path / "killed"
    outcomes, found = job.run(shared)
    assert sorted(outcomes) == [0, 1]
    module, _ = job.build()
    load_result(shared, 1, module)
    assert weights_that_differ(found, weights_of(module), 0) == {}
    assert outcomes[0]["averagings"] == outcomes[1]["averagings"]


@pytest.mark.slow
def test_the_others_finish_without_a_replica_that_is_not_restarted(student, tmp_path):
    job = ReplicaTraining(student, build_machine("local-sgd"), OuterConfig(every=3), dies_after=7)
    outcomes, _ = job.run(tmp_path / "left")
    assert list(outcomes) == [0]
    assert outcomes[0]["steps"] == STEPS


@pytest.mark.slow
def test_shared_weights_survive_the_end_of_all_processes(student, tmp_path):
    job = ReplicaTraining(student, build_machine("hogwild"), train=replace(PLAIN, epochs=20))
    shared = tmp_path / "shared"
    shared.mkdir()
    SharedWeights(shared, job.build()[0]).create()
    counter = SharedCounter(shared)
    for _ in range(10):  # claimed by processes that were killed
        counter.take()
    outcomes, _ = job.run(shared)
    assert sum(each["steps"] for each in outcomes.values()) == 20 * ROWS // PLAIN.batch_size - 10
