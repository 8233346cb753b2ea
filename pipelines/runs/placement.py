"""Places a model on the processes of a run: built once, then loaded by each process in shards."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import WEIGHTS, export_huggingface
from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.custom_models import register_custom_classes
from distill.checkpoint.sentence_folder import write_form
from distill.models.sentence_encoder import PooledModel
from distill.parallel.apply import reshard
from distill.parallel.layout import Layout
from distill.parallel.load import load_sharded
from distill.parallel.mesh import build_mesh
from distill.parallel.part_times import measure_part_times
from distill.parallel.pipeline import PipelineTrainer
from distill.parallel.pipeline_stage import PartTimes, find_boundary, get_boundary, load_stage
from distill.parallel.segment_check import check_segments
from pipelines.runs.files import replace_folder
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.processes import World
from pipelines.runs.stage import Run
from pipelines.runs.training_checkpoint import collect_untied, is_rank_zero

INITIAL = "initial"


def build_placed_model(
    run: Run,
    layout: Layout,
    folder: Path,
    build: Callable[[], PreTrainedModel],
    auto_class: AutoClass,
    *,
    precision: str,
    offload: bool = False,
    prefetch: int = 1,
    timed: tuple[int, int] | None = None,
) -> tuple[PreTrainedModel, DeviceMesh | None]:
    """Returns the model built by `build()` in the given layout, and its mesh; every process of the run calls it.

    The first process alone builds the model, and stores it in the stage's scratch folder for a restarted run.

    Args:
        run: The run that the model is trained in.
        layout: Layout on the run's processes.
        folder: Folder of the stage.
        build: Builds the model.
        auto_class: A transformers auto class that fits the model.
        precision: Precision of training, see `find_gather_policy`.
        offload, prefetch: See `apply_layout`.
        timed: Rows and tokens of a micro-batch with which the time of the model's parts is measured; layers are divided
            among pipeline stages by it. None: by their parameters.
    """
    if layout.processes == 1:
        return build(), None
    initial = folder / SCRATCH / INITIAL
    if run.world.is_rank_zero and not initial.exists():
        with replace_folder(initial) as fresh:
            build().save_pretrained(fresh)
    run.world.share_files(initial)
    mesh = build_mesh(layout, detect_device_type())
    times = measure_times(run, initial, auto_class, timed) if timed is not None and layout.pp > 1 else None
    model = load_in_layout(
        initial, auto_class, layout, mesh, precision=precision, offload=offload, prefetch=prefetch, times=times
    )
    if times is not None:
        layers = ", ".join(str(len(stage)) for stage in find_boundary(model).stages)
        run.console.say(f"  pipeline stages of {layers} layers, by the time of {describe_times(times)}")
    return model, mesh


def measure_times(run: Run, folder: Path, auto_class: AutoClass, timed: tuple[int, int]) -> PartTimes:
    """Returns the time of a model's parts as the first process measures it; every process calls it."""
    times: list[float] | None = None
    if run.world.is_rank_zero:
        device = torch.device(detect_device_type())
        times = list(measure_part_times(AutoConfig.from_pretrained(folder), auto_class, *timed, device))
    return PartTimes(*run.world.broadcast(times))


def describe_times(times: PartTimes) -> str:
    """Returns the measured times as text."""
    before, layer, after = (f"{1000 * each:.1f} ms" for each in times)
    return f"a layer, {layer}, of what runs before them, {before}, and after them, {after}"


def detect_device_type() -> str:
    """Returns the type of the devices that sharded models are on: cuda, or cpu if there is no GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_gather_policy(precision: str) -> MixedPrecisionPolicy | None:
    """Returns FSDP's policy for a training precision; None gathers the weights as they are stored, in float32.

    With `bf16-mixed` the shards, their gradients and the optimizer states stay float32 and the gathered copies are
    bfloat16: half the bytes to send and to hold. Hidden states are rounded to bfloat16 between layers, which autocast
    on one process doesn't do. With `16-mixed` they could overflow there, so that its gathers stay float32.

    Source: torch.distributed.fsdp.MixedPrecisionPolicy, with the dtypes of torchtitan.
    """
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16-mixed" else None


def load_in_layout(
    folder: Path,
    auto_class: AutoClass,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    precision: str = "32",
    frozen: bool = False,
    offload: bool = False,
    prefetch: int = 1,
    times: PartTimes | None = None,
) -> PreTrainedModel:
    """Returns this process's shards of a checkpoint, in eval mode.

    A frozen model with precision `32` computes bit-identical outputs to an unsharded one, but for segments of rows.

    Raises:
        InputError: The model can't have the layout; for segments, also if its logits differ from those of whole rows.
    """
    register_custom_classes(folder)
    if layout.pp > 1:
        stage = load_stage(folder, auto_class, mesh.get_local_rank("pp"), layout.pp, times=times)
        stage.requires_grad_(not frozen)
        stage.to(detect_device_type())  # type: ignore[arg-type]  # transformers' stub lacks names of devices
        return stage
    model = load_sharded(
        folder,
        auto_class,
        layout,
        mesh,
        frozen=frozen,
        exact=frozen,
        policy=find_gather_policy(precision),
        offload=offload,
        prefetch=prefetch,
    )
    if layout.cp > 1:
        check_segments(model, mesh.get_group("cp"))
        reshard(model)
    return model


def build_pipeline_trainer(stage: PreTrainedModel, layout: Layout, mesh: DeviceMesh | None) -> PipelineTrainer | None:
    """Returns the trainer of a pipeline-parallel model; None for other layouts."""
    if mesh is None or layout.pp == 1:
        return None
    return PipelineTrainer(stage, mesh.get_group("pp"), replicas=mesh.get_group("dp"))


class PartsWriter(HuggingFaceStorageWriter):
    """Writes the parts of each process, which are merged later, when the first process sees the files of all."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Leaves the parts as they are."""

    def merge(self) -> None:
        """Merges the parts; the first process calls it."""
        super().finish(Metadata({}), [])


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, world: World) -> None:
    """Writes a stock checkpoint of a model in any layout; every process calls it.

    If weights are sharded, each process writes its shards, which are merged on disk, so that no process holds all
    weights.
    """
    reshard(model)  # after an evaluation the weights are still gathered, and the model appears unsharded
    if get_boundary(model) is None and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if is_rank_zero():
            export_huggingface(model, tokenizer, folder)
        return
    tensors = collect_untied(model)
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(tensors))
    parts = folder.with_name(f"{folder.name}.parts")
    writer = PartsWriter(
        str(parts),
        fqn_to_index_mapping=dict.fromkeys(sum(names, []), 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(tensors, storage_writer=writer)
    world.share_files()
    if is_rank_zero():
        writer.merge()
        folder.mkdir(parents=True, exist_ok=True)
        merged = sorted(parts.glob("*.safetensors"))
        merged[0].replace(folder / WEIGHTS)
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if isinstance(model, PooledModel):
            write_form(model.form, model.config.hidden_size, [], folder)
    if world.manages_files:
        shutil.rmtree(parts)
