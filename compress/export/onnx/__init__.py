"""ONNX files for ONNX Runtime: the graph, its fusions, int8, integer products, decoders."""
