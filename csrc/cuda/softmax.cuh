// Softmax over keys that arrive tile by tile, for the rows that one thread's mma fragments hold.
#pragma once

#include "tensor_core.cuh"

namespace lighttransfer::cuda {

__device__ __forceinline__ float row_reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float row_reduce_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Weights are 2^(scale_log2 * (score - anchor)). Any anchor gives the same quotient in the end, so
// the row's maximum is looked for only in its first tiles; later tiles are weighed right away, and
// their sums, which are needed anyway, tell when a score has outgrown the anchor. Then the anchor
// is raised to the new maximum and the tile weighed again: in practice for the sinks. Weights of up
// to kMostWeight are far from the limits of fp16 and fp32.
//
// What an anchor below the row's maximum costs is precision. Weights just below a power of two are
// rounded finest, and the maximum itself, if it is the anchor, not at all: as the largest weights
// make most of the output, the error of rounding them is a tenth less under the true maximum than
// under another anchor. So a few more tiles than the first are searched.
//
// Row r of a thread's 2 * kFragments rows is row (r % 2) * 8 + lane / 4 of fragment r / 2. Its
// columns are spread over four lanes: the anchor is common to them, the sum is of the thread's own
// columns until reduce_sums().
template <class Element, int kFragments>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kFragments;
  static constexpr float kMostWeight = 4096.0f;

  float anchor[kRows];  // -inf: no visible key so far
  float sum[kRows];
  int tiles_to_raise = 1;   // in how many more tiles to look for the maxima
  const float& scale_log2;  // > 0

  __device__ __forceinline__ explicit OnlineSoftmax(const float& scale) : scale_log2(scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) anchor[r] = -INFINITY, sum[r] = 0.0f;
  }

  // Of the next n tiles, which every row sees whole, half are searched for the maxima, or four.
  __device__ __forceinline__ void before_whole_tiles(int n) {
    tiles_to_raise = min((n + 1) / 2, 4);
  }

  // Turns a tile of scores into weights `p`, packed as A operands, and adds them to the sums;
  // unless `final` only if no row of the warp has outgrown its anchor: else returns false. kMasked:
  // some scores are -inf, possibly all those of a row so far.
  template <bool kMasked, int kN>
  __device__ __forceinline__ bool weigh(const float (&s)[kFragments][kN][4],
                                        uint32_t (&p)[kFragments][kN / 2][4], bool final) {
    float tile_sum[kRows];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      // A row without keys has weights 2^-inf, not 2^(-inf + inf).
      const float shift = kMasked && anchor[r] == -INFINITY ? 0.0f : -anchor[r] * scale_log2;
      tile_sum[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float low = fast_exp2(fmaf(s[m][n][i], scale_log2, shift));
        const float high = fast_exp2(fmaf(s[m][n][i + 1], scale_log2, shift));
        tile_sum[r] += low + high;
        p[m][n / 2][n % 2 * 2 + r % 2] = pack<Element>(low, high);
      }
      outgrown |= tile_sum[r] > kMostWeight;
    }
    if (__any_sync(~0u, outgrown && !final)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += tile_sum[r];
    return true;
  }

  // Raises the anchors to the maximum of the scores, and rescales what was summed under the old
  // ones.
  template <int kN, int kD>
  __device__ __forceinline__ void raise(const float (&s)[kFragments][kN][4],
                                        float (&o)[kFragments][kD][4]) {
    float factor[kRows];
    bool has_output = false, missing = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      float top = fmaxf(s[m][0][i], s[m][0][i + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) top = fmaxf(fmaxf(top, s[m][n][i]), s[m][n][i + 1]);
      const float raised = fmaxf(anchor[r], row_reduce_max(top));
      // -inf - -inf: a row that still has no key has nothing to rescale.
      factor[r] = raised == -INFINITY ? 1.0f : fast_exp2((anchor[r] - raised) * scale_log2);
      has_output |= anchor[r] != -INFINITY;
      missing |= raised == -INFINITY;
      anchor[r] = raised;
      sum[r] *= factor[r];
    }
    if (!__any_sync(~0u, missing)) --tiles_to_raise;
    if (!__any_sync(~0u, has_output)) return;  // the first tile: o is zero
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        o[m][d][0] *= factor[2 * m], o[m][d][1] *= factor[2 * m];
        o[m][d][2] *= factor[2 * m + 1], o[m][d][3] *= factor[2 * m + 1];
      }
    }
  }

  // From sums over the thread's columns to sums over the row.
  __device__ __forceinline__ void reduce_sums() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = row_reduce_sum(sum[r]);
  }

  // Factor that takes a sum made under the anchor `from` to row r's present anchor.
  __device__ __forceinline__ float since(float from, int r) const {
    return from == -INFINITY ? 0.0f : fast_exp2((from - anchor[r]) * scale_log2);
  }

  // Natural-log LSE of a row whose sum over all columns is `total`.
  __device__ __forceinline__ float lse(float row_anchor, float total) const {
    constexpr float kLn2 = 0.693147180559945f;
    return total == 0.0f ? -INFINITY : fmaf(row_anchor * scale_log2, kLn2, logf(total));
  }
};

}  // namespace lighttransfer::cuda
