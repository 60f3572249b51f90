"""Written by CMake."""

TORCH_VERSION: str
