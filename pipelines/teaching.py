"""The teacher that is asked while the student trains: on the student's processes, or on its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from distill.layout import Layout
from distill.losses.config import LossConfig, layer_pairs
from distill.sharding.mesh import mesh_of
from distill.sharding.pipeline import PipelineForward
from distill.student.build import student_config
from distill.student.spec import is_relative
from distill.teacher.load import checkpoint_folder
from distill.teacher.online import OnlineTeacher
from distill.teacher.remote import RemoteTeacher, serve
from distill.teacher.shard import Ask, SharedTeacher
from pipelines.caching import load_teacher
from pipelines.config import DistillConfig
from pipelines.placing import device_type, laid_out
from pipelines.strategies import device_of
from pipelines.teacher import AUTO
from pipelines.world import World

TEACHER = "teacher"  # the key under which the students say where its weights are


def asked(source: Path, loss: LossConfig, layout: Layout, *, offload: bool = False, prefetch: int = 1) -> Ask:
    """The teacher itself, laid out, to be asked by every process in every step."""
    device = device_of("auto")
    if not layout.sharded:
        model = load_teacher(source)
        return OnlineTeacher(model.to(device), loss.teacher_answers, device=device)  # type: ignore[arg-type]
    mesh = mesh_of(layout, device_type())
    model = laid_out(source, AUTO, layout, mesh, frozen=True, offload=offload, prefetch=prefetch)
    if layout.pp > 1:
        layers = range(model.config.num_hidden_layers + 1) if loss.hidden else ()
        return SharedTeacher(PipelineForward(model, mesh.get_group("pp"), hidden=layers), mesh)
    return SharedTeacher(OnlineTeacher(model, loss.teacher_answers, device=device), mesh)


def asked_as(config: DistillConfig, source: Path, layout: Layout) -> Ask:
    """`asked` with the settings of a run."""
    return asked(source, config.loss, layout, offload=config.teacher.offload, prefetch=config.machine.prefetch)


def call_teacher(world: World, source: Path) -> RemoteTeacher:
    """The teacher on its own processes, told where its weights are."""
    if world.leads:
        world.everyone.store.set(TEACHER, str(source))
    return world.bridge.teacher()


def dismiss_teacher(world: World) -> None:
    """Lets the teacher's own processes go, where nothing was left to ask them."""
    if world.bridge is not None and world.leads and not world.everyone.store.check([TEACHER]):
        world.everyone.store.set(TEACHER, "")


def teach(world: World, config: DistillConfig, layout: Layout) -> None:
    """What a process of the teacher's own does: it waits to be called, then answers until the students have finished.

    Answers carry the hidden states that the loss reads, and no others.
    """
    source = world.everyone.get(TEACHER)
    if not source:
        return
    world.everyone.note("answering as the teacher")
    teacher, wanted = asked_as(config, Path(source), layout), taught_layers(config, Path(source))

    def answer(batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        found = dict(teacher(batch))
        if wanted:
            found["hidden"] = {layer: found["hidden"][layer] for layer in wanted}
        return found

    serve(world.bridge, answer)
    if isinstance(teacher, SharedTeacher):
        teacher.finish()


def taught_layers(config: DistillConfig, source: Path) -> list[int]:
    """Layers of the teacher whose hidden states the loss reads."""
    if not config.loss.hidden:
        return []
    teacher = AutoConfig.from_pretrained(source)
    pairs = layer_pairs(config.loss.layer_map, student_layers(config, source), teacher.num_hidden_layers)
    return sorted({layer for _, layer in pairs})


def student_layers(config: DistillConfig, source: Path) -> int:
    """How many layers the student will have."""
    if is_relative(config.student.spec):
        return student_config(AutoConfig.from_pretrained(source), config.student.spec).num_hidden_layers
    return AutoConfig.from_pretrained(checkpoint_folder(config.student.spec, "student")).num_hidden_layers
