"""One file a target. Each writes, and `verify.py` proves in a fresh process that what was written is the model."""
