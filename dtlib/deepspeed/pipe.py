"""DeepSpeed's names for a model as a list of layers: ``LayerSpec``, ``TiedLayerSpec``, ``PipelineModule``."""

from dtlib.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
