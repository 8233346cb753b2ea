"""How a model lies on several processes: tensor parallelism, FSDP2 and pipelines on a given mesh."""
