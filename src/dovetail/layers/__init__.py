"""The building blocks of models: modules that hold parameters and call kernels."""
