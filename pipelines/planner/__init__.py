"""What a training run will take on machines that aren't here: memory, work and traffic of every layout."""
