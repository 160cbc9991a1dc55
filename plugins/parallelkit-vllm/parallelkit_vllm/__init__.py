"""vLLM for parallelkit. The plugin is `parallelkit_vllm.plugin`."""

__version__ = "0.1.0"
