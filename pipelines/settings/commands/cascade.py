"""Settings of `python -m pipelines.cascade`."""

from dataclasses import dataclass, field

from compress.quantize.config import Processor
from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines.settings.commands.distill import MeasureConfig, TaskName
from pipelines.settings.commands.evaluate import EvaluateConfig, check_processor_used
from pipelines.settings.places import check_data, check_local, open_local
from pipelines.settings.values import expand_home

TEACHER_ROLE = "teacher"
# Names of the results and inputs beside the members, and of an argument of numpy.savez, which stores their logits.
TAKEN_NAMES = {TEACHER_ROLE, "cascade", "data", "answers", "file"}


@dataclass(frozen=True)
class CascadeConfig:
    """Settings of `python -m pipelines.cascade`.

    Args:
        models: Checkpoints of two or more students with the same labels, separated by commas: local folders or hub ids.
            At most three become members; the others are measured for comparison.
        output: Folder that the results are written to.
        min_score_share: Minimum share of the teacher's score on the validation split (without a teacher, of the best
            student's), such as 0.99, at which mean latency is minimized.
        latency_ms: Maximum mean latency per text in milliseconds, at which the score is maximized; instead of
            `min_score_share`.
        teacher: Checkpoint to compare with: a local folder or a hub id.
        data: The data set: thresholds are chosen on its validation split, on which no student may have been trained,
            and the cascade is scored on its test split.
        measure: How speed is measured: `texts` texts, one per call; `interval`, `seconds` and `batch` have no effect.
        seed: Seed that selects the timed texts, and the splits that the data set lacks.
        task: text-classification or multi-label; auto infers it from the first model's head, or else from the data.
        dynamic: Use ONNX Runtime's dynamic int8 quantization for students that aren't quantized.
        processor: Processor that dynamic int8 students will run on: here, avx2, avx512, vnni or arm, as in
            `pipelines.export`.
    """

    models: str = ""
    output: str = ""
    min_score_share: float = 0.0
    latency_ms: float = 0.0
    teacher: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    measure: MeasureConfig = field(default_factory=lambda: MeasureConfig(texts=256, rounds=10))
    seed: int = 0
    task: TaskName = "auto"
    dynamic: bool = False
    processor: Processor = "here"

    def __post_init__(self) -> None:
        for name, value in (("models", self.models), ("output", self.output), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        check_local("output", self.output)
        check_processor_used(self.processor, dynamic=self.dynamic)
        if len(self.names) < 2:
            raise InputError(
                f"models: expected two or more checkpoints separated by commas, found {self.models!r}: a cascade hands "
                "texts from one to another"
            )
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"models: expected different checkpoints, found {twice!r} twice; remove one of them")
        if bool(self.min_score_share) == bool(self.latency_ms):
            found = "both" if self.min_score_share else "neither"
            raise InputError(
                f"cascade: expected --min-score-share or --latency-ms, found {found}: one of score and latency is "
                "bounded, the other made as good as it gets"
            )
        if not 0 <= self.min_score_share <= 1:
            raise InputError(
                f"min_score_share: expected a share from 0 to 1 of the teacher's score, found {self.min_score_share:g}"
            )
        if self.latency_ms < 0:
            raise InputError(f"latency_ms: expected more than 0, found {self.latency_ms:g}")

    @property
    def names(self) -> list[str]:
        """The checkpoints of the students."""
        return [expand_home("models", name.strip()) for name in self.models.split(",") if name.strip()]

    @property
    def evaluation(self) -> EvaluateConfig:
        """The same settings for the export of the students."""
        return EvaluateConfig(
            model=self.names[0],
            output=self.output,
            teacher=self.teacher,
            data=self.data,
            measure=self.measure,
            seed=self.seed,
            task=self.task,
            export="onnxruntime",
            dynamic=self.dynamic,
            processor=self.processor,
        )


def check_cascade_places(config: CascadeConfig) -> None:
    """Checks that checkpoints and data given as local paths exist.

    Raises:
        InputError: A path doesn't exist, or isn't a checkpoint.
    """
    if config.teacher:
        open_local(config.teacher, TEACHER_ROLE)
    for role, name in name_members(config.names).items():
        open_local(name, role)
    check_data(config.data.path, config.data.subset)


def name_members(models: list[str]) -> dict[str, str]:
    """Returns name -> checkpoint: the last part of each path, with as many parts before it as make all different.

    For example `runs/a/student` and `runs/b/student` become `a-student` and `b-student`.
    """
    paths = [[part for part in model.split("/") if part not in ("", ".", "..")] or ["model"] for model in models]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["-".join(path[-length:]) for path in paths]
        if len(set(names)) == len(models) and not TAKEN_NAMES & set(names):
            return dict(zip(names, models, strict=True))
    return {f"student-{number}": model for number, model in enumerate(models, 1)}
