"""OpenVINO's intermediate representation."""
