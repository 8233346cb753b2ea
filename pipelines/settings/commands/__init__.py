"""Settings of each command, without torch."""
