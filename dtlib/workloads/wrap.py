"""A model from elsewhere in the place of a workload's own: of ``transformers``, of Lightning, or any ``nn.Module``."""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from dtlib.errors import DtlibError
from dtlib.workloads import text
from dtlib.workloads.workload import Workload


def with_model(workload: Workload, model: nn.Module) -> Workload:
    """The same task with another model. It has no ``layers``, so it cannot be cut into a pipeline.

    Args:
        model: takes what the workload's own takes and gives what it gives; or a model of ``transformers``, such as
            ``AutoModelForSeq2SeqLM.from_config(...)``, ``AutoModelForCausalLM...``, ``AutoModelForImageClassification
            ...``; or a ``LightningModule``, of which ``forward`` is used: the loss is the workload's, and optimizer and
            devices are the config's, so that ``training_step`` and ``configure_optimizers`` are not called.

    Raises:
        DtlibError: for what is no module, for a model of ``transformers`` with fewer tokens than the tokenizer or of a
            kind that neither classifies images nor writes text, and for a ``LightningModule`` without ``forward``.
    """
    if not isinstance(model, nn.Module):
        raise DtlibError(f"with_model() takes an nn.Module and got a {type(model).__name__}.")
    if _is_of(model, "transformers"):
        model = _from_transformers(workload, model)
    elif _is_of(model, "pytorch_lightning", "lightning") and not _own_forward(model):
        raise DtlibError(f"{type(model).__name__} has no forward(): give it one that takes inputs and gives outputs.")
    return replace(workload, model=model, layers=[])


def _is_of(model, *packages: str) -> bool:
    return any(kind.__module__.split(".")[0] in packages for kind in type(model).__mro__)


def _own_forward(model) -> bool:
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return owner.__module__.split(".")[0] not in ("pytorch_lightning", "lightning", "torch")


def _from_transformers(workload: Workload, model) -> nn.Module:
    if workload.name == "vision":
        return ImageClassifier(model)
    tokens: dict = vars(workload.train)
    size, needed = getattr(model.config, "vocab_size", None), tokens["tokenizer"].get_vocab_size()
    if size is None:
        raise DtlibError(f"{type(model).__name__} has no vocabulary: it cannot write summaries.")
    if size < needed:
        raise DtlibError(
            f"vocab_size of the model's config is {size}, and the tokenizer has {needed} tokens: give as many."
        )
    return (EncoderDecoder if model.config.is_encoder_decoder else DecoderOnly)(model)


class ImageClassifier(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


class EncoderDecoder(nn.Module):
    """Log-probabilities (batch, T, vocabulary) from ``(source, prefix)``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        source, prefix = inputs
        logits = self.model(input_ids=source, attention_mask=source != text.PAD, decoder_input_ids=prefix).logits
        return functional.log_softmax(logits.float(), 2)


class DecoderOnly(EncoderDecoder):
    """The same from a model that reads on: the source, then the prefix."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        source, prefix = inputs
        tokens = functional.pad(source, (0, prefix.shape[1]))
        tokens[:, source.shape[1] :] = prefix
        seen = tokens != text.PAD
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = self.model(input_ids=tokens, attention_mask=seen, position_ids=places).logits[:, source.shape[1] :]
        return functional.log_softmax(logits.float(), 2)
