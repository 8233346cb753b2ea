"""When training writes its checkpoints, and at which step it stops after a stop request."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from distill.train.spikes import LossSpikeError
from pipelines.runs import stops
from pipelines.runs.processes import World
from pipelines.runs.strategies.by_layout import find_strategy
from pipelines.runs.training_checkpoint import unwrap_errors

RENAMING = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
STOP_AFTER = "stop/after"  # key in the store


class StopAgreement:
    """Agreement of all processes on the optimizer step after which a requested stop takes effect.

    The first process chooses the step after the one that it has just finished. No other process can have finished that
    step by then, because it needs the first one's share of the gradients.
    """

    def __init__(self, world: World):
        self.world, self.after, self.number = world, -1, 0

    def is_due(self, step: int) -> bool:
        """Returns whether to stop after this optimizer step; every process calls it at the end of each step."""
        if self.world.everyone.size == 1:
            return bool(self._read_request())
        if not self.number and self.world.is_rank_zero and self._read_request():
            self.after = step + 1
            self.world.shared_store.set(STOP_AFTER, json.dumps([self.after, self.number]))
            self.world.shared_store.check([STOP_AFTER])  # returns once the value has been stored
        elif not self.number and self.world.size > 1 and self.world.shared_store.check([STOP_AFTER]):
            self.after, self.number = json.loads(self.world.shared_store.get(STOP_AFTER))
        return bool(self.number) and step >= self.after

    def is_due_now(self) -> bool:
        """Returns whether to stop here, at a point where all processes synchronize."""
        if self.world.is_rank_zero:
            self._read_request()
        self.number = self.world.broadcast(self.number)
        return bool(self.number)

    def _read_request(self) -> int:
        self.number = self.number or int(self.world.everyone.read_stop_request() or 0)
        return self.number


class CheckpointWriter(Callback):
    """Callback that saves every `every` optimizer steps, at the end of each epoch and on a stop request.

    With `from_start` it also saves before the first step.

    Only the last checkpoint is retained. A checkpoint is written to a temporary folder and renamed, and the previous
    one is removed afterwards, so that a kill leaves at least one complete checkpoint. With several processes training
    continues during the writing. Where each machine has its own copy of the output, it has the checkpoint's parts that
    its own processes wrote.
    """

    def __init__(self, folder: Path, every: int, world: World | None = None, *, from_start: bool = False):
        self.folder, self.every, self.saved, self.step, self.from_start = folder, every, -1, -1, from_start
        self.world = world or World()
        self.agreement = StopAgreement(self.world)
        self.stopping = False  # the state is saved; Lightning has yet to finish the batch or epoch
        self.saving: Future[None] | None = None
        self.renaming: Future[None] | None = None

    def __enter__(self) -> None:
        """Does nothing; from the first batch on, stop requests wait for a checkpoint."""

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        """Lets stop requests end the process at once again; training that starts again needs the last checkpoint."""
        stops.allow_stop()
        if kind is LossSpikeError:
            self._wait()

    def find_latest(self) -> str | None:
        """Returns the path of the last complete checkpoint; None if there is none."""
        checkpoints = sorted(self.folder.glob("*.ckpt"))
        return str(checkpoints[-1]) if checkpoints else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes stop requests wait for a checkpoint from here on."""
        if self.world.manages_files:
            self.folder.mkdir(exist_ok=True)  # without parents, so that a removed stage folder isn't recreated
        # The step doesn't change during gradient accumulation; a checkpoint there would lose the gradients so far.
        self.saved = self.step = trainer.global_step
        stops.defer_stop(self.world.everyone.request_stop)
        if self.from_start and trainer.ckpt_path is None:
            self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Stops if a stop is due and the last step is saved."""
        single = self.world.everyone.size == 1
        is_saved = single and self.saved == trainer.global_step
        if self.stopping or is_saved and self.agreement.is_due(self.saved):
            self._stop()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Saves after an optimizer step if a checkpoint or a stop is due."""
        step = trainer.global_step
        # The checkpoint after an epoch's last batch is written below, after the validation.
        last = batch_idx + 1 >= trainer.num_training_batches
        if step != self.step:
            self.step = step
            due = self.agreement.is_due(step)
            self.stopping = due and not last
            if not last and (due or step % self.every == 0):
                self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after the validation, except after the last epoch."""
        self.stopping = self.agreement.is_due_now()
        if self.stopping or trainer.max_epochs is None or trainer.current_epoch + 1 < trainer.max_epochs:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the last checkpoint."""
        self._wait()
        if self.stopping:
            self._stop()

    def _stop(self) -> None:
        """Stops the run after the last checkpoint has been renamed.

        Raises:
            StopRequested: Always.
        """
        self._wait()
        self.world.barrier()
        raise stops.StopRequested(self.agreement.number)

    def _save(self, trainer: Trainer) -> None:
        self._wait()
        if self.world.manages_files and not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} was removed while the training ran")
        self.saved = trainer.global_step
        path = self.folder / f"step-{trainer.global_step:09d}.ckpt"
        partial = path.with_suffix(".partial")
        if self.world.manages_files:
            shutil.rmtree(partial, ignore_errors=True)  # left over from a killed run
        trainer.strategy.barrier()
        trainer.save_checkpoint(partial)
        self.saving = find_strategy(trainer).saving
        if self.world.manages_files and self.saving is not None:
            # Every process's save ends when all processes have written their shards.
            self.renaming = RENAMING.submit(self._rename, self.saving, path)
        if trainer.world_size == 1:
            self._wait()

    def _wait(self) -> None:
        for future in (self.saving, self.renaming):
            if future is not None:
                with unwrap_errors():
                    future.result()

    def _rename(self, saving: Future[None], path: Path) -> None:
        saving.result()
        path.with_suffix(".partial").replace(path)
        for old in self.folder.glob("*.ckpt"):
            if old != path:
                shutil.rmtree(old)
        self.world.publish_files()
