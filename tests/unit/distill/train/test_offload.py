"""Tests that offloaded activations give the same losses and gradients, and that they leave memory in between."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.memory.activations import measure_peak
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.module import DistillationModule
from distill.train.offload import ActivationOffload, SavedView, _Packer
from distill.train.offload_file import ActivationFile, FileSpace
from pipelines.runs.strategies.by_layout import SingleProcessStrategy
from support.tiny_models import build_model
from unit.distill.train.test_activation_checkpointing import FAMILIES, build_body, draw_batch
from unit.distill.train.test_module import TRAIN, data, quiet_trainer  # noqa: F401 - data is a fixture

CPU = torch.device("cpu")


def compute(
    model: PreTrainedModel, batch: dict[str, Tensor], offload: ActivationOffload | None, passes: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradients of a step with dropout; the graph is used for several backward passes."""
    model.zero_grad()
    torch.manual_seed(1)
    if offload is None:
        loss = model(**batch).last_hidden_state.square().mean()
    else:
        with offload.offload([*model.parameters(), *model.buffers()], batch):
            loss = model(**batch).last_hidden_state.square().mean()
    for remaining in reversed(range(passes)):
        loss.backward(retain_graph=remaining > 0)
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def count_used(offload: ActivationOffload) -> int:
    """Returns the bytes of the file that are in use."""
    assert isinstance(offload.place, ActivationFile)
    space = offload.place.space
    space.give_back(space.take(1), 1)
    space.take(0)
    return space.end - sum(length for _, length in space.free)


@pytest.mark.parametrize("mode", ["none", "full", "selective", "every=2"])
@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("bert", "eager"), ("llama", "eager")]
)
def test_gradients_with_dropout_equal_the_plain_steps_to_the_bit(family, attention, mode, tmp_path):
    model, batch = build_body(family, attention), draw_batch()
    loss, expected = compute(model, batch, None)
    offload = ActivationOffload(CPU, tmp_path, smallest=1 << 10)
    with checkpoint_layers(model, mode):
        for _ in range(2):
            found_loss, found = compute(model, batch, offload)
            assert torch.equal(found_loss, loss)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert offload.place.size > 0, "nothing was offloaded"


def test_a_second_backward_pass_reads_the_same_activations(tmp_path):
    model, batch = build_body("bert"), draw_batch()
    _, expected = compute(model, batch, None, passes=2)
    _, found = compute(model, batch, ActivationOffload(CPU, tmp_path, smallest=1 << 10), passes=2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("mode", "share"), [("none", 0.4), ("full", 0.95)])
def test_a_step_holds_less_memory(mode, share, tmp_path):
    model, batch = build_body("bert"), draw_batch(8, 128)
    offload = ActivationOffload(CPU, tmp_path)
    with checkpoint_layers(model, mode):
        compute(model, batch, offload)
        plain = measure_peak(lambda: compute(model, batch, None))
        assert measure_peak(lambda: compute(model, batch, offload)) < share * plain


def test_the_space_of_a_step_is_free_after_it_and_is_used_by_the_next(tmp_path):
    model, offload = build_body("bert"), ActivationOffload(CPU, tmp_path, smallest=1 << 10)
    compute(model, draw_batch(4, 64), offload)
    size = offload.place.size
    for length in (64, 32, 48, 64):
        compute(model, draw_batch(4, length), offload)
        assert count_used(offload) == 0
    assert offload.place.size == size


def test_nothing_of_a_file_is_in_its_folder(tmp_path):
    file = ActivationFile(tmp_path / "new")
    extent = file.store(torch.ones(5, dtype=torch.uint8))
    assert list((tmp_path / "new").iterdir()) == []
    assert extent.load().tolist() == [1] * 5


def test_a_gradient_that_is_a_saved_tensor_keeps_its_space(tmp_path):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.full_like(x, 3.0))
            return 3 * x

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return ctx.saved_tensors[0]

    offload = ActivationOffload(CPU, tmp_path, smallest=1)
    x = torch.ones(1000, requires_grad=True)
    with offload.offload([], {}):
        total = Scaled.apply(x).sum()
    total.backward()
    assert count_used(offload) > 0
    for _ in range(3):
        offload.place.store(torch.zeros(4000, dtype=torch.uint8))
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 1000
    x.grad = None
    assert count_used(offload) == 0


class Watch:
    """Records what is done with each saved tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moved: list[tuple[SavedView, int]] = []
        self.kept: list[Tensor] = []
        pack = _Packer.pack

        def watched(packer: _Packer, tensor: Tensor) -> Tensor | SavedView:
            packed = pack(packer, tensor)
            if isinstance(packed, SavedView):
                self.moved.append((packed, tensor.untyped_storage().data_ptr()))
            else:
                self.kept.append(tensor)
            return packed

        monkeypatch.setattr(_Packer, "pack", watched)


def test_parameters_their_views_the_batch_and_small_tensors_stay(tmp_path, monkeypatch):
    watch, layer = Watch(monkeypatch), nn.Linear(64, 64)
    frozen, batch = (
        nn.Linear(64, 64).requires_grad_(False),
        {"x": torch.randn(32, 64), "signals": [torch.randn(32, 64)]},
    )
    offload = ActivationOffload(CPU, tmp_path, smallest=4 << 10)
    with offload.offload([*layer.parameters(), *frozen.parameters()], batch):
        hidden = frozen(layer(batch["x"]).relu())
        (hidden * batch["signals"][0][1:2]).sum(1).square().sum().backward()
    fixed_storages = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *frozen.parameters())}
    fixed_storages |= {batch["x"].data_ptr(), batch["signals"][0].data_ptr()}
    kept_storages = {each.untyped_storage().data_ptr() for each in watch.kept}
    assert kept_storages >= {batch["x"].data_ptr(), frozen.weight.data_ptr(), batch["signals"][0].data_ptr()}
    assert not {address for _, address in watch.moved} & fixed_storages
    assert all(each.untyped_storage().nbytes() < 4 << 10 for each in watch.kept if each.data_ptr() not in fixed_storages
               and each.untyped_storage().data_ptr() not in fixed_storages)  # fmt: skip
    assert watch.moved


def test_weights_that_are_no_parameters_of_the_model_stay_with_their_views(tmp_path, monkeypatch):
    watch, gathered = Watch(monkeypatch), nn.Parameter(torch.randn(64, 64))
    with ActivationOffload(CPU, tmp_path, smallest=1).offload([], {}):
        nn.functional.linear(torch.randn(2, 64, requires_grad=True), gathered)
    assert gathered.data_ptr() in {each.data_ptr() for each in watch.kept}
    assert gathered.data_ptr() not in {address for _, address in watch.moved}


def test_views_of_the_same_memory_are_stored_once_and_changed_memory_again(tmp_path):
    offload = ActivationOffload(CPU, tmp_path)
    packer = _Packer(offload.place, "cpu", 1, set())
    memory = torch.arange(4096.0)
    views = [memory.view(64, 64).T[3:], memory[7:9], memory]
    packed = [packer.pack(each) for each in views]
    assert all(isinstance(each, SavedView) for each in packed)
    assert len({id(each.stored) for each in packed}) == 1
    for view, each in zip(views, packed, strict=True):
        loaded = each.load()
        assert torch.equal(loaded, view)
        assert loaded.stride() == view.stride()
    memory.add_(1)
    assert packer.pack(memory).load()[0] == 1
    assert packed[2].load()[0] == 0


def test_new_memory_at_the_address_of_old_is_stored_again(tmp_path):
    packer = _Packer(ActivationFile(tmp_path), "cpu", 1, set())
    packed = []
    for number in range(20):
        packed.append(packer.pack(torch.full((5000,), float(number))))
    assert [each.load()[0].item() for each in packed] == list(range(20))


def test_outputs_that_stay_are_freed(tmp_path):
    def run() -> Any:
        with ActivationOffload(CPU, tmp_path, smallest=1 << 30).offload([], {}):
            output = torch.randn(8, requires_grad=True).exp()  # saved by its own node
        return ref(output)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_free_space_is_merged_and_the_first_that_fits_is_used():
    space, page = FileSpace(), 4096
    offsets = [space.take(page) for _ in range(5)]
    assert offsets == [page * number for number in range(5)]
    for number in (1, 3, 2):
        space.give_back(offsets[number], page)
    assert space.take(3 * page) == offsets[1]
    space.give_back(offsets[1], 3 * page)
    assert space.take(1) == offsets[1]
    assert space.take(2 * page) == offsets[2]
    for number in (0, 1, 4):
        space.give_back(offsets[number], page)
    space.give_back(offsets[2], 2 * page)
    assert space.take(10 * page) == 0
    assert space.end == 10 * page


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    with pytest.raises(InputError, match=f"train.offload activations: expected 3 bytes of space .* in {tmp_path}"):
        ActivationFile(tmp_path).store(torch.zeros(3, dtype=torch.uint8))


def test_a_device_without_another_memory_is_rejected(tmp_path):
    with pytest.raises(InputError, match="expected a CPU or a CUDA device, found mps"):
        ActivationOffload(torch.device("mps"), tmp_path)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_module_trains_the_same_weights(data, tmp_path, monkeypatch, parts):  # noqa: F811
    monkeypatch.setitem(ActivationOffload.__init__.__kwdefaults__, "smallest", 1)
    watch, weights = Watch(monkeypatch), {}
    for offload in ("none", "activations"):
        torch.manual_seed(0)
        student = build_model("bert")
        train = replace(TRAIN, dropout=0.1, offload=offload, checkpointing="every=2")
        module = DistillationModule(student, loss=LossConfig(kl=0, ce=1), train=train)
        module.scratch, module.micro_batches.parts = tmp_path / offload, parts
        torch.manual_seed(2)
        strategy = SingleProcessStrategy(device=CPU)
        quiet_trainer(max_steps=3, limit_val_batches=1, strategy=strategy).fit(module, datamodule=data)
        weights[offload] = student.state_dict()
        assert bool(watch.moved) == (offload == "activations")
        assert module.offload is None
    assert all(torch.equal(weights["activations"][name], value) for name, value in weights["none"].items())
    assert list(Path(tmp_path / "activations").iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_offloaded_to_the_cpu_give_the_same_gradients_on_a_gpu(mode, tmp_path):
    device = torch.device("cuda")
    model = build_body("llama").to(device)  # type: ignore[arg-type]
    batch = {name: value.to(device) for name, value in draw_batch(8, 128).items()}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loss, expected = compute(model, batch, None)
        offload = ActivationOffload(device, tmp_path, smallest=1 << 10)
        with checkpoint_layers(model, mode):
            for _ in range(3):
                found_loss, found = compute(model, batch, offload, passes=1)
                assert torch.equal(found_loss, loss)
                assert all(torch.equal(found[name], value) for name, value in expected.items())
    finally:
        torch.use_deterministic_algorithms(False)
