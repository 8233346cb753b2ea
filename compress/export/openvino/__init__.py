"""Export to OpenVINO's intermediate representation."""
