"""Token ids and batches of them: encoding, blocks, packing, order, shares of processes, the data module."""
