"""What `bench_vllm.py` adds to vLLM's workers: to load safetensors that came as bytes.

vLLM imports it by name in the workers, as `worker_extension_cls`.
"""

from __future__ import annotations

from typing import Any


class BytesExtension:
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any

    def load_bytes(self, data: bytes) -> None:
        """Load a safetensors file given as bytes, layer by layer as vLLM's own reload does."""
        from safetensors.torch import load
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        model.load_weights(load(bytes(data)).items())
        finalize_layerwise_reload(model, self.model_runner.model_config)
