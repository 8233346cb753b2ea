"""Settings of `python -m pipelines.evaluate`."""

from dataclasses import dataclass, field

from compress.export.common.targets import check_installed, formats_of
from compress.quantize.config import Processor
from distill.data.config import DataConfig
from distill.errors import InputError
from pipelines.settings.distill_config import MeasureConfig, TaskName
from pipelines.settings.places import check_data, check_models


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `python -m pipelines.evaluate`.

    Args:
        model: A checkpoint of any task: a local folder or a hub id.
        output: Folder to write to.
        teacher: A checkpoint to compare with; left out, the model stands alone.
        data: The data set; its test split is scored.
        measure: How speed is measured.
        seed: Seed of the texts that are timed, and of the test split where the data set has none.
        task: What the model is for; auto goes by its head, else by the data's columns.
        export: Formats that it is scored and timed in beside PyTorch; of a quantized one with the integers it was
            trained with.
        dynamic: Also ONNX Runtime's own dynamic int8, of a model in float.
        processor: Where that will run, see `ExportConfig`.
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
        check_installed(formats_of(self.export))


def check_places(config: EvaluateConfig) -> None:
    """
    Raises:
        InputError: A checkpoint or data that is named by a path, and isn't there.
    """
    models = [("student" if config.teacher else "model", config.model)]
    check_models([*([("teacher", config.teacher)] if config.teacher else []), *models])
    check_data(config.data.path, config.data.subset)
