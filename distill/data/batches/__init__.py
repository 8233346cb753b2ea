"""Encoding and batching: token ids, blocks, packing, batch order, sharding, the data module."""
