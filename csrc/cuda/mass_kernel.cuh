// The mass of the last queries on the kept keys, from their known LSE: scores on tensor cores, one
// exponential each, no softmax and no values.
#pragma once

#include <math_constants.h>

#include "../params.h"
#include "padded_rows.cuh"

namespace lighttransfer::cuda {

constexpr int kMassWarps = 4;
constexpr int kMassThreads = 32 * kMassWarps;
constexpr int kMassRows = 16 * kMassWarps;  // (query, head of the KV head's group) pairs of a CTA
constexpr int kMassKeys = 64;               // of a tile
constexpr int kMassStages = 2;

template <int kHeadDim>
struct MassShape {
  using Rows = PaddedRows<kHeadDim>;
  static constexpr int kTileBytes = kMassKeys * Rows::kPitch;
  static constexpr int kSharedBytes = kMassStages * kTileBytes;
};

// One row of the mma's M dimension: a query of one head.
struct MassRow {
  int64_t query, head;
  bool valid;
};

__device__ __forceinline__ MassRow mass_row(const RetainedMassParams& p, int64_t kv_head,
                                            int index) {
  const int64_t group = p.n_heads / p.n_kv_heads;
  const int64_t query = index / group;
  return {query, kv_head * group + (index - query * group), query < p.n_queries};
}

// Starts the copy of a tile of kept keys; each warp brings 16 of them.
template <class Rows>
__device__ __forceinline__ void load_kept_keys(const char* keys, int64_t token_bytes,
                                               const KeptPositions& kept, int64_t first,
                                               uint32_t shared,
                                               const typename Rows::ChunkBytes& bytes) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t to = shared + warp * 16 * Rows::kPitch + Rows::offset(lane);
  static_for<16 / Rows::kRowsPerPass>([&](auto pass) {
    const int64_t index = first + warp * 16 + pass * Rows::kRowsPerPass + Rows::row(lane);
    const bool exists = index < kept.size();
    const char* row = keys + (exists ? kept[index] : 0) * token_bytes;
    Rows::template copy<pass>(to, row + 2 * Rows::col(lane), bytes, exists);
  });
  commit_copies();
}

// The warp's 16 rows of q as mma A fragments, zeros where there is no row or no dimension.
template <class T, int kHeadDim>
__device__ __forceinline__ void load_mass_queries(const RetainedMassParams& p, int64_t b,
                                                  const MassRow (&rows)[2],
                                                  uint32_t (&q)[kHeadDim / 16][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const MassRow& r = rows[half];
    const T* row = static_cast<const T*>(p.q.data) + b * p.q.batch_stride +
                   r.query * p.q.token_stride + r.head * p.q.head_stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int d = step * 16 + side * 8;
        q[step][side * 2 + half] =
            r.valid && d < p.head_dim ? *reinterpret_cast<const uint32_t*>(row + d) : 0u;
      }
    }
  }
}

// Grid: x = rows x KV heads x tiles of kMassRows.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kMassThreads, 1)
    retained_mass_kernel(const RetainedMassParams p) {
  using Shape = MassShape<kHeadDim>;
  using Rows = typename Shape::Rows;
  extern __shared__ __align__(16) char shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  const int64_t n_rows = p.n_queries * (p.n_heads / p.n_kv_heads);
  const int n_tiles = static_cast<int>((n_rows + kMassRows - 1) / kMassRows);
  const int row_tile = blockIdx.x % n_tiles;
  const int64_t pair = blockIdx.x / n_tiles;
  const int64_t kv_head = pair % p.n_kv_heads, b = pair / p.n_kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int64_t start = p.seq_start == nullptr ? 0 : p.seq_start[b];
  start = start < 0 ? 0 : (start > p.n_keys ? p.n_keys : start);
  const int64_t length = p.n_keys - start;  // the row's real tokens
  const KeptPositions kept{0, p.window.n_sink < length ? p.window.n_sink : length,
                           p.window.recent_begin(length), length};
  const char* keys =
      static_cast<const char*>(p.k.data) +
      2 * (b * p.k.batch_stride + start * p.k.token_stride + kv_head * p.k.head_stride);
  const int64_t token_bytes = 2 * p.k.token_stride;
  const typename Rows::ChunkBytes bytes(lane, static_cast<int>(p.head_dim));

  MassRow rows[2];
  float base[2];  // lse; +inf for a row without keys, whose weights are then 0
  int64_t position[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = mass_row(p, kv_head, row_tile * kMassRows + warp * 16 + lane / 4 + half * 8);
    const MassRow& r = rows[half];
    const float lse =
        r.valid
            ? p.lse[b * p.lse_strides[0] + r.head * p.lse_strides[1] + r.query * p.lse_strides[2]]
            : -CUDART_INF_F;
    base[half] = lse == -CUDART_INF_F ? CUDART_INF_F : lse;
    position[half] = length - p.n_queries + r.query;
  }
  uint32_t q[kHeadDim / 16][4];
  if (kept.size() > 0) load_kept_keys<Rows>(keys, token_bytes, kept, 0, shared, bytes);
  load_mass_queries<T, kHeadDim>(p, b, rows, q);

  float mass[2][2] = {};  // [half][sinks, other kept keys]
  int stage = 0;
  for (int64_t first = 0; first < kept.size(); first += kMassKeys) {
    const bool more = first + kMassKeys < kept.size();
    if (more) {
      load_kept_keys<Rows>(keys, token_bytes, kept, first + kMassKeys,
                           shared + (stage ^ 1) * Shape::kTileBytes, bytes);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t tile = shared + stage * Shape::kTileBytes + Rows::lane_columns_first(lane);
    static_for<kMassKeys / 16>([&](auto n) {
      constexpr int kRows = n * 16 * Rows::kPitch;
      float scores[2][4] = {};
      static_for<kHeadDim / 16>([&](auto step) {
        uint32_t k[4];
        load_matrices<kRows + step * 32>(k, tile);
        multiply_add<T>(scores[0], q[step], k[0], k[1]);
        multiply_add<T>(scores[1], q[step], k[2], k[3]);
      });
      // Most keys are no sinks and lie before every query: no test per key.
      const int64_t index = first + n * 16;
      const bool plain = index >= kept.sink_end && index + 15 < kept.size() &&
                         kept[index + 15] <= length - p.n_queries;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i / 2;
          const float weight = fast_exp(fmaf(scores[m][i], p.scale, -base[half]));
          if (plain) {
            mass[half][1] += weight;
            continue;
          }
          const int64_t own = index + m * 8 + lane % 4 * 2 + i % 2;
          if (own >= kept.size() || kept[own] > position[half]) continue;
          const bool sink = own < kept.sink_end;
          mass[half][0] += sink ? weight : 0.0f;
          mass[half][1] += sink ? 0.0f : weight;
        }
      }
    });
    __syncthreads();  // all warps have read the stage before it is filled again
    stage ^= 1;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float& m = mass[half][part];
      m += shuffle_xor<1>(m);
      m += shuffle_xor<2>(m);
    }
    const MassRow& r = rows[half];
    if (lane % 4 == 0 && r.valid) {
      reinterpret_cast<float2*>(p.mass)[(b * p.n_heads + r.head) * p.n_queries + r.query] = {
          mass[half][0], mass[half][1]};
    }
  }
}

}  // namespace lighttransfer::cuda
