"""Checkpoints: of the model, not of the run that wrote them."""
