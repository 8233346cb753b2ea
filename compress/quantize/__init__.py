"""Weights and activations in few bits: trained as they will be deployed, with the scales they are deployed with."""
