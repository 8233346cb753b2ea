"""A student that is trained by replicas which don't wait for each other in every step."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from lightning.pytorch.callbacks import Callback

from distill.data.batches.data_module import RowsDataModule
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.manifest import LOGS, SCRATCH, JsonObject
from pipelines.runs.processes import World
from pipelines.runs.replicas.averaging import Averaging
from pipelines.runs.replicas.hogwild import SharedCounter, SharedProgress, SharedWeights
from pipelines.runs.replicas.replica import Outcome, Replica, load_result, name_folder
from pipelines.runs.replicas.supervisor import Supervisor, TrainReplica, open_lighthouse
from pipelines.runs.stage import Run
from pipelines.runs.trainer import fit_module, silence_lightning, validate_module
from pipelines.runs.trainer_state import Metrics
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.outer_config import AVERAGED, OuterConfig
from pipelines.settings.plan import RunPlan
from pipelines.stages.train.prepared_training import STUDENT_TRAINING, PreparedTraining

REPLICAS = "replicas"  # folder in the stage's scratch


class ReplicatedTraining(Protocol):
    """The training of a student, which can be sent to another process."""

    @property
    def run(self) -> Run:
        """The run."""

    @property
    def plan(self) -> RunPlan:
        """Its plan."""

    @property
    def precision(self) -> str:
        """Precision of training."""

    def prepare(self, folder: Path) -> PreparedTraining:
        """Returns the student, the same in every process, and what it is trained on."""


def replica_settings(config: DistillConfig) -> JsonObject:
    """Returns the settings of the replicas that the student depends on; empty for a student that has none."""
    if not config.machine.asynchronous:
        return {}
    return {
        "strategy": config.machine.strategy, "replicas": config.machine.devices, "outer": asdict(config.outer)
    }  # fmt: skip


def train_replicas(training: ReplicatedTraining, prepared: PreparedTraining, folder: Path) -> Metrics:
    """Trains the student in several processes, loads the result into it, and returns its validation metrics."""
    run, machine, module = training.run, training.plan.settings.machine, prepared.module
    silence_lightning()
    shared = folder / SCRATCH / REPLICAS
    shared.mkdir(exist_ok=True)
    if machine.asynchronous not in AVERAGED:
        SharedWeights(shared, module).create()
    outcomes = run_replicas(partial(train_replica, training), shared, machine, run.console, [type(training).__module__])
    first = min(outcomes)
    load_result(shared, first, module)
    shutil.copytree(name_folder(shared, first) / LOGS, folder / LOGS, dirs_exist_ok=True)
    metrics = validate_module(module, prepared.texts, machine=machine, precision=training.precision)
    say_outcomes(run.console, outcomes)
    return metrics | {"replicas": len(outcomes), "averagings": outcomes[first]["averagings"]}


def run_replicas(
    train: TrainReplica, shared: Path, machine: MachineConfig, console: Console, preload: Sequence[str] = ()
) -> dict[int, Outcome]:
    """Runs the replicas of a student, and returns the outcomes of those that finished.

    Args:
        train: Trains a replica, in its process.
        shared: Folder for the replicas' files; a run that was killed goes on from them.
        machine: Their number, strategy, restarts and timeout.
        console: Prints failures.
        preload: Modules that `train` needs.
    """
    is_averaged = machine.asynchronous in AVERAGED
    meeting: AbstractContextManager[str] = open_lighthouse(machine.timeout) if is_averaged else nullcontext("")
    with meeting as lighthouse:
        return Supervisor(train, shared, machine, console, lighthouse=lighthouse, preload=preload).run()


def train_replica(training: ReplicatedTraining, replica: Replica) -> None:
    """Trains one replica; runs in its process."""
    run, config = training.run, training.plan.settings
    run.console, run.digests.writes = Console(quiet=True), False  # the command said it already, and writes the index
    prepared = training.prepare(replica.folder)
    job = TrainingJob.from_run(
        run, label=STUDENT_TRAINING, train=prepared.train, machine=config.machine, precision=training.precision
    )
    ReplicaJob(replica, config.outer, job).fit(prepared.module, prepared.texts)


@dataclass(frozen=True)
class ReplicaJob:
    """The training of one replica.

    Args:
        replica: This process.
        outer: How replicas are averaged.
        training: The whole training, which the replicas share.
    """

    replica: Replica
    outer: OuterConfig
    training: TrainingJob

    def fit(self, module: DistillationModule, data: RowsDataModule, callbacks: Sequence[Callback] = ()) -> None:
        """Trains a module on this replica's part of the data, beside the others."""
        folder = self.replica.folder
        if self.training.machine.asynchronous in AVERAGED:
            train, sharing = self.training.train, self.average(data)
        else:
            train, sharing = self.share_weights(module, data)
        (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
        machine = replace(self.training.machine, strategy="", devices=1, restarts=0)
        if self.replica.index:
            machine = replace(machine, wandb="off")
        job = replace(
            self.training,
            train=train,
            machine=machine,
            seed=self.training.seed + self.replica.index,
            wandb_folder=folder / "wandb",
            world=World(),
        )
        fit_module(module, data, folder, job, [*callbacks, sharing])

    def average(self, data: RowsDataModule) -> Callback:
        """Gives this replica its share of every batch, and returns the callback that averages it with the others."""
        data.replica = self.replica.index, self.replica.count
        machine = self.training.machine
        return Averaging(self.replica, machine.strategy, self.outer, machine.timeout)

    def share_weights(self, module: DistillationModule, data: RowsDataModule) -> tuple[TrainConfig, Callback]:
        """Shares the module's weights, and returns the training with a single epoch, of batches that are claimed."""
        shutil.rmtree(self.replica.folder, ignore_errors=True)  # checkpoints would replace the others' newer weights
        SharedWeights(self.replica.shared, module).attach()
        counter, train = SharedCounter(self.replica.shared), self.training.train
        data.claims, data.claimed_epochs, data.claimed_batches = counter, train.epochs, train.accumulate
        data.replica = 0, 1
        return replace(train, epochs=1, checkpoint_every=10**9), SharedProgress(self.replica, counter)


def say_outcomes(console: Console, outcomes: dict[int, Outcome]) -> None:
    """Prints what each replica did."""
    rows = [
        (str(index), str(each["steps"]), f"{each['seconds']:.1f}", str(each["averagings"]),
         f"{each['sent_bytes'] / 1e6:.0f}")
        for index, each in sorted(outcomes.items())
    ]  # fmt: skip
    console.table("Replicas of the student", ("replica", "steps", "seconds", "averagings", "MB averaged"), rows)
