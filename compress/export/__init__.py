"""Model export, one file per target format, and verification of the exported files in a fresh process."""
