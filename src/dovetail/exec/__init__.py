"""Turns plans into forwards: lanes, device state, staging, the executor."""
