"""Code shared by all export targets: target names, the source model, comparison of products."""
