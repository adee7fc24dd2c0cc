"""Weights: from a checkpoint on disk into the parameters of a model."""
