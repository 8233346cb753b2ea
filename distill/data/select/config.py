"""Settings of selection: which rows are kept, and by what they are judged."""

from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError

Method = Literal[
    "", "random", "balanced", "entropy", "margin", "loss", "el2n", "forgetting", "aum", "ccs", "k-centre", "facility",
    "mixture", "similarity",
]  # fmt: skip
OUTPUT_SCORES = ("entropy", "margin", "loss")  # of the teacher's answers
DYNAMICS_SCORES = ("el2n", "forgetting", "aum")  # of its own training
VECTOR_METHODS = ("k-centre", "facility", "mixture", "similarity")
LABELLED = ("loss", *DYNAMICS_SCORES)  # methods that need the labels of the rows


@dataclass(frozen=True)
class SelectConfig:
    """Rows that the student is trained on, of all rows that there are after cleaning and augmentation.

    Args:
        method: random; balanced (the same number of each class; for texts without labels, of each class that the
            teacher predicts); by difficulty: entropy, margin or loss of the teacher's predictions, or el2n, forgetting
            or aum from its training; ccs (rows of all difficulties but the hardest); by the teacher's vectors:
            k-centre, facility (facility location), mixture (typical and diverse rows) or similarity (to select.target).
            Empty: all rows.
        share: Share of the rows to keep, above 0 and below 1; or set rows.
        rows: Number of rows that are kept.
        source: The rows to choose from: train, unlabelled, or all. Rows of other parts are all kept.
        prefer: For a difficulty score: keep hard or easy rows.
        score: For ccs: the difficulty score.
        cutoff: For ccs: share of the rows that is left out as too hard.
        vectors: teacher, the mean of the teacher's last hidden states, or embeddings, the mean of its token embeddings,
            which needs no forward pass.
        weight: For mixture: weight of typical rows; diverse ones have 1 - weight.
        target: For similarity: table or text file with texts like those that the student will meet.
        scale_ce: Multiply the weight of ce by the share of rows kept, and add the difference to that of kl.
    """

    method: Method = ""
    share: float = 0.0
    rows: int = 0
    source: Literal["train", "unlabelled", "all"] = "train"
    prefer: Literal["hard", "easy"] = "hard"
    score: Literal["entropy", "margin", "loss", "el2n", "forgetting", "aum"] = "margin"
    cutoff: float = 0.1
    vectors: Literal["teacher", "embeddings"] = "teacher"
    weight: float = 0.5
    target: str = ""
    scale_ce: bool = True

    def __post_init__(self) -> None:
        if not self.method:
            if self.share or self.rows or self.target:
                raise InputError("data.select: expected a method with select.share, rows or target, found none")
            return
        if bool(self.share) == bool(self.rows) or self.rows < 0 or not 0 <= self.share < 1:
            raise InputError(
                f"data.select {self.method}: expected either select.share above 0 and below 1 or select.rows, found "
                f"share {self.share:g} and rows {self.rows}"
            )
        for name in ("cutoff", "weight"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"select.{name}: expected at least 0 and less than 1, found {getattr(self, name):g}")
        if self.needed_score in LABELLED and self.source != "train":
            raise InputError(
                f"data.select {self.method}: expected select.source train, found {self.source}: it needs labels"
            )
        if (self.method == "similarity") != bool(self.target):
            raise InputError(
                f"data.select {self.method}: expected select.target with similarity and only with it, found "
                f"{self.target or 'none'}"
            )

    @property
    def requested(self) -> bool:
        """Whether rows are selected."""
        return bool(self.method)

    @property
    def needed_score(self) -> str:
        """The score that rows are judged by, or the method itself."""
        return self.score if self.method == "ccs" else self.method

    @property
    def needs_dynamics(self) -> bool:
        """Whether the teacher's training has to be recorded."""
        return self.needed_score in DYNAMICS_SCORES

    @property
    def needs_outputs(self) -> bool:
        """Whether the teacher's answers to all rows are needed."""
        return self.needed_score in OUTPUT_SCORES or (self.method == "balanced" and self.source != "train")

    def count_kept(self, rows: int) -> int:
        """Returns how many of `rows` are kept.

        Raises:
            InputError: None would be, or there are no more than those to be kept.
        """
        count = self.rows or round(self.share * rows)
        if not 0 < count < rows:
            raise InputError(
                f"data.select {self.method}: expected to keep at least 1 and fewer than {rows:,} rows of "
                f"{self.source}, found {count:,}"
            )
        return count
