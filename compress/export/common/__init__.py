"""What all export targets share: targets by name, the source model, parity of products."""
