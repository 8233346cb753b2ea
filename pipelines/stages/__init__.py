"""The stages of a run, one file each, and the helpers that several stages share."""
