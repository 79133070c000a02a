"""Hints to the caches are read and change nothing."""

from __future__ import annotations

import numpy as np

import cudasim


def test_cache_hints_change_nothing() -> None:
    cudasim.load_ptx("""
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry cache_hints(.param .u64 x, .param .u64 y) {
.reg .b64 %a<4>; .reg .b32 %r<8>; .reg .b64 %policy;
ld.param.u64 %a0, [x];
ld.param.u64 %a1, [y];
mov.u32 %r0, %tid.x;
mul.wide.u32 %a2, %r0, 16;
add.u64 %a0, %a0, %a2;
add.u64 %a1, %a1, %a2;
mov.u32 %r1, smem;
mad.lo.u32 %r1, %r0, 16, %r1;
createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;
cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%a0], 16, %policy;
cp.async.wait_all;
ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];
ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %r6, [%a0], %policy;
add.u32 %r2, %r2, %r6;
prefetch.global.L2 [%a0];
st.global.L2::cache_hint.v4.u32 [%a1], {%r2, %r3, %r4, %r5}, %policy;
ret;
}""")
    x, y = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    report = cudasim.kernel("cache_hints").launch(1, 32, x, y, shared=512)
    assert not report.findings, report.findings
    expected = x.copy()
    expected[::4] *= 2
    np.testing.assert_array_equal(y, expected)
