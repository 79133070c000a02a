"""Runs in the environment that tests/wheel.sh installs a wheel into, where torch is:
``python -I - SITE_PACKAGES < tests/wheel_proof.py`` from a folder that holds no source.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import lighttransfer
from lighttransfer import ops

site = Path(sys.argv[1])
assert Path(lighttransfer.__file__).is_relative_to(site), lighttransfer.__file__
loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("/_C.so")}
assert "transformers" not in sys.modules
assert loaded == {str(site / "lighttransfer" / "_C.so")}, loaded

q = torch.randn(2, 70, 4, 64, dtype=torch.float64)
k, v = (torch.randn(2, 70, 2, 64, dtype=torch.float64) for _ in range(2))
out, lse, mass = ops.prefill_attn_lazy(q.float(), k.float(), v.float(), n_sink=4, n_recent=16, n_last=8)
want = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
torch.testing.assert_close(out.double(), want.transpose(1, 2), atol=1e-5, rtol=1e-5)
assert lse.shape == (2, 4, 70)
assert mass.shape == (2, 4, 8, 2)

for name in ("prefill_attn", "prefill_attn_lazy", "retained_mass", "streaming_decode", "compact_kv_", "merge_states"):
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lighttransfer::{name}", key), (name, key)
print(f"lighttransfer {lighttransfer.__version__} runs on torch {torch.__version__}")
