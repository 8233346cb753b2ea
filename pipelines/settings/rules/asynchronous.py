"""Invalid combinations of settings with asynchronous replicas of a student: hogwild, local-sgd and diloco."""

import importlib.util
from collections.abc import Iterator

from distill.errors import InputError
from distill.student.spec import read_norm
from distill.train.config import AUTO
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.outer_config import AVERAGED, OuterConfig

PRECISIONS = ("32", "bf16-mixed")


def check_asynchronous(f: Facts) -> None:
    """Checks the settings of a run with an asynchronous strategy.

    Raises:
        InputError: A setting can't be used with it, torchft isn't installed, or `outer` would be ignored.
    """
    s, strategy = f.settings, f.settings.machine.asynchronous
    check_ignored_outer(s)
    if not strategy:
        return
    for name, found, expected in list_conflicts(f):
        raise InputError(f"{name}: expected {expected} with machine.strategy {strategy}, found {found}")
    if strategy in AVERAGED and importlib.util.find_spec("torchft") is None:
        raise InputError(
            f"machine.strategy {strategy}: torchft isn't installed: pip install -e '.[torchft]', or use layout "
            "replicated, which needs nothing"
        )


def check_ignored_outer(s: DistillConfig) -> None:
    """Checks that the settings of averaging have an effect.

    Raises:
        InputError: They differ from the defaults, and the strategy doesn't read them.
    """
    strategy = s.machine.strategy
    read = {"local-sgd": OuterConfig(every=s.outer.every), "diloco": s.outer}.get(strategy, OuterConfig())
    if s.outer != read:
        known = "outer.every alone" if strategy == "local-sgd" else "the defaults"
        raise InputError(
            f"outer: expected {known} with machine.strategy {strategy or 'unset'}, found {s.outer}; the rest is for "
            "diloco"
        )


def list_conflicts(f: Facts) -> Iterator[tuple[str, object, str]]:
    """Yields (setting, what was found, what is expected) for each setting that replicas apart can't be trained with."""
    s, train = f.settings, f.settings.train
    is_wild = s.machine.asynchronous == "hogwild"
    compression = s.machine.gradient_compression
    yield from (
        (name, found, expected)
        for name, found, expected, is_rejected in (
            ("machine.devices", s.machine.devices, "2 or more", s.machine.devices < 2),
            ("processes", f.processes, "a command that starts the replicas itself, not torchrun,", f.processes > 1),
            ("teacher.processes", s.teacher.processes, "0", s.teacher.processes),
            ("student.layout", s.student.layout, "auto", s.student.layout not in (AUTO, "replicated")),
            ("teacher.layout", s.teacher.layout, "auto", s.teacher.layout not in (AUTO, "replicated")),
            ("machine.accelerator", s.machine.accelerator, "cpu", is_wild and s.machine.accelerator != "cpu"),
            ("machine.gradient_compression", compression, "none", compression != "none"),
            ("machine.rank_speeds", s.machine.rank_speeds, "none", s.machine.rank_speeds),
            ("machine.memory", s.machine.memory, "none", s.machine.memory),
            ("train.batch_size", train.batch_size, "a number", train.batch_size == AUTO),
            ("train.checkpointing", AUTO, "none, selective, full or every=K", train.checkpointing == AUTO),
            ("train.batch_growth", train.batch_growth, "none", train.batch_growth != "none"),
            ("train.patience", train.patience, "0", train.patience),
            ("train.recoveries", train.recoveries, "0", train.recoveries),
            ("train.schedule", train.schedule, "another schedule", train.schedule in ("plateau", "find")),
            ("train.optimizer", train.optimizer, "another optimizer", train.optimizer == "schedule-free"),
            ("train.ema_decay", train.ema_decay, "0", train.ema_decay),
            ("sampling.by", s.sampling.by, "uniform", s.sampling.by != "uniform"),
            ("on_policy.share", s.on_policy.share, "0", s.on_policy.share),
            ("loss.balance_every", s.loss.balance_every, "0", s.loss.balance_every),
            ("loss.ramps", s.loss.ramps, "none", is_wild and s.loss.ramps),
            ("sparsity", "a schedule of zeros", "none", s.sparsity.requested),
            ("student", s.student.spec, "no norm=batchnorm", read_norm(s.student.spec) == "batchnorm"),
        )
        if is_rejected
    )


def check_replica_precision(f: Facts) -> None:
    """Checks the precision of a run with an asynchronous strategy; `auto` is resolved by then.

    Raises:
        InputError: It isn't one of `PRECISIONS`.
    """
    strategy = f.settings.machine.asynchronous
    if strategy and f.precision not in PRECISIONS:
        raise InputError(
            f"machine.precision {f.precision}: expected {' or '.join(PRECISIONS)} with machine.strategy {strategy}: "
            "weights in other formats can't be averaged or shared"
        )
