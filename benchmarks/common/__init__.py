"""What several benchmarks use: their results, tables, timing and commands."""
