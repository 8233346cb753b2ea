"""Replicas that are averaged every few steps by torchft: local SGD, DiLoCo and streaming DiLoCo.

Each replica trains on its share of every batch. Those that are alive at an averaging take part in it; one that was
restarted takes the weights, the optimizer's states and the step of the others at its first averaging.
"""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distill.train.schedule import set_schedule_step
from pipelines.runs.replicas.replica import Outcome, Replica, list_trained
from pipelines.runs.training_checkpoint import collect_weights
from pipelines.settings.outer_config import OuterConfig

if TYPE_CHECKING:
    from torchft import Manager
    from torchft.local_sgd import DiLoCo, LocalSGD

HOST = "127.0.0.1"  # replicas are processes of one machine


class Fragment(nn.Module):
    """Some of a student's parameters, as torchft expects those that are averaged together."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.parts = nn.ParameterList(parameters)


def split_parameters(parameters: Sequence[nn.Parameter], count: int) -> list[Fragment]:
    """Returns the parameters in at most `count` runs of about the same number of bytes."""
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    whole, taken = sum(each.nbytes for each in parameters), 0
    for parameter in parameters:
        middle = taken + parameter.nbytes / 2
        parts[min(count - 1, int(count * middle / whole))].append(parameter)
        taken += parameter.nbytes
    return [Fragment(part) for part in parts if part]


class Averaging(Callback):
    """Callback that averages this replica with the others.

    Args:
        replica: This process.
        strategy: `local-sgd` (weights are averaged) or `diloco` (changes are, and an outer optimizer applies them).
        outer: How often, and the outer optimizer.
        timeout: Seconds after which an averaging fails; it is repeated with the replicas that are left.
    """

    def __init__(self, replica: Replica, strategy: str, outer: OuterConfig, timeout: float):
        self.replica, self.strategy, self.outer, self.timeout = replica, strategy, outer, timedelta(seconds=timeout)
        self.manager: Manager | None = None
        self.wrapper: LocalSGD | DiLoCo | None = None
        self.saved: dict[str, Any] = {}  # state of a checkpoint, until training starts
        self.total, self.start, self.sent, self.averaged = 0, 0.0, 0, 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves out validation: the others would wait for it."""
        trainer.limit_val_batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the other replicas, and waits for them."""
        self.total = int(trainer.estimated_stepping_batches)
        self.manager = self._join(trainer, pl_module)
        self.wrapper = self._wrap(self.manager, trainer, pl_module)
        self._restore()
        self.wrapper.__enter__()
        self.replica.wait_for_start()
        if self.replica.is_restarted:
            self._average()
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Logs the averagings, and ends a replica that was restarted when the others are at their end."""
        assert self.manager is not None
        self._count(pl_module)
        pl_module.log("train/replicas", float(self.manager.num_participants()))
        pl_module.log("train/averagings", float(self.averaged))
        averagings, rest = divmod(self.total, self.outer.interval)
        if self.averaged >= averagings and self.total - trainer.global_step > rest:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages what was trained since the last averaging, and leaves the others."""
        assert self.wrapper is not None
        assert self.manager is not None
        self._finish_pending()
        if self.total % self.outer.interval or self.outer.fragments > 1:
            for _ in range(self.outer.fragments):
                self._average()
                self._count(pl_module)
        self.wrapper.__exit__(None, None, None)
        self.manager.shutdown(wait=False)
        seconds = time.perf_counter() - self.start
        outcome = Outcome(steps=trainer.global_step, seconds=seconds, averagings=self.averaged, sent_bytes=self.sent)
        self.replica.finish(pl_module, outcome)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the averaging: its number, the steps since, and the outer optimizer's states."""
        if self.manager is None or self.wrapper is None:
            return self.saved
        return {
            "manager": self.manager.state_dict(),
            "step": self.wrapper._local_step,  # noqa: SLF001 - torchft keeps it to itself
            "sent": self.sent,
            "fragments": [save() for name, save in self._state_functions() if name != "default"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps what `state_dict` returned until training starts."""
        self.saved = state_dict

    def _state_functions(self) -> list[tuple[str, Any]]:
        assert self.manager is not None
        return list(self.manager._user_state_dicts.items())  # noqa: SLF001 - what a replica sends to a restarted one

    def _restore(self) -> None:
        assert self.manager is not None
        assert self.wrapper is not None
        if not self.saved:
            return
        self.manager.load_state_dict(self.saved["manager"])
        self.averaged, self.sent = self.manager.current_step(), self.saved["sent"]
        self.wrapper._local_step = self.saved["step"]  # noqa: SLF001 - see `state_dict`
        loads = [
            load
            for name, load in self.manager._load_state_dict_fns.items()  # noqa: SLF001 - see `_state_functions`
            if name != "default"
        ]
        for load, state in zip(loads, self.saved["fragments"], strict=True):
            load(state)

    def _join(self, trainer: Trainer, pl_module: LightningModule) -> "Manager":
        from torch.distributed import TCPStore
        from torchft import Manager, ProcessGroupGloo

        for name in ("torchft.manager", "torchft_quorums", "torchft_commits", "torchft_errors"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=self.timeout),
            load_state_dict=lambda state: load_state(state, trainer, pl_module),
            state_dict=lambda: collect_state(trainer, pl_module),
            min_replica_size=1,
            use_async_quorum=False,  # which torchft requires here
            timeout=self.timeout,
            quorum_timeout=self.timeout,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=store.port,
            lighthouse_addr=self.replica.lighthouse,
            replica_id=f"replica_{self.replica.index}",
            hostname=HOST,
            init_sync=False,  # the same seed gave all the same weights
        )
        manager.store = store  # kept alive as long as the manager
        return manager

    def _wrap(self, manager: "Manager", trainer: Trainer, pl_module: LightningModule) -> "LocalSGD | DiLoCo":
        from torchft.local_sgd import DiLoCo, LocalSGD

        optimizer, outer = trainer.optimizers[0], self.outer
        if self.strategy == "local-sgd":
            return LocalSGD(manager, Fragment(list_trained(pl_module)), optimizer, outer.every)
        fragments = split_parameters(list_trained(pl_module), outer.fragments)
        optimizers = [
            torch.optim.SGD(
                each.parameters(), lr=outer.learning_rate, momentum=outer.momentum, nesterov=outer.momentum > 0
            )
            for each in fragments
        ]
        return DiLoCo(
            manager, cast(list[nn.Module], fragments), optimizer, optimizers, outer.every,
            pin_memory=False, fragment_sync_delay=outer.delay, fragment_update_alpha=outer.mix,
        )  # fmt: skip

    def _count(self, pl_module: LightningModule) -> None:
        """Counts the averagings that this replica contributed to since the last call."""
        assert self.manager is not None
        step = self.manager.current_step()
        if step > self.averaged:
            whole = sum(each.nbytes for each in list_trained(pl_module))
            self.sent += (step - self.averaged) * whole // self.outer.fragments
            self.averaged = step

    def _average(self) -> None:
        """Averages now: all weights, or the part of the student whose turn it is."""
        from torchft.local_sgd import LocalSGD

        assert self.manager is not None
        assert self.wrapper is not None
        if isinstance(self.wrapper, LocalSGD):
            self.wrapper.sync()
            return
        self.manager.start_quorum()
        fragment = self.wrapper._fragments[self.wrapper._current_fragment()]  # noqa: SLF001 - out of its turn
        fragment.prepare_sync()
        fragment.perform_sync()
        self.wrapper._local_step = 0  # noqa: SLF001 - see `state_dict`

    def _finish_pending(self) -> None:
        """Ends the averaging that training was to go on beside."""
        for fragment in getattr(self.wrapper, "_fragments", ()):
            if fragment._allreduce_work:  # noqa: SLF001 - torchft has no other sign of it
                fragment.perform_sync()


def collect_state(trainer: Trainer, module: nn.Module) -> dict[str, Any]:
    """Returns what a restarted replica takes from another one."""
    schedule = cast(LambdaLR, trainer.lr_scheduler_configs[0].scheduler)
    return {
        "weights": collect_weights(module),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": schedule.last_epoch,
    }


def load_state(state: dict[str, Any], trainer: Trainer, module: nn.Module) -> None:
    """Gives this replica the weights, the optimizer's states and the learning rate of another one."""
    weights: dict[str, Tensor] = state["weights"]
    with torch.no_grad():
        for name, tensor in collect_weights(module).items():
            tensor.copy_(weights[name])
    trainer.optimizers[0].load_state_dict(state["optimizer"])
    schedule = cast(LambdaLR, trainer.lr_scheduler_configs[0].scheduler)
    set_schedule_step(schedule, state["schedule"])
