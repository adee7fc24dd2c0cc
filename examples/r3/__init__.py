"""What the examples of routing replay share: a task, a toy model, and a trainer."""
