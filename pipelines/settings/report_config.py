"""Settings of `python -m pipelines.report`."""

from dataclasses import dataclass, field

from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines.settings.distill_config import MeasureConfig, TaskName


@dataclass(frozen=True)
class ReportConfig:
    """Settings of `python -m pipelines.report`.

    Args:
        run: Folder of a finished run, whose page and card are drawn again; nothing is measured.
        charts: With --run: also write each chart as an SVG file into `charts/` of the run's folder.
        model: Or a checkpoint to evaluate and report on.
        output: Folder to write to (with --model).
        teacher: A checkpoint to compare the model with.
        data: The data set; its test split is scored.
        measure: How speed is measured.
        seed: Seed of the texts that are timed.
        task: What the model is for; auto goes by its head, else by the data's columns.
    """

    run: str | None = None
    charts: bool = False
    model: str = ""
    output: str = ""
    teacher: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    task: TaskName = "auto"

    def __post_init__(self) -> None:
        others = [name for name in ("model", "output", "teacher") if getattr(self, name)]
        others += ["data"] * bool(self.data.path)
        if self.run is not None and others:
            raise InputError(
                f"--run: expected no --{others[0]} beside it, found one: a finished run is drawn again from its own "
                "numbers, and nothing is measured"
            )
        if self.charts and self.run is None:
            raise InputError("--charts: expected --run beside it, found none: only a finished run's charts are drawn")
