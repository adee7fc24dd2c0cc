"""Tests that need a GPU. They skip nothing: the marker keeps them from machines without one."""
