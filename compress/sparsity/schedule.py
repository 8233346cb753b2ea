"""Weight sparsity: the pattern, the score that selects the zeros, and the schedule over the optimizer steps."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError
from compress.prune.schedule import interpolate_cubic

_SCORES = ("magnitude", "movement", "wanda", "sparsegpt")
SCOPES = ("row", "layer", "global")


@dataclass(frozen=True)
class SparsitySchedule:
    """A sparsity pattern, the score that selects the zeros, and the schedule over the optimizer steps.

    Sizes are those of a linear layer's weight [output, input].

    Args:
        pattern: `unstructured`; `N:M`, at most N of every M adjacent inputs stay, such as `2:4`; or `RxC`, blocks of R
            outputs x C inputs that are kept or removed together. `4x1` matches Intel's VNNI kernel: four outputs share
            one input index, and four such blocks fill the instruction's sum over inputs. Papers that write the weight
            transposed call it 1x4.
        amount: Share of the weights that become zero; N:M implies its own, 1 - N/M, and takes none.
        score: Importance of a weight. `magnitude`: |w|. `movement`: -w * gradient summed over the training steps.
            `wanda`: |w| times the norm of its input. `sparsegpt`: the error that remains after the other weights
            compensate for its removal. The last two need calibration data.
        scope: Weights that are ranked together: those of a row, of a layer, or of all layers (`global`). Default: `row`
            for wanda, else `layer`.
        initial: Share of zeros before `begin`.
        begin, end, every: Optimizer steps. The share rises by a cubic from `initial` at `begin` to its final value at
            `end`; the mask changes every `every` steps and at `end`, then no more. Default: all zeros at once.
        rewire: Share of a layer's live weights that are swapped at `begin`, falling to 0 at `end`: every `every` steps
            the smallest are dropped and the positions with the largest gradients grow. 0: the mask isn't rewired.

    Raises:
        CompressError: A value is out of range, or settings contradict each other.

    Source: schedule: Zhu & Gupta 2017 (arXiv 1710.01878), equation 1. Rewiring: Evci et al. 2020, RigL (arXiv
    1911.11134), algorithm 1. 4x1: Shen et al. 2022 (arXiv 2211.07715) and the VNNI kernel's description in
    intel-extension-for-transformers.
    """

    pattern: str = "unstructured"
    amount: float | None = None
    score: Literal["magnitude", "movement", "wanda", "sparsegpt"] = "magnitude"
    scope: Literal["row", "layer", "global"] | None = None
    initial: float = 0.0
    begin: int = 0
    end: int = 0
    every: int = 1
    rewire: float = 0.0

    def __post_init__(self) -> None:
        self._check_pattern()
        self._expect("score", self.score in _SCORES, f"one of {', '.join(_SCORES)}")
        self._expect("scope", self.scope in (None, *SCOPES), f"one of {', '.join(SCOPES)}")
        self._expect(
            "initial",
            0 <= self.initial < self.final_share,
            f"a share from 0 to below {self.final_share:g}, the final share",
        )
        self._expect("begin", self.begin >= 0, "a step from 0")
        self._expect("end", self.end >= self.begin, f"a step from begin, {self.begin}")
        self._expect("every", self.every >= 1, "at least 1")
        self._expect("rewire", 0 <= self.rewire < 1, "a share from 0 to below 1")
        self._check_score()
        if self.rewire:
            self._check_rewiring()

    def _check_pattern(self) -> None:
        expected = "unstructured, N:M such as '2:4' (quoted in YAML, or it is read as a number), or RxC such as '4x1'"
        known = isinstance(self.pattern, str) and re.fullmatch(r"unstructured|\d+:\d+|\d+x\d+", self.pattern)
        self._expect("pattern", bool(known), expected)
        if self.n_m:
            n, m = self.n_m
            self._expect("pattern", 0 < n < m, "N:M with 0 < N < M: otherwise all weights are removed, or none")
            self._expect("amount", self.amount is None, f"none with {self.pattern}, which leaves {n} of {m}")
        else:
            self._expect("pattern", min(self.block) > 0, "blocks of at least 1x1")
            partial = self.amount is not None and 0 < self.amount < 1
            self._expect("amount", partial, "a share between 0 and 1: otherwise all weights are removed, or none")

    def _check_score(self) -> None:
        if self.score == "movement":
            self._expect(
                "end", self.end > self.begin, "a step after begin with movement: its scores accumulate over the steps"
            )
            self._expect("initial", self.initial == 0, "0 with movement: before the first step all scores are equal")
        if self.score == "sparsegpt":
            self._expect(
                "pattern", self.block == (1, 1), "unstructured or N:M with sparsegpt: it has no scores of blocks"
            )
        if self.score in ("wanda", "sparsegpt"):
            self._expect(
                "scope", self.scope != "global", f"row or layer with {self.score}: layers are pruned one after another"
            )

    def _check_rewiring(self) -> None:
        self._expect(
            "rewire", self.score == "magnitude", "0 unless the score is magnitude: rewiring drops the smallest weights"
        )
        self._expect("rewire", self.n_m is None, f"0 with {self.pattern}: regrown weights would violate the pattern")
        self._expect(
            "rewire", self.scope != "row", "0 with scope row: regrown weights would change the number in a row"
        )
        self._expect("initial", self.initial == 0, "0 with rewire: rewiring keeps the number of nonzero weights")
        self._expect(
            "end", self.end > self.begin, "a step after begin with rewire: the swapped share falls to 0 at end"
        )

    def _expect(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise CompressError(f"sparsity.{name}: expected {expected}, found {getattr(self, name)!r}")

    @property
    def n_m(self) -> tuple[int, int] | None:
        """N and M of an N:M pattern, else None."""
        n, colon, m = self.pattern.partition(":")
        return (int(n), int(m)) if colon else None

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs of the blocks that are kept or removed together."""
        sizes = re.fullmatch(r"(\d+)x(\d+)", self.pattern)
        return (int(sizes[1]), int(sizes[2])) if sizes else (1, 1)

    @property
    def divisors(self) -> tuple[int, int]:
        """The numbers that have to divide the outputs and the inputs of a layer."""
        return (1, self.n_m[1]) if self.n_m else self.block

    @property
    def final_share(self) -> float:
        """Share of zeros at the end of the schedule."""
        return 1 - self.n_m[0] / self.n_m[1] if self.n_m else float(self.amount or 0)

    @property
    def ranking_scope(self) -> Literal["row", "layer", "global"]:
        """The scope, with its default resolved."""
        return self.scope or ("row" if self.score == "wanda" else "layer")

    def compute_share(self, step: int) -> float:
        """Returns the scheduled share of zeros after `step` steps."""
        if self.rewire:
            return self.final_share
        return interpolate_cubic(step, self.begin, self.end, self.initial, self.final_share)

    def compute_rewiring_share(self, step: int) -> float:
        """Returns the share of live weights to swap after `step` steps: rewire/2 * (1 + cos(pi * progress))."""
        if not self.begin <= step < self.end:
            return 0.0
        return self.rewire / 2 * (1 + math.cos(math.pi * (step - self.begin) / (self.end - self.begin)))

    def is_due(self, step: int) -> bool:
        """Returns whether the mask changes after `step` steps."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)
