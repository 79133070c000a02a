"""LightTransfer (arXiv:2410.13846): a pretrained transformer as a hybrid model, without retraining."""

from . import _library as _library  # loads the ops
from . import ops

__version__ = "0.1.0"
__all__ = ["ops"]
