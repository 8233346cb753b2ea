"""Dynamic int8 for ONNX Runtime: weights and embeddings in 8 bits, activations rounded call by call."""

from pathlib import Path

from compress.export.quiet import quiet

# What is quantized: products, whole attention, and Gather, which is how ONNX looks up embeddings.
OPERATORS = ("MatMul", "Gemm", "Attention", "Gather")


def quantize_int8(source: Path, target: Path) -> None:
    """Writes a float32 ONNX file with int8 weights, one scale an output channel (Attention with 7 bits).

    Activations get a scale in each call, from the smallest and largest value of the tensor. Nothing is calibrated.

    Args:
        source: A file that `fuse` wrote, or any float32 ONNX file.
        target: Where to write.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes noted before the fusion mislead the quantizer
    target.parent.mkdir(parents=True, exist_ok=True)
    with quiet():  # it advises a preprocessing that the export has done
        quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=list(OPERATORS),
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
