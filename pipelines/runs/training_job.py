"""How one training of a run is carried out: its settings, and the processes and the console that it has."""

from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from distill.parallel.layout import Layout
from distill.train.config import TrainConfig
from pipelines.runs.console import Console
from pipelines.runs.processes import World
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import MachineConfig

SINGLE_PROCESS = Layout()


@dataclass(frozen=True)
class TrainingJob:
    """How a module is trained, apart from the module, its data and the folder of its stage.

    Args:
        label: Names the training in messages and logs.
        train: Settings of the training.
        machine: Settings of the machine.
        precision: Name of the precision, a mode of `compress.measure.precision_modes`.
        seed: Of the random numbers of each batch and of the range test.
        console: Shows the progress.
        wandb_folder: Where Weights & Biases keeps its files.
        layout: How the student is divided among the processes.
        mesh: Processes that a sharded student is on.
        world: The processes that train together.
    """

    label: str
    train: TrainConfig
    machine: MachineConfig
    precision: str
    seed: int
    console: Console
    wandb_folder: Path
    layout: Layout = SINGLE_PROCESS
    mesh: DeviceMesh | None = None
    world: World = field(default_factory=World)

    @classmethod
    def from_run(
        cls,
        run: Run,
        *,
        label: str,
        train: TrainConfig,
        machine: MachineConfig,
        precision: str,
        layout: Layout = SINGLE_PROCESS,
        mesh: DeviceMesh | None = None,
    ) -> "TrainingJob":
        """Returns a training with the seed, the console and all processes of a run."""
        return cls(
            label=label,
            train=train,
            machine=machine,
            precision=precision,
            seed=run.seed,
            console=run.console,
            wandb_folder=run.output / "wandb",
            layout=layout,
            mesh=mesh,
            world=run.world,
        )
