"""Model families, built from layers."""
