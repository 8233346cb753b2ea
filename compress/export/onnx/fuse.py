"""Fusion of an ONNX file for ONNX Runtime's CPU kernels: attention, bias with GELU, residual sums before norms."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError
from compress.export.common.quiet import quiet
from compress.export.onnx.graph import LARGEST

MASK = "attention_mask"
INT32 = 6  # onnx.TensorProto.INT32
ROUNDING = 1e-3  # largest difference of logits from another order of float32 sums; beyond it a rewrite is rejected


def fuse_operators(source: Path, target: Path) -> dict[str, int]:
    """Rewrites a float32 ONNX file with ONNX Runtime's own operators where the graph allows it.

    Attention with its three projections becomes one operator that takes the padding mask directly, bias and GELU become
    one, and a residual sum with its bias becomes one `Sum` before the norm: ONNX Runtime alone would fuse an `Add` and
    the norm into a SkipLayerNormalization, which took 3 times as long (16 tokens of width 384: 36 us, Sum and norm 12).

    Args:
        source: A float32 file whose inputs are [batch, length] int64.
        target: Where to write; runs on ONNX Runtime alone.

    Returns:
        Operator -> number in the fused graph.

    Raises:
        ExportError: The rewritten graph computes other logits than the source, or it has more than 2 GiB of weights.
    """
    size = sum(file.stat().st_size for file in source.parent.glob(f"{source.name}*"))
    if size > LARGEST:
        raise ExportError(
            f"onnx: {source}: expected at most {LARGEST / 1e9:g} GB to fuse operators in, found {size / 1e9:.1f}: "
            "ONNX Runtime compares the graphs in memory, which can't hold more; export onnx without onnxruntime"
        )
    import onnx
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    with quiet():
        joined, _ = optimize_for_ort(onnx_ir.load(source))
    model = onnx_ir.serde.serialize_model(joined)
    fold_constant_concats(model.graph)
    split_skip_norms(model.graph)
    drop_equal_sizes(model.graph)
    remove_unused(model.graph)
    chosen = next((m for m in (with_raw_mask(model), model) if matches_source(source, m)), None)
    if chosen is None:
        raise ExportError(f"onnx: {source}: expected the same logits after fusing operators, found others")
    target.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(chosen, str(target))
    return {name: count_nodes(chosen.graph, name) for name in ("Attention", "MultiHeadAttention", "BiasGelu", "Sum")}


def count_nodes(graph: Any, operator: str) -> int:
    """Returns the number of nodes of an operator."""
    return sum(node.op_type == operator for node in graph.node)


def fold_constant_concats(graph: Any) -> None:
    """Folds Concat nodes of constants into constants.

    The fusion leaves the three projections as such a Concat, which would run in every call.
    """
    from onnx import numpy_helper

    constants = {constant.name: constant for constant in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Concat" and all(name in constants for name in node.input):
            parts = [numpy_helper.to_array(constants[name]) for name in node.input]
            whole = np.concatenate(parts, axis=read_attribute(node, "axis").i)
            graph.initializer.append(numpy_helper.from_array(whole, node.output[0]))
            graph.node.remove(node)


def split_skip_norms(graph: Any) -> None:
    """Replaces SkipLayerNormalization by Sum (of input, residual and bias) and LayerNormalization."""
    from onnx import helper

    nodes = []
    for node in graph.node:
        if node.op_type != "SkipLayerNormalization":
            nodes.append(node)
            continue
        inputs = list(node.input) + [""] * (5 - len(node.input))
        x, residual, weight, bias, sum_bias = inputs
        added = (node.output[3] if len(node.output) > 3 and node.output[3] else "") or f"{node.output[0]}_sum"
        nodes.append(helper.make_node("Sum", [name for name in (x, residual, sum_bias) if name], [added]))
        names = [added, weight, *([bias] if bias else [])]
        epsilon = read_attribute(node, "epsilon").f
        nodes.append(helper.make_node("LayerNormalization", names, [node.output[0]], epsilon=epsilon, axis=-1))
    replace_nodes(graph, nodes)


def drop_equal_sizes(graph: Any) -> None:
    """Removes equal query, key and value widths from Attention.

    They are the default, and Attention with explicit widths isn't quantized.
    """
    for node in graph.node:
        sizes = read_attribute(node, "qkv_hidden_sizes") if node.op_type == "Attention" else None
        if sizes is not None and len(set(sizes.ints)) == 1:
            node.attribute.remove(sizes)


def with_raw_mask(model: Any) -> Any:
    """Returns a copy in which every Attention takes the [batch, length] mask instead of a bias made from it."""
    import onnx
    from onnx import helper

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    if MASK not in [value.name for value in graph.input]:
        return changed
    for node in graph.node:
        if node.op_type == "Attention":
            del node.input[3:]
            node.input.append("mask_int32")
    cast = helper.make_node("Cast", [MASK], ["mask_int32"], to=INT32)
    replace_nodes(graph, [cast, *graph.node])
    remove_unused(graph)
    return changed


def remove_unused(graph: Any) -> None:
    """Removes nodes and constants that no output needs, and all recorded shapes."""
    while True:
        used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
        dead = [node for node in graph.node if not used.intersection(node.output)]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    for constant in [constant for constant in graph.initializer if constant.name not in used]:
        graph.initializer.remove(constant)
    del graph.value_info[:]


def replace_nodes(graph: Any, nodes: Sequence[Any]) -> None:
    """Replaces all nodes of a graph, in place."""
    copies = list(nodes)
    del graph.node[:]
    graph.node.extend(copies)


def read_attribute(node: Any, name: str) -> Any:
    """Returns a node's attribute, None if it has none of this name."""
    return next((each for each in node.attribute if each.name == name), None)


def matches_source(source: Path, model: Any) -> bool:
    """Returns whether the rewritten graph computes the source's outputs on random ids with padding on the right."""
    import onnxruntime

    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4
    quiet.intra_op_num_threads = 1
    try:
        new = onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=["CPUExecutionProvider"])
        old = onnxruntime.InferenceSession(str(source), quiet, providers=["CPUExecutionProvider"])
        for lengths in ((7, 5, 2), (1,), (12, 12)):
            inputs = random_inputs([value.name for value in old.get_inputs()], lengths)
            expected = old.run(None, inputs)[0]
            outputs = new.run(None, {value.name: inputs[value.name] for value in new.get_inputs()})[0]
            if not np.abs(outputs - expected).max() <= ROUNDING:  # also catches NaN
                return False
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors share no class
        logging.getLogger(__name__).debug("joined graph rejected: %s", error)
        return False
    return True


def random_inputs(names: Sequence[str], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns random inputs with rows of the given lengths; ids fit the smallest vocabularies, types are 0."""
    rows, width = len(lengths), max(lengths)
    mask = (np.arange(width) < np.asarray(lengths)[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(2, 10, (rows, width)) * mask
    known = {"input_ids": ids, MASK: mask}
    return {name: known.get(name, np.zeros_like(mask)) for name in names}
