"""DeepSpeed's names for a model as a list of layers: ``from dtlib.pipe import LayerSpec, PipelineModule``."""

from dtlib.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
