"""Models: configs, weights from every supported format, one file per architecture."""

from slipstream.models.config import ModelConfig
from slipstream.models.loader import LoadedModel, load_model
from slipstream.models.protocol import Model

__all__ = ["LoadedModel", "Model", "ModelConfig", "load_model"]
