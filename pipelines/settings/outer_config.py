"""Settings of replicas that train on their own and are averaged from time to time."""

from dataclasses import dataclass

from distill.errors import InputError

AVERAGED = ("local-sgd", "diloco")  # strategies whose replicas are averaged
ASYNCHRONOUS = (*AVERAGED, "hogwild")


@dataclass(frozen=True)
class OuterConfig:
    """How replicas that train independently are averaged.

    Args:
        every: Optimizer steps of a replica between two averagings, at least 1.
        learning_rate: Learning rate of diloco's outer optimizer (SGD with Nesterov momentum on the averaged change);
            above 0.
        momentum: Momentum of that optimizer, from 0 to less than 1.
        fragments: Number of parts of the student that are averaged in turn, each once in `every` steps, so that less is
            sent at a time (streaming DiLoCo); must divide `every`.
        delay: Steps that a replica goes on training while a part is being averaged; less than `every` over `fragments`.
        mix: Share of a replica's own weights in a part after its averaging, from 0 to 1.
    """

    every: int = 50
    learning_rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("every", "fragments"):
            if getattr(self, name) < 1:
                raise InputError(f"outer.{name}: expected at least 1, found {getattr(self, name)}")
        if self.learning_rate <= 0:
            raise InputError(f"outer.learning_rate: expected more than 0, found {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"outer.momentum: expected 0 or more and less than 1, found {self.momentum}")
        if not 0 <= self.mix <= 1:
            raise InputError(f"outer.mix: expected 0 to 1, found {self.mix}")
        if self.every % self.fragments:
            raise InputError(
                f"outer.every {self.every}: expected a multiple of outer.fragments {self.fragments}: each part is "
                "averaged once in that many steps"
            )
        if not 0 <= self.delay < self.interval:
            raise InputError(
                f"outer.delay: expected 0 or more and less than the {self.interval} steps between two averagings, "
                f"found {self.delay}"
            )

    @property
    def interval(self) -> int:
        """Optimizer steps between the averagings of one part and of the next."""
        return self.every // self.fragments
