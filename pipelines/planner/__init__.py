"""What a training will take on machines that aren't here: memory, work and traffic of every layout."""
