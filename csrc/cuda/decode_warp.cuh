// What a warp of a decode CTA computes: scores of its keys, weights, its half of the output.
#pragma once

#include <math_constants.h>

#include <cfloat>

#include "decode_rows.cuh"
#include "decode_shape.cuh"

namespace lighttransfer::cuda {

// Of two values per lane, one for each of the heads 2t and 2t + 1 with t = lane % 4: reduces both
// over the eight lanes of equal t. Lanes 0 to 7 end with one head each, that of decode_place, so
// that the second value costs one more exchange, not three.
template <class F>
__device__ __forceinline__ float reduce_heads(const float (&x)[2], unsigned lane,
                                              const F& combine) {
  const bool odd = (lane & 4) != 0;
  float own = odd ? x[1] : x[0];
  own = combine(own, shuffle_xor<4>(odd ? x[0] : x[1]));
  own = combine(own, shuffle_xor<8>(own));
  return combine(own, shuffle_xor<16>(own));
}

// A warp of a CTA, and what it carries from tile to tile.
template <class T, class Shape>
struct DecodeWarp {
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr int kGroupTiles = Shape::kGroupTiles;
  using Rows = typename Shape::Rows;

  const StreamingDecodeParams& p;
  const DecodeLaunch& launch;
  const DecodeRow& row;
  const unsigned lane, warp;
  const uint32_t shared;

  __device__ __forceinline__ DecodeWarp(const StreamingDecodeParams& p, const DecodeLaunch& launch,
                                        const DecodeRow& row, uint32_t shared)
      : p(p), launch(launch), row(row), lane(threadIdx.x), warp(threadIdx.y), shared(shared) {}

  // The lane's heads of each n8 tile: 2 * (lane % 4) and the next one.
  float top[kGroupTiles][2];  // greatest score of the CTA's keys so far, times scale_log2
  float sum[kGroupTiles][2];  // of the lane's own keys, as the next two
  float sink[kGroupTiles][2];
  float kept[kGroupTiles][2];
  float out[kGroupTiles][Shape::kWarpDims / 16][4];  // O^T: 16 dims x 8 heads

  // Scores, then weights: key 16 * m + 8 * half + lane / 4, head 8 * n + 2 * (lane % 4) + h is
  // element [n][m][2 * half + h].
  float s[kGroupTiles][kWarpKeys / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[n][h] = -CUDART_INF_F;
        sum[n][h] = sink[n][h] = kept[n][h] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < Shape::kWarpDims / 16; ++d) {
        out[n][d][0] = out[n][d][1] = out[n][d][2] = out[n][d][3] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ uint32_t k_tile() const { return shared + warp * Shape::kWarpTile; }
  __device__ __forceinline__ uint32_t v_tile() const { return k_tile() + Shape::kValues; }
  __device__ __forceinline__ uint32_t q_tile() const {
    return shared + Shape::kQueries + warp * Shape::kWarpQueries;
  }

  // Its keys must have arrived.
  __device__ __forceinline__ void score() {
    const uint32_t k_lane = k_tile() + Rows::lane_rows_first(lane);
    const uint32_t q_lane = q_tile() + Rows::lane_one_row(lane);
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kWarpKeys / 16; ++m) {
        s[n][m][0] = s[n][m][1] = s[n][m][2] = s[n][m][3] = 0.0f;
      }
    }
    static_for<kHeadDim / 32>([&](auto pair) {
      constexpr int kPair = pair * 64;
      uint32_t q[kGroupTiles][4];
      static_for<kGroupTiles>(
          [&](auto n) { load_matrices<n * 8 * Rows::kPitch + kPair>(q[n], q_lane); });
      static_for<kWarpKeys / 16>([&](auto m) {
        constexpr int kRows = m * 16 * Rows::kPitch + kPair;
        static_for<2>([&](auto step) {
          uint32_t k[4];
          load_matrices<kRows + step * 32>(k, k_lane);
#pragma unroll
          for (int n = 0; n < kGroupTiles; ++n) {
            multiply_add<T>(s[n][m], k, q[n][2 * step], q[n][2 * step + 1]);
          }
        });
      });
    });
  }

  __device__ __forceinline__ void hide(uint32_t visible) {
#pragma unroll
    for (int i = 0; i < kWarpKeys / 8; ++i) {
      if (visible >> (i * 8 + lane / 4) & 1) continue;
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) {
        s[n][i / 2][i % 2 * 2] = s[n][i / 2][i % 2 * 2 + 1] = -CUDART_INF_F;
      }
    }
  }

  // The greatest score of either warp's keys, times scale_log2, for each of the lane's heads.
  __device__ __forceinline__ void exchange_tops(float (&greatest)[kGroupTiles][2]) {
    const uint32_t tops = shared + Shape::kTops;
    const auto greater = [](float a, float b) { return fmaxf(a, b); };
    static_for<kGroupTiles>([&](auto n) {
      float own[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        own[h] = fmaxf(fmaxf(s[n][0][h], s[n][0][h + 2]), fmaxf(s[n][1][h], s[n][1][h + 2]));
      }
      const float reduced = reduce_heads(own, lane, greater) * launch.scale_log2;
      if (lane < 8) {
        store_shared<n * 32>(tops + warp * Shape::kHeads * 4 + lane * 4, __float_as_uint(reduced));
      }
    });
    __syncthreads();
    static_for<kGroupTiles>([&](auto n) {
      constexpr int kTile = n * 8;
      static_for<kDecodeWarps>([&](auto w) {
        constexpr int kWarpTops = (w * Shape::kHeads + kTile) * 4;
        static_for<2>([&](auto h) {
          const float other = load_shared<kWarpTops + h * 16>(tops + lane % 4 * 4);
          greatest[n][h] = w == 0 ? other : fmaxf(greatest[n][h], other);
        });
      });
    });
  }

  __device__ __forceinline__ void rescale(const float (&greatest)[kGroupTiles][2]) {
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shrink =
            greatest[n][h] == -CUDART_INF_F ? 1.0f : fast_exp2(top[n][h] - greatest[n][h]);
        sum[n][h] *= shrink;
        if (launch.has_mass != 0) sink[n][h] *= shrink, kept[n][h] *= shrink;
#pragma unroll
        for (int d = 0; d < Shape::kWarpDims / 16; ++d) {
          out[n][d][h] *= shrink;
          out[n][d][h + 2] *= shrink;
        }
      }
    }
  }

  // Scores become weights, in registers and, as operands, in shared memory.
  template <bool kFirst>
  __device__ __forceinline__ void weigh(uint32_t visible) {
    if (visible != kAllKeys) hide(visible);
    float greatest[kGroupTiles][2];
    exchange_tops(greatest);
    if constexpr (!kFirst) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) {
        greatest[n][0] = fmaxf(greatest[n][0], top[n][0]);
        greatest[n][1] = fmaxf(greatest[n][1], top[n][1]);
      }
      rescale(greatest);
    }
    const uint32_t weights = shared + Shape::kWeights + warp * kWarpKeys * 16 + lane * 4;
    static_for<kGroupTiles>([&](auto n) {
      constexpr int kTile = n * Shape::kWeightTile;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[n][h] = greatest[n][h];
        // Without a visible key the weights are 2^-inf, not 2^(-inf + inf).
        const float base = fmaxf(top[n][h], -FLT_MAX);
#pragma unroll
        for (int i = 0; i < kWarpKeys / 8; ++i) {
          float& x = s[n][i / 2][i % 2 * 2 + h];
          x = fast_exp2(fmaf(x, launch.scale_log2, -base));
          sum[n][h] = kFirst && i == 0 ? x : sum[n][h] + x;
        }
      }
      static_for<kWarpKeys / 8>([&](auto i) {
        store_shared<kTile + i * 128>(weights,
                                      pack<T>(s[n][i / 2][i % 2 * 2], s[n][i / 2][i % 2 * 2 + 1]));
      });
    });
  }

  // Adds the weights to the masses of the window's two parts. Keys of slots from `first` on.
  template <bool kFirst>
  __device__ __forceinline__ void add_masses(int first) {
#pragma unroll
    for (int i = 0; i < kWarpKeys / 8; ++i) {
      const int slot = first + i * 8 + lane / 4;
      const bool is_sink = slot < p.window.n_sink;
      const int64_t position = row.ring.position(slot, row.length + 1u);
      const bool is_kept = !is_sink && position > row.length - p.window.n_recent;
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float weight = s[n][i / 2][i % 2 * 2 + h];
          const bool begins = kFirst && i == 0;
          sink[n][h] = (begins ? 0.0f : sink[n][h]) + (is_sink ? weight : 0.0f);
          kept[n][h] = (begins ? 0.0f : kept[n][h]) + (is_kept ? weight : 0.0f);
        }
      }
    }
  }

  // out += V^T P^T over the tile's 64 keys: the warp's dims, all heads. Values and weights of both
  // warps must have arrived.
  template <bool kFirst>
  __device__ __forceinline__ void add_values() {
    const uint32_t v_lane =
        shared + Shape::kValues + Rows::lane_columns_first(lane) + warp * Shape::kWarpDims * 2;
    const uint32_t weights_lane = shared + Shape::kWeights + lane * 16;
    if constexpr (kFirst) {
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
        for (int d = 0; d < Shape::kWarpDims / 16; ++d) {
          out[n][d][0] = out[n][d][1] = out[n][d][2] = out[n][d][3] = 0.0f;
        }
      }
    }
    static_for<kDecodeTile / 32>([&](auto half) {
      constexpr int kKeys = half * 32;
      uint32_t weights[kGroupTiles][4];
      static_for<kGroupTiles>([&](auto n) {
        load_matrices_transposed<n * Shape::kWeightTile + kKeys * 16>(weights[n], weights_lane);
      });
      static_for<2>([&](auto step) {
        constexpr int kRows = (kKeys + step * 16) * Rows::kPitch;
        static_for<Shape::kWarpDims / 16>([&](auto d) {
          uint32_t v[4];
          load_matrices_transposed<kRows + d * 32>(v, v_lane);
#pragma unroll
          for (int n = 0; n < kGroupTiles; ++n) {
            multiply_add<T>(out[n][d], v, weights[n][2 * step], weights[n][2 * step + 1]);
          }
        });
      });
    });
  }

  // Stores the split's sums: this warp's dims, and what its keys add to the weights' sums.
  __device__ __forceinline__ void store_partial(int n_heads) const {
    const unsigned cta = blockIdx.x * gridDim.y + blockIdx.y;
    DecodePartial* const partials =
        launch.partials + ((cta * kDecodeWarps + warp) * Shape::kHeads + lane);
    float* const outs =
        static_cast<float*>(p.workspace) + int64_t{cta} * (Shape::kHeads * kHeadDim);
    const auto plus = [](float a, float b) { return a + b; };
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) {
      DecodePartial* const partial = partials + n * 8;
      const float own_sum = reduce_heads(sum[n], lane, plus);
      if (lane < 8) {
        *reinterpret_cast<float2*>(&partial->top) = {(lane & 4) != 0 ? top[n][1] : top[n][0],
                                                     own_sum};
      }
      if (launch.has_mass != 0) {
        const float own_sink = reduce_heads(sink[n], lane, plus);
        const float own_kept = reduce_heads(kept[n], lane, plus);
        if (lane < 8) *reinterpret_cast<float2*>(&partial->sink) = {own_sink, own_kept};
      }
      const int head = n * 8 + lane % 4 * 2;
      float* const to = outs + (head * kHeadDim + warp * Shape::kWarpDims + lane / 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (head + h >= n_heads) continue;
#pragma unroll
        for (int d = 0; d < Shape::kWarpDims / 16; ++d) {
          to[h * kHeadDim + d * 16] = out[n][d][h];
          to[h * kHeadDim + d * 16 + 8] = out[n][d][h + 2];
        }
      }
    }
  }
};

}  // namespace lighttransfer::cuda
