"""Memory, work and traffic of a training run on other machines, predicted for every layout."""
