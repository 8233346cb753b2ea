"""Encoding and batching: token ids, blocks, packing, batch order, shares of processes, the data module."""
