"""When training writes its checkpoints, and at which step it stops after a stop request."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from pipelines.runs import stops
from pipelines.runs.processes import World
from pipelines.runs.training_checkpoint import plain_errors

NAMING = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

STOP_AFTER = "stop/after"  # key in the store


class Agreement:
    """Agreement of all processes on the optimizer step after which a requested stop takes effect.

    The first process chooses the step after the one that it has just finished. No other process can have finished that
    step by then, because it needs the first one's share of the gradients.
    """

    def __init__(self, world: World):
        self.world, self.after, self.number = world, -1, 0

    def due(self, step: int) -> bool:
        """Returns whether to stop after this optimizer step; every process calls it at the end of each step."""
        if self.world.everyone.size == 1:
            return bool(self._asked())
        if not self.number and self.world.is_rank_zero and self._asked():
            self.after = step + 1
            self.world.store.set(STOP_AFTER, json.dumps([self.after, self.number]))
            self.world.store.check([STOP_AFTER])  # returns once the value has been stored
        elif not self.number and self.world.size > 1 and self.world.store.check([STOP_AFTER]):
            self.after, self.number = json.loads(self.world.store.get(STOP_AFTER))
        return bool(self.number) and step >= self.after

    def due_now(self) -> bool:
        """Returns whether to stop here, at a point where all processes synchronize."""
        if self.world.is_rank_zero:
            self._asked()
        self.number = self.world.broadcast(self.number)
        return bool(self.number)

    def _asked(self) -> int:
        self.number = self.number or int(self.world.everyone.stop_asked() or 0)
        return self.number


class Checkpoints(Callback):
    """Callback that saves every `every` optimizer steps, at the end of each epoch and on a stop request.

    Only the last checkpoint is retained. A checkpoint is written to a temporary folder and renamed, and the previous
    one is removed afterwards, so that a kill leaves at least one complete checkpoint. With several processes training
    continues during the writing.
    """

    def __init__(self, folder: Path, every: int, world: World | None = None):
        self.folder, self.every, self.saved, self.step = folder, every, -1, -1
        self.world = world or World()
        self.agreement = Agreement(self.world)
        self.stopping = False  # the state is saved; Lightning has yet to finish the batch or epoch
        self.saving: Future[Any] | None = None
        self.naming: Future[None] | None = None

    def __enter__(self) -> None:
        """Does nothing; from the first batch on, stop requests wait for a checkpoint."""

    def __exit__(self, *failure: Any) -> None:
        stops.release()

    def latest(self) -> str | None:
        found = sorted(self.folder.glob("*.ckpt"))
        return str(found[-1]) if found else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.folder.mkdir(exist_ok=True)  # without parents, so that a removed stage folder isn't recreated
        # The step doesn't change during gradient accumulation; a checkpoint there would lose the gradients so far.
        self.saved = self.step = trainer.global_step
        stops.hold(self.world.everyone.ask_to_stop)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        alone = self.world.everyone.size == 1
        if self.stopping or alone and self.saved == trainer.global_step and self.agreement.due(self.saved):
            self._stop()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        # The checkpoint after an epoch's last batch is written below, after the validation.
        last = batch_idx + 1 >= trainer.num_training_batches
        if step != self.step:
            self.step = step
            due = self.agreement.due(step)
            self.stopping = due and not last
            if not last and (due or step % self.every == 0):
                self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.stopping = self.agreement.due_now()
        if self.stopping or trainer.current_epoch + 1 < trainer.max_epochs:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
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

    def _save(self, trainer: Any) -> None:
        self._wait()
        if trainer.is_global_zero and not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} was removed while the training ran")
        self.saved = trainer.global_step
        path = self.folder / f"step-{trainer.global_step:09d}.ckpt"
        partial = path.with_suffix(".partial")
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)  # left over from a killed run
        trainer.strategy.barrier()
        trainer.save_checkpoint(partial)
        self.saving = trainer.strategy.saving
        if trainer.is_global_zero:
            # The first process's save ends when all processes have written their shards.
            self.naming = NAMING.submit(self._name, self.saving, path)
        if trainer.world_size == 1:
            self._wait()

    def _wait(self) -> None:
        for under_way in (self.saving, self.naming):
            if under_way is not None:
                with plain_errors():
                    under_way.result()

    def _name(self, saving: Future[Any], path: Path) -> None:
        saving.result()
        path.with_suffix(".partial").replace(path)
        for old in self.folder.glob("*.ckpt"):
            if old != path:
                shutil.rmtree(old)
