"""Plans of runs without models on disk, for tests of what reads only a part of a plan."""

from pathlib import Path

from transformers import BertConfig

from distill.checkpoint.checkpoint import Checkpoint
from distill.losses.config import LayerSizes
from distill.parallel.layout import Layout
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.layouts import Layouts
from pipelines.settings.plan import RunPlan

ONE_PROCESS = Layouts(Layout(), Layout(), Layout())
SIZES = LayerSizes(4, 32, 4)


def plan_of(settings: DistillConfig, layouts: Layouts = ONE_PROCESS, folder: Path = Path("teacher")) -> RunPlan:
    """Returns a plan with a checkpoint that isn't opened, and a student that is built from it."""
    teacher = Checkpoint(settings.teacher.model, "teacher", folder, {"model_type": "bert"})
    return RunPlan(settings, "", teacher, (), None, BertConfig(), SIZES, SIZES, layouts)
