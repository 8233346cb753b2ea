"""Settings as they come in: YAML files, the words of a command line, and the rules that refuse them before torch."""
