"""Joins distill and compress; the only place with command lines, files, terminals and process groups."""
