"""PyTorch for parallelkit. The plugin's hooks are in `parallelkit_torch.plugin`.

Importing this package imports no torch; each module below it that does, says so by its name
being imported.
"""
