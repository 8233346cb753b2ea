"""What launchers run: a torchrun line, manifests and scripts, and the process that each node starts.

Nothing here is a scheduler. Each module writes the files of one launcher from a `ClusterJob`; `node` is what most of
them start on every machine.
"""
