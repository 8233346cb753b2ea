"""The stages of a run, one file each, and what several of them share."""
