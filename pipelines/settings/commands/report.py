"""Settings of `python -m pipelines.report`."""

from dataclasses import dataclass, field

from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines.settings.commands.distill import MeasureConfig, TaskName
from pipelines.settings.places import check_local


@dataclass(frozen=True)
class ReportConfig:
    """Settings of `python -m pipelines.report`.

    Args:
        run: Folder of a finished run whose report page is drawn again from its stored results; nothing is measured.
        charts: With --run: also write each chart as an SVG file to `charts/` in the run's folder.
        model: Checkpoint to evaluate and report on instead of a run: a local folder or a hub id.
        output: Folder that the report is written to; only with --model.
        teacher: Checkpoint to compare the model with: a local folder or a hub id.
        data: The data set; its test split is scored.
        measure: How speed is measured.
        seed: Seed that selects the timed texts, and the test split if the data set has none.
        task: Task of the model; auto infers it from the model's head, or else from the columns of the data.
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
        check_local("output", self.output)
        others = [name for name in ("model", "output", "teacher") if getattr(self, name)]
        others += ["data"] * bool(self.data.path) + ["measure"] * (self.measure != MeasureConfig())
        others += ["seed"] * bool(self.seed) + ["task"] * (self.task != "auto")
        if self.run is not None and others:
            raise InputError(
                f"--run: expected no --{others[0]} with it, found some: a finished run is drawn again from its own "
                "numbers, and nothing is measured"
            )
        if self.charts and self.run is None:
            raise InputError("--charts: expected --run with it, found none: only a finished run's charts are drawn")
