"""Weights into a module by its own loader, recorded once and repeated without it."""

from parallelkit_torch.placement.sink import LoadedModule

__all__ = ["LoadedModule"]
