"""Students of bottleneck blocks (MobileBERT), and the inverted-bottleneck teacher that they may be trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MobileBertConfig, PretrainedConfig, PreTrainedModel

from distill.checkpoint.norm_kinds import MOBILEBERT
from distill.errors import InputError
from distill.slicing.factorize import factorize_table
from distill.student.family import ENCODERS, find_family
from distill.student.sizes import Sizes
from distill.student.spec import StudentSpec, resolve_sizes

VERSION = 2  # of the start of these students; part of the stage's key
STOCK = "MobileBert"
INVERTED = "inverted-bottleneck"  # the preset whose blocks contain the teacher's layers
_HEADS = ("ForSequenceClassification", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "Model")


@dataclass(frozen=True)
class Blocks:
    """Structure of a preset's blocks, relative to the width of the residual stream between them.

    Args:
        hidden: Width of the stream as a share of the teacher's hidden width.
        inner: Width inside the blocks as a share of the stream's.
        embeddings: Width of the token table as a share of the stream's.
        ffn: Neurons of each feed-forward network as a multiple of the inner width; None: the same number as the
            teacher's.
        stacks: Feed-forward networks per block.
        narrow_attention: Queries, keys and values all take the same narrow input.
        norm: no_norm or layer_norm.
    """

    hidden: Fraction
    inner: Fraction
    embeddings: Fraction
    ffn: Fraction | None
    stacks: int
    narrow_attention: bool
    norm: str


# In the paper the stream is 512 wide, with 128 inside the blocks, embeddings of 128 and feed-forward networks of 512
# (Sun et al. 2020, MobileBERT, arXiv 2004.02984, table 1). The teacher's stream is equally wide; its inverted
# bottlenecks are 1,024 inside a stream of 512.
QUARTER = Fraction(1, 4)
_BLOCK_STRUCTURES = {
    "mobilebert": Blocks(Fraction(1), QUARTER, QUARTER, Fraction(4), 4, False, "no_norm"),
    "mobilebert-tiny": Blocks(Fraction(1), QUARTER, QUARTER, Fraction(4), 2, True, "no_norm"),
    "inverted-bottleneck": Blocks(Fraction(1, 2), Fraction(2), QUARTER, None, 1, True, "layer_norm"),
}


def bottleneck_config(teacher: PretrainedConfig, parsed: StudentSpec) -> MobileBertConfig:
    """Returns the stock config of the student for a preset with bottlenecks and the sizes after it.

    Raises:
        InputError: The teacher is not an encoder, or the sizes or layers are not possible.
    """
    if teacher.model_type not in ENCODERS:
        raise InputError(
            f"student {parsed.text}: expected an encoder as teacher, among {', '.join(ENCODERS)}, found "
            f"{teacher.model_type!r}: the blocks of this class see both sides of every token"
        )
    old, blocks = find_family(teacher).sizes(teacher), _BLOCK_STRUCTURES[parsed.preset]
    requested = {key: numbers[0] for key, numbers in parsed.requested.items() if key != "layers"}
    hidden = requested.get("hidden", int(old.hidden * blocks.hidden))
    heads = requested.get("heads", old.heads)
    inner = requested.get("inner", max(1, round(hidden * blocks.inner / heads)) * heads)
    sizes = {
        "hidden_size": hidden,
        "intra_bottleneck_size": inner,
        "embedding_size": requested.get("embeddings", max(1, int(hidden * blocks.embeddings))),
        "intermediate_size": requested.get("ffn", old.ffn if blocks.ffn is None else int(inner * blocks.ffn)),
        "num_feedforward_networks": requested.get("stacks", blocks.stacks),
        "num_attention_heads": heads,
        "num_hidden_layers": len(list_block_layers(parsed, old)),
    }
    check_bottleneck_sizes(sizes)
    return MobileBertConfig(
        **sizes,  # type: ignore[arg-type]
        vocab_size=teacher.vocab_size,
        max_position_embeddings=teacher.max_position_embeddings,
        type_vocab_size=max(1, getattr(teacher, "type_vocab_size", 1) or 1),
        hidden_act=read_activation(teacher) if parsed.preset == INVERTED else "relu",
        use_bottleneck_attention=blocks.narrow_attention,
        key_query_shared_bottleneck=not blocks.narrow_attention,
        normalization_type=choose_norm(parsed, blocks),
        trigram_input=True,
        pad_token_id=teacher.pad_token_id,
        id2label=teacher.id2label,
        label2id=teacher.label2id,
        problem_type=teacher.problem_type,
    )


def list_block_layers(parsed: StudentSpec, teacher: Sizes) -> tuple[int, ...]:
    """Returns the teacher's layer of each block; random blocks are only as many as requested.

    Raises:
        InputError: The teacher doesn't have the requested layers, or they are listed for random blocks.
    """
    numbers = parsed.requested.get("layers", (len(teacher.layers),))
    listed = ",".join(map(str, numbers))
    if parsed.preset == INVERTED and not parsed.fresh:
        return resolve_sizes(f"layers={listed}", teacher).layers
    if len(numbers) > 1:
        raise InputError(
            f"student {parsed.text}: expected a number of layers, found {listed}: these blocks are random, and contain "
            "none of the teacher's layers"
        )
    return tuple(range(numbers[0]))


def choose_norm(parsed: StudentSpec, blocks: Blocks) -> str:
    """Returns the stock class's normalization_type; norms of another kind are made from layer_norm afterwards."""
    return blocks.norm if parsed.norm in ("", MOBILEBERT[blocks.norm]) else "layer_norm"


def read_activation(teacher: PretrainedConfig) -> str:
    """Returns the name of the teacher's activation function."""
    result: str = next(
        getattr(teacher, name) for name in ("hidden_act", "activation", "hidden_activation") if hasattr(teacher, name)
    )
    return result


def check_bottleneck_sizes(sizes: dict[str, int]) -> None:
    """Checks the sizes of a bottleneck student.

    Raises:
        InputError: A size is below 1, or the number of heads doesn't divide the inner width.
    """
    names = {
        "intra_bottleneck_size": "inner", "num_feedforward_networks": "stacks", "hidden_size": "hidden",
        "intermediate_size": "ffn", "num_attention_heads": "heads", "num_hidden_layers": "layers",
        "embedding_size": "embeddings",
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"student {names.get(name, name)}={size}: expected at least 1")
    inner, heads = sizes["intra_bottleneck_size"], sizes["num_attention_heads"]
    if inner % heads:
        raise InputError(
            f"student inner={inner}, heads={heads}: expected heads that divide the width inside a block; found "
            f"{inner / heads:g}"
        )


def build_bottlenecks(teacher: PreTrainedModel, parsed: StudentSpec, seed: int = 0) -> PreTrainedModel:
    """Builds a stock MobileBert for the teacher's task, with blocks initialized at random from `seed`.

    Unless it is `fresh`, the student takes from the teacher the token embeddings, approximated at the student's width,
    and, if its stream is as wide as the teacher's, the projection to it, the position embeddings, the norm after them
    (as the scale and shift of NoNorm) and the pooler with its head. The blocks of an inverted bottleneck contain the
    teacher's own layers, with projections between them that keep the principal directions of the stream.

    Raises:
        InputError: As `bottleneck_config`; the class has no head for the teacher's task; or the teacher's layers don't
            fit into inverted bottlenecks (only those of BERT, RoBERTa, XLM-R and ELECTRA do).

    Source: Sun et al. 2020, MobileBERT (arXiv 2004.02984), section 3. There all weights are drawn at random, and
    queries, keys and values of the inverted bottlenecks take the narrow stream as input; here they take the wide input,
    as in the teacher.
    """
    task = next((each for each in _HEADS if type(teacher).__name__.endswith(each)), None)
    if task is None:
        raise InputError(
            f"student {parsed.text}: expected a teacher with one of {', '.join(_HEADS)}, found {type(teacher).__name__}"
        )
    config = bottleneck_config(teacher.config, parsed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student: PreTrainedModel = getattr(transformers, STOCK + task)(config)
        if not parsed.fresh:
            copy_teacher_weights(student, teacher, parsed)
    return student


@torch.no_grad()
def copy_teacher_weights(student: PreTrainedModel, teacher: PreTrainedModel, parsed: StudentSpec) -> None:
    """Copies the teacher's weights that the student can use; see `build_bottlenecks`."""
    config, width = student.config, teacher.config.hidden_size
    body: Any = student.base_model
    embeddings = body.embeddings
    table = project_token_embeddings(teacher)
    narrow, directions = factorize_table(table, min(config.embedding_size, table.shape[1]))
    rank = len(directions)
    embeddings.word_embeddings.weight[:, :rank] = narrow
    if config.pad_token_id is not None:  # as the zeros that pad trigrams at the end of a text
        embeddings.word_embeddings.weight[config.pad_token_id] = 0
    middle = embeddings.embedding_transformation.weight[:, config.embedding_size : config.embedding_size + rank]
    if parsed.preset == INVERTED:
        embeddings.embedding_transformation.weight.zero_()
        embeddings.embedding_transformation.bias.zero_()
        _, stream = factorize_table(table, config.hidden_size)
        middle.copy_(stream @ directions.T)
        layers = list_block_layers(parsed, find_family(teacher.config).sizes(teacher.config))
        initialize_inverted_blocks(student, teacher, stream, layers)
    elif config.hidden_size == width:
        embeddings.embedding_transformation.weight.zero_()
        embeddings.embedding_transformation.bias.zero_()
        middle.copy_(directions.T)
        copy_position_embeddings(embeddings, teacher)
        copy_head(student, teacher)


def project_token_embeddings(teacher: PreTrainedModel) -> Tensor:
    """Returns the teacher's token embeddings projected to the width of its layers."""
    embedding: Any = teacher.get_input_embeddings()
    table: Tensor = embedding.weight.detach()
    body: Any = teacher.base_model
    inside: Any = getattr(body, "embeddings", None)
    for module, name in ((body, "embeddings_project"), (inside, "embed_proj")):
        projection = getattr(module, name, None)
        if isinstance(projection, nn.Linear):
            return table @ projection.weight.T
    transformation: Any = getattr(inside, "embedding_transformation", None)
    if transformation is None:
        return table
    weight, size = transformation.weight, table.shape[1]
    result: Tensor = table @ (weight[:, size : 2 * size] if weight.shape[1] > size else weight).T
    return result


def copy_position_embeddings(embeddings: Any, teacher: PreTrainedModel) -> None:
    """Copies position and type embeddings and fits the norm after them, if the teacher's mean the same."""
    source: Any = getattr(teacher.base_model, "embeddings", None)
    if teacher.config.model_type not in ("bert", "electra", "distilbert", "mobilebert"):
        return
    positions: Tensor = source.position_embeddings.weight
    norm: nn.Module = source.LayerNorm
    if positions.shape[1] != embeddings.position_embeddings.weight.shape[1]:
        return
    embeddings.position_embeddings.weight.copy_(positions)
    types = getattr(source, "token_type_embeddings", None)
    embeddings.token_type_embeddings.weight.zero_()
    if types is not None:
        embeddings.token_type_embeddings.weight.copy_(types.weight)
    token_vectors = project_token_embeddings(teacher)
    wide = token_vectors + positions[torch.arange(len(token_vectors)) % min(64, len(positions))]
    if isinstance(embeddings.LayerNorm, nn.LayerNorm) and isinstance(norm, nn.LayerNorm):
        embeddings.LayerNorm.load_state_dict(norm.state_dict())
        return
    wide = wide if types is None else wide + types.weight[0]
    scale, shift = fit_scale_and_shift(wide, norm(wide))
    embeddings.LayerNorm.weight.copy_(scale)
    embeddings.LayerNorm.bias.copy_(shift)


def fit_scale_and_shift(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least-squares scale and shift per column from x to y, both [rows, columns]."""
    apart = x - x.mean(0)
    scale = (apart * (y - y.mean(0))).sum(0) / apart.square().sum(0).clamp(min=1e-12)
    return scale, y.mean(0) - scale * x.mean(0)


POOLERS = {"bert": "bert.pooler.dense", "roberta": "classifier.dense", "xlm-roberta": "classifier.dense"}
POOLERS |= {"mobilebert": "mobilebert.pooler.dense"}


def copy_head(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Copies pooler and classifier if the teacher's have the same structure: linear, tanh, linear."""
    if not type(teacher).__name__.endswith("ForSequenceClassification") or teacher.config.model_type not in POOLERS:
        return
    modules: Any = dict(teacher.named_modules())
    pooler = modules[POOLERS[teacher.config.model_type]]
    head = modules["classifier"] if isinstance(modules["classifier"], nn.Linear) else modules["classifier.out_proj"]
    body: Any = student
    body.mobilebert.pooler.dense.load_state_dict(pooler.state_dict())
    body.classifier.load_state_dict(head.state_dict())


def initialize_inverted_blocks(
    student: PreTrainedModel, teacher: PreTrainedModel, stream: Tensor, layers: Sequence[int]
) -> None:
    """Copies layers of the teacher into the blocks of an inverted bottleneck.

    Args:
        student: The student, changed in place; left as it is if its blocks have other sizes than the layers.
        teacher: The teacher.
        stream: [narrow, wide] with orthonormal rows, by which the wide vectors enter and leave the narrow stream.
        layers: The teacher's layer of each block.

    Raises:
        InputError: Layers of the teacher's kind don't fit into the blocks.
    """
    if teacher.config.model_type not in ("bert", "roberta", "xlm-roberta", "electra"):
        raise InputError(
            "student inverted-bottleneck: expected a teacher whose layers fit into its blocks, bert, roberta, "
            f"xlm-roberta or electra, found {teacher.config.model_type!r}"
        )
    student_body: Any = student.base_model
    body: Any = teacher.base_model
    ours, others = student_body.config, body.config
    if (ours.intra_bottleneck_size, ours.intermediate_size, ours.num_attention_heads) != (
        others.hidden_size, others.intermediate_size, others.num_attention_heads,
    ):  # fmt: skip
        return  # the user requested other sizes
    copied = [body.encoder.layer[number] for number in layers]
    for block, layer in zip(student_body.encoder.layer, copied, strict=True):
        for name in ("query", "key", "value"):
            getattr(block.attention.self, name).load_state_dict(getattr(layer.attention.self, name).state_dict())
        block.attention.output.load_state_dict(layer.attention.output.state_dict())
        block.intermediate.load_state_dict(layer.intermediate.state_dict())
        block.output.dense.load_state_dict(layer.output.dense.state_dict())
        block.output.LayerNorm.load_state_dict(layer.output.LayerNorm.state_dict())
        block.bottleneck.input.dense.weight.copy_(stream.T)
        block.output.bottleneck.dense.weight.copy_(stream)
