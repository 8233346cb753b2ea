"""Distribution of a model over processes: tensor parallelism, FSDP2 and pipelines on a given mesh."""
