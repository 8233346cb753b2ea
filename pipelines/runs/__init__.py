"""The engine of a run: stages and their manifests, processes, stops, checkpoints, the terminal."""
