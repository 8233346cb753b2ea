"""Configuration of weight sparsity: pattern, score and training schedule."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError

SCORES = ("magnitude", "movement", "wanda", "sparsegpt")
SCOPES = ("row", "layer", "global")


@dataclass(frozen=True)
class Sparsity:
    """A sparsity pattern, the score that selects the zeros, and the training schedule.

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
        start: Share of zeros before `begin`.
        begin, end, every: Optimizer steps. The share rises by a cubic from `start` at `begin` to its final value at
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
    start: float = 0.0
    begin: int = 0
    end: int = 0
    every: int = 1
    rewire: float = 0.0

    def __post_init__(self) -> None:
        self._check_pattern()
        self._expect("score", self.score in SCORES, f"one of {', '.join(SCORES)}")
        self._expect("scope", self.scope in (None, *SCOPES), f"one of {', '.join(SCOPES)}")
        self._expect("start", 0 <= self.start < self.share, f"a share from 0 to below {self.share:g}, the last one")
        self._expect("begin", self.begin >= 0, "a step from 0")
        self._expect("end", self.end >= self.begin, f"a step from begin, {self.begin}")
        self._expect("every", self.every >= 1, "at least 1")
        self._expect("rewire", 0 <= self.rewire < 1, "a share from 0 to below 1")
        self._check_score()
        if self.rewire:
            self._check_rewiring()

    def _check_pattern(self) -> None:
        wanted = "unstructured, N:M such as '2:4' (quoted in YAML, or it is read as a number), or RxC such as '4x1'"
        known = isinstance(self.pattern, str) and re.fullmatch(r"unstructured|\d+:\d+|\d+x\d+", self.pattern)
        self._expect("pattern", bool(known), wanted)
        if self.n_m:
            n, m = self.n_m
            self._expect("pattern", 0 < n < m, "N:M with 0 < N < M: else all weights go, or none")
            self._expect("amount", self.amount is None, f"none with {self.pattern}, which leaves {n} of {m}")
        else:
            self._expect("pattern", min(self.block) > 0, "blocks of at least 1x1")
            given = self.amount is not None and 0 < self.amount < 1
            self._expect("amount", given, "a share between 0 and 1: else no weight goes, or none stays")

    def _check_score(self) -> None:
        if self.score == "movement":
            self._expect("end", self.end > self.begin, "a step after begin: movement's scores start at 0 and must grow")
            self._expect(
                "start", self.start == 0, "0 with movement: before the first step no score tells weights apart"
            )
        if self.score == "sparsegpt":
            self._expect("pattern", self.block == (1, 1), "single weights or N:M with sparsegpt: it has no block score")
        if self.score in ("wanda", "sparsegpt"):
            self._expect("scope", self.scope != "global", f"row or layer with {self.score}: layers are done in turn")

    def _check_rewiring(self) -> None:
        self._expect("rewire", self.score == "magnitude", "0 with another score than magnitude, which drops by size")
        self._expect("rewire", self.n_m is None, f"0 with {self.pattern}: growth would break the groups")
        self._expect("rewire", self.scope != "row", "0 with scope row: growth would change how many a row has")
        self._expect("rewire", self.start == 0, "0 with start: rewiring keeps the number of weights")
        self._expect("end", self.end > self.begin, "a step after begin, where rewiring has come down to nothing")

    def _expect(self, name: str, good: bool, wanted: str) -> None:
        if not good:
            raise CompressError(f"sparsity.{name}: expected {wanted}, found {getattr(self, name)!r}")

    @property
    def n_m(self) -> tuple[int, int] | None:
        """N and M of an N:M pattern, else None."""
        n, colon, m = self.pattern.partition(":")
        return (int(n), int(m)) if colon else None

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs of the blocks that are kept or removed together."""
        found = re.fullmatch(r"(\d+)x(\d+)", self.pattern)
        return (int(found[1]), int(found[2])) if found else (1, 1)

    @property
    def share(self) -> float:
        """Final share of zeros."""
        return 1 - self.n_m[0] / self.n_m[1] if self.n_m else float(self.amount or 0)

    @property
    def compared(self) -> Literal["row", "layer", "global"]:
        """The scope, with its default resolved."""
        return self.scope or ("row" if self.score == "wanda" else "layer")

    def share_at(self, step: int) -> float:
        """Returns the scheduled share of zeros after `step` steps."""
        if self.rewire or step >= self.end:
            return self.share
        if step < self.begin:
            return self.start
        left = 1 - (step - self.begin) / (self.end - self.begin)
        return self.share + (self.start - self.share) * left**3

    def rewired_at(self, step: int) -> float:
        """Returns the share of live weights to swap after `step` steps: rewire/2 * (1 + cos(pi * progress))."""
        if not self.begin <= step < self.end:
            return 0.0
        return self.rewire / 2 * (1 + math.cos(math.pi * (step - self.begin) / (self.end - self.begin)))

    def is_due(self, step: int) -> bool:
        """Returns whether the mask changes after `step` steps."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)
