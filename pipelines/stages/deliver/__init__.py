"""Stages that export, verify, measure and report."""
