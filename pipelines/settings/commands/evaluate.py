"""Settings of `python -m pipelines.evaluate`."""

from dataclasses import dataclass, field

from compress.export.common.targets import check_installed, parse_formats
from compress.quantize.config import Processor
from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines.settings.commands.distill import MeasureConfig, TaskName
from pipelines.settings.places import check_data, check_local, open_local


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `python -m pipelines.evaluate`.

    Args:
        model: Checkpoint for any supported task: a local folder or a hub id.
        output: Folder that the results are written to.
        teacher: Checkpoint to compare with, a local folder or a hub id; if omitted, only the model is evaluated.
        data: The data set; its test split is scored.
        measure: How speed is measured.
        seed: Seed that selects the timed texts, and the test split if the data set has none.
        task: Task of the model; auto infers it from the model's head, or else from the columns of the data.
        export: Formats, separated by commas, in which the model is scored and timed in addition to PyTorch; a quantized
            model is exported with the integers it was trained with.
        dynamic: Also evaluate ONNX Runtime's dynamic int8 quantization; for float models only.
        processor: Processor that the dynamic int8 model will run on: here, avx2, avx512, vnni or arm, as in
            `pipelines.export`.
    """

    model: str = ""
    output: str = ""
    teacher: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    task: TaskName = "auto"
    export: str = "onnx,onnxruntime"
    dynamic: bool = False
    processor: Processor = "here"

    def __post_init__(self) -> None:
        for name, value in (("model", self.model), ("output", self.output), ("data", self.data.path)):
            if not value:
                raise InputError(f"--{name}: missing; see --help for examples")
        check_local("output", self.output)
        check_processor_used(self.processor, dynamic=self.dynamic)
        check_installed(parse_formats(self.export))


def check_processor_used(processor: Processor, *, dynamic: bool) -> None:
    """Checks that a processor is only named where a dynamic int8 file is made for it.

    Raises:
        InputError: It would be ignored.
    """
    if processor != "here" and not dynamic:
        raise InputError(
            f"--processor {processor}: expected --dynamic with it, found none: no int8 file is made for it"
        )


def check_places(config: EvaluateConfig) -> None:
    """Checks that checkpoints and data given as local paths exist.

    Raises:
        InputError: A path doesn't exist, or isn't a checkpoint.
    """
    if config.teacher:
        open_local(config.teacher, "teacher")
    open_local(config.model, "student" if config.teacher else "model")
    check_data(config.data.path, config.data.subset)
