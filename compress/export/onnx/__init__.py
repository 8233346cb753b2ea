"""Export to ONNX files for ONNX Runtime: graphs, fusion, int8, integer products, decoders."""
