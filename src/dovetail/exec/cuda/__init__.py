"""The engine on one NVIDIA GPU: its device, its memory, and the compute lane's part of a step."""
