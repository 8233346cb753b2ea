"""Exchange of a model's normalizations: another kind, with weights that start close to what the old ones compute."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mobilebert.modeling_mobilebert import NoNorm

from distill.checkpoint.custom_models import modeling_custom_norms
from distill.checkpoint.norm_kinds import BATCHNORM, ELEMENTWISE, NONORM, RMSNORM
from distill.errors import InputError
from distill.slicing.custom_norms import build_with_norms
from distill.slicing.stream import absorb_scale_and_shift, find_residual_segments
from distill.student.bottleneck import fit_scale_and_shift
from distill.student.norms import DECODERS, check_family_kind, stock_kind

ROWS, LENGTH = 16, 32  # random tokens on which element-wise norms are fitted
HEAD_NORMS = ("q_norm", "k_norm")  # inside the attention of Qwen 3: they aren't over the stream


def fit_student_norms(student: PreTrainedModel, kind: str, seed: int = 0) -> PreTrainedModel:
    """Returns a stock student with normalizations of another kind in its layers and embeddings.

    Norms in the head, and those of queries and keys, stay. If the stock class is of this kind already, the student is
    returned unchanged. Between `layernorm` and `rmsnorm` the scale is kept; a shift, which `rmsnorm` lacks, moves into
    the biases that follow it, exactly, but for that of the last norm, and those of MobileBERT, which are dropped.
    `nonorm` and `batchnorm` start from `fit_norms`, and so does what replaces MobileBERT's NoNorm.

    Raises:
        InputError: Students of the family can't have this kind.

    Source: Zhang & Sennrich 2019, RMSNorm (arXiv 1910.07467); Sun et al. 2020, MobileBERT (arXiv 2004.02984, section
    3.2), where NoNorm starts with a scale of 1 and a shift of 0; Ioffe & Szegedy 2015 (arXiv 1502.03167), here over the
    tokens that aren't padding.
    """
    check_family_kind(kind, student.config.model_type)
    old = stock_kind(student.config)
    if kind == old:
        return student
    norms = list_norms(student)
    weights = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    prefix = f"{student.base_model_prefix}." if student.base_model is not student else ""
    if kind in ELEMENTWISE or old in ELEMENTWISE:
        for name, fitted in fit_norms(student, kind, seed).items():
            weights |= {f"{prefix}{name}.{part}": tensor for part, tensor in fitted.items()}
    elif kind == RMSNORM:
        moved = copy.deepcopy(student)
        for segment in find_residual_segments(moved)[:-1]:
            if segment.norm:
                shift: Any = moved.base_model.get_submodule(segment.norm).bias
                absorb_scale_and_shift(moved.base_model, segment, torch.ones_like(shift), shift.detach())
        weights = {name: tensor.clone() for name, tensor in moved.state_dict().items()}
    else:
        weights |= {f"{prefix}{name}.bias": torch.zeros_like(weights[f"{prefix}{name}.weight"]) for name in norms}
    return build_with_norms(student, dict.fromkeys(norms, kind), weights)


def list_norms(model: PreTrainedModel) -> list[str]:
    """Returns the names of the norms over the stream, as modules of the base model."""

    def is_norm(name: str, module: nn.Module) -> bool:
        if name.rpartition(".")[2] in HEAD_NORMS:
            return False
        is_layer_norm = isinstance(module, nn.LayerNorm | NoNorm)
        return is_layer_norm or (model.config.model_type in DECODERS and type(module).__name__.endswith("RMSNorm"))

    return [name for name, module in model.base_model.named_modules() if is_norm(name, module)]


@dataclass
class NormFit:
    """A forward hook that fits a norm of another kind to what a norm computes, and goes on with the fit's result.

    The later norms thus see the inputs that they will have, and the errors of the fits don't add up.

    Args:
        kind: Kind of the new norm.
        weights: The fitted norm's weights and buffers by name, after the forward pass.
    """

    kind: str
    weights: dict[str, Tensor]

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Fits the norm, and returns what the new one computes of the inputs, [rows, length, width]."""
        x = inputs[0].flatten(0, -2)
        standard = standardize(self.kind, x)
        scale, shift = fit_scale_and_shift(standard, output.flatten(0, -2))
        if self.kind == RMSNORM:
            shift = torch.zeros_like(shift)
        self.weights |= {"weight": scale, "bias": shift}
        if self.kind == BATCHNORM:
            self.weights |= {"running_mean": x.mean(0), "running_var": x.var(0, correction=0)}
        return (standard * scale + shift).view_as(output)


def standardize(kind: str, x: Tensor) -> Tensor:
    """Returns what a norm of a kind computes of x [tokens, width] with a scale of 1 and no shift."""
    if kind == NONORM:
        return x
    if kind == BATCHNORM:
        return (x - x.mean(0)) * (x.var(0, correction=0) + modeling_custom_norms.SMALLEST_EPS).rsqrt()
    norm = F.rms_norm if kind == RMSNORM else F.layer_norm
    result: Tensor = norm(x, x.shape[-1:], eps=1e-12)
    return result


@torch.no_grad()
def fit_norms(model: PreTrainedModel, kind: str, seed: int) -> dict[str, dict[str, Tensor]]:
    """Returns the weights of norms of another kind, by the names of the norms in the base model.

    Scale and shift are those with the least squared error for each feature on random tokens, whose statistics are also
    the running ones of `batchnorm`: the data isn't read when a student is built.
    """
    config, generator = model.config, torch.Generator().manual_seed(seed)
    ids = torch.randint(
        config.vocab_size - 1, (ROWS, min(LENGTH, config.max_position_embeddings // 2)), generator=generator
    )
    if config.pad_token_id is not None:
        ids += ids >= config.pad_token_id
    body: Any = copy.deepcopy(model.base_model).eval()
    fits = {name: NormFit(kind, {}) for name in list_norms(model)}
    for name, fit in fits.items():
        body.get_submodule(name).register_forward_hook(fit)
    body(input_ids=ids.to(model.device), attention_mask=torch.ones_like(ids).to(model.device))
    if not all(tensor.isfinite().all() for fit in fits.values() for tensor in fit.weights.values()):
        raise InputError(f"student norm={kind}: expected finite activations on random tokens, found others")
    return {name: fit.weights for name, fit in fits.items()}
