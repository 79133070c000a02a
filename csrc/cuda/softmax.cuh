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

// Weights are 2^(scale_log2 * score + shift). Any shift gives the same quotient in the end, so the
// row's maximum, which would have the weight 1, is looked for only in its first tiles. Later tiles
// are weighed right away, and their sums, which are needed anyway, tell when weights have grown:
// then the shift is lowered. That is in time for all but scores that leap within one tile by so
// much that the element type does not hold their weight.
//
// What a shift for another score than the row's maximum costs is precision. Weights just below a
// power of two are rounded finest, and the maximum itself, if its weight is 1, not at all: as the
// largest weights make most of the output, the error of rounding them is a tenth less then. So a
// few more tiles than the first are searched.
//
// Row r of a thread's 2 * kFragments rows is row (r % 2) * 8 + lane / 4 of fragment r / 2. Its
// columns are spread over four lanes: the shift is common to them, the sum is of the thread's own
// columns until reduce_sums().
template <class Element, int kFragments>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kFragments;
  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  // A row whose sum is greater has outgrown its shift. fp16 has bits for both: weights that grow
  // on, and those of very long rows, which are small after their shift has been lowered.
  static constexpr float kMostSum = 2048.0f;
  static constexpr float kLoweredSum = 128.0f;
  // A sum beyond it may hold weights that were infinite: fp16 holds 65504. bf16 holds as much as
  // fp32, but the products with V have to fit too.
  static constexpr float kMostWeight = kHalf ? 65504.0f : 0x1p64f;
  // The sinks lie in the last tile and have by far the largest scores. In fp16 that is too large a
  // leap.
  static constexpr bool kFindsLastMaximum = kHalf;

  float shift[kRows];  // +inf: no visible key so far, -inf: overflowed
  float sum[kRows];
  int tiles_to_raise;       // in how many more tiles to look for the maxima
  const float& scale_log2;  // > 0

  __device__ __forceinline__ explicit OnlineSoftmax(const float& scale) : scale_log2(scale) {
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) shift[r] = INFINITY, sum[r] = 0.0f;
    tiles_to_raise = 1;
  }

  // Of the next n tiles, which every row sees whole, half are searched for the maxima, or four, or
  // all.
  __device__ __forceinline__ void before_whole_tiles(int n, bool all) {
    tiles_to_raise = all ? n : min((n + 1) / 2, 4);
  }

  // Turns a tile of scores into weights `p`, packed as A operands, and adds them to `sums`.
  // kMasked: some scores are -inf, possibly all those of a row so far.
  template <bool kMasked, int kN>
  __device__ __forceinline__ void weigh(const float (&s)[kFragments][kN][4],
                                        uint32_t (&p)[kFragments][kN / 2][4],
                                        float (&sums)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      // A row without keys has weights 2^-inf, not 2^(-inf + inf).
      const float by = kMasked && shift[r] == INFINITY ? 0.0f : shift[r];
      float tile_sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float low = fast_exp2(fmaf(s[m][n][i], scale_log2, by));
        const float high = fast_exp2(fmaf(s[m][n][i + 1], scale_log2, by));
        tile_sum += low + high;
        p[m][n / 2][n % 2 * 2 + r % 2] = pack<Element>(low, high);
      }
      sums[r] += tile_sum;
    }
  }

  // The weights of a masked tile, unless some row of the warp has outgrown its shift and `final` is
  // false: then returns false, and nothing but p has changed.
  template <int kN>
  __device__ __forceinline__ bool weigh_masked(const float (&s)[kFragments][kN][4],
                                               uint32_t (&p)[kFragments][kN / 2][4], bool final) {
    float tile_sum[kRows] = {};
    weigh<true>(s, p, tile_sum);
    if (outgrown(tile_sum) && !final) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += tile_sum[r];
    return true;
  }

  // Is a sum of any of the warp's rows beyond kMostSum?
  static __device__ __forceinline__ bool outgrown(const float (&sums)[kRows]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= sums[r] > kMostSum;
    return __any_sync(~0u, any);
  }

  // Lowers the shifts of rows that have outgrown them to where their sums are kLoweredSum. Where a
  // weight may have been infinite, what was summed is worth nothing: such a row has overflowed.
  template <int kD>
  __device__ __forceinline__ void settle(float (&o)[kFragments][kD][4]) {
    if (!outgrown(sum)) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float top = row_reduce_max(sum[r]);
      const float to = top > kMostWeight ? -INFINITY : shift[r] - __log2f(top / kLoweredSum);
      if (top > kMostSum) lower(r, to, o);
    }
  }

  __device__ __forceinline__ bool overflowed() const {
    bool any = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) any |= shift[r] == -INFINITY;
    return any;
  }

  // Lowers the shifts to those of the maxima of the scores.
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
      const float to = fminf(shift[r], -row_reduce_max(top) * scale_log2);
      factor[r] = rescale(shift[r], to);
      has_output |= shift[r] != INFINITY;
      missing |= to == INFINITY;
      shift[r] = to;
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

  // Rescales what row r has summed to a lower shift.
  template <int kD>
  __device__ __forceinline__ void lower(int r, float to, float (&o)[kFragments][kD][4]) {
    const float factor = rescale(shift[r], to);
    shift[r] = to;
    sum[r] *= factor;
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      o[r / 2][d][r % 2 * 2] *= factor, o[r / 2][d][r % 2 * 2 + 1] *= factor;
    }
  }

  // Factor that takes a sum made under one shift to another; a row that had no key has no sum.
  static __device__ __forceinline__ float rescale(float from, float to) {
    return from == INFINITY ? 0.0f : fast_exp2(to - from);
  }

  // From sums over the thread's columns to sums over the row.
  __device__ __forceinline__ void reduce_sums() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = row_reduce_sum(sum[r]);
  }

  // Natural-log LSE of a row whose sum over all columns is `total`.
  static __device__ __forceinline__ float lse(float row_shift, float total) {
    constexpr float kLn2 = 0.693147180559945f;
    return total == 0.0f ? -INFINITY : fmaf(-row_shift, kLn2, logf(total));
  }
};

}  // namespace lighttransfer::cuda
