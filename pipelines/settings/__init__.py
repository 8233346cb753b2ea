"""Settings of the commands: YAML files, command lines, and the checks that run before torch is imported."""
