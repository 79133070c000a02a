"""The ops: ``torch.ops.lighttransfer.*`` with types, documentation and argument errors.

Activations are ``[B, S, H, D]`` with unit stride in ``D``, any other strides and any storage offset; outputs are
contiguous. fp16 and bf16 everywhere, fp32 also on the CPU. ``D`` is a multiple of 8 up to 256, and the number of
KV heads divides the number of query heads. Every op is registered for the CPU and for CUDA, has a fake kernel
for ``torch.compile``, and raises ``ValueError`` or ``TypeError`` with the argument's name, the rule and the
value that broke it.
"""

from .attention import prefill_attn, prefill_attn_lazy
from .decode import streaming_decode
from .isa import cpu_isa
from .kv import append_kv_, compact_kv_, gather_kv
from .mass import lazy_ratio, retained_mass
from .state import merge_states

__all__ = [
    "append_kv_",
    "compact_kv_",
    "cpu_isa",
    "gather_kv",
    "lazy_ratio",
    "merge_states",
    "prefill_attn",
    "prefill_attn_lazy",
    "retained_mass",
    "streaming_decode",
]
