"""Data, checkpoints and outputs at the URL of an object store, worked on in a folder of this machine."""
