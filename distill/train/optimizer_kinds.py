"""Names of the optimizers that `train.optimizer` chooses from, without importing torch."""

import difflib
from dataclasses import dataclass
from importlib.util import find_spec

from distill.errors import InputError

ADAMW_RATE = 1e-4  # a usual peak rate of AdamW in distillation and fine-tuning


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer before it is built.

    Args:
        rate: Its usual peak learning rate as a multiple of AdamW's.
        decay: Its usual weight decay; 0 if it adds the decay to a gradient that it then divides by its own size.
        package: Name of the package that has it; empty is torch or Stillroom itself.
        whole: Whether it needs whole parameters, not shards of them: it can't train a sharded student.
        zero1: Whether its states can be divided among replicas (ZeRO-1).
        stochastic: Whether it can round its updates of bfloat16 weights stochastically.
    """

    rate: float = 1.0
    decay: float = 0.01
    package: str = ""
    whole: bool = False
    zero1: bool = True
    stochastic: bool = False


OPTIMIZERS = {
    "adamw": OptimizerKind(stochastic=True),
    "adam": OptimizerKind(decay=0),
    "sgd": OptimizerKind(rate=100),
    "adagrad": OptimizerKind(rate=10, decay=0),
    "adadelta": OptimizerKind(rate=5000, decay=0),
    "rmsprop": OptimizerKind(rate=0.5, decay=0),
    "adamax": OptimizerKind(rate=2, decay=0),
    "nadam": OptimizerKind(),
    "radam": OptimizerKind(rate=2),
    "adafactor": OptimizerKind(rate=30, whole=True),
    "muon": OptimizerKind(whole=True),
    "apollo": OptimizerKind(whole=True),
    "lamb": OptimizerKind(rate=20, package="pytorch-optimizer", whole=True),
    "lion": OptimizerKind(rate=0.2, package="pytorch-optimizer"),
    "soap": OptimizerKind(rate=3, package="pytorch-optimizer", whole=True, zero1=False),
    "schedule-free": OptimizerKind(rate=3, package="pytorch-optimizer", zero1=False),
    "adamw-8bit": OptimizerKind(package="torchao", whole=True, zero1=False, stochastic=True),
    "adamw-4bit": OptimizerKind(package="torchao", whole=True, zero1=False, stochastic=True),
    "adamw-fp8": OptimizerKind(package="torchao", whole=True, zero1=False, stochastic=True),
}


def check_optimizer_package(name: str, setting: str) -> None:
    """Checks that the package of an optimizer is installed.

    Raises:
        InputError: It isn't.
    """
    package = OPTIMIZERS[name].package
    if package and find_spec(package.replace("-", "_")) is None:
        raise InputError(
            f"{setting} {name}: expected the package {package}, found none; install it with pip install '.[optimizers]'"
        )


def check_optimizer_name(name: str, setting: str) -> None:
    """Checks that an optimizer of this name exists.

    Raises:
        InputError: There is none; the message contains the nearest name.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1, cutoff=0)
        raise InputError(f"{setting}: expected {', '.join(OPTIMIZERS)}, found {name!r}; did you mean {near[0]}?")
