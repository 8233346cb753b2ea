"""Infrastructure of runs: stages and manifests, processes, signal handling, checkpoints and terminal output."""
