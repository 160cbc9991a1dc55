"""MindSpore for parallelkit. The plugin is `parallelkit_mindspore.plugin`."""

__version__ = "0.1.0"
