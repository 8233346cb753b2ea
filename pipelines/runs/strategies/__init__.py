"""Lightning strategies: how the processes of a training hold the student, exchange gradients and write checkpoints."""
