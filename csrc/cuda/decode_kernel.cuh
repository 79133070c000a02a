// One decode step: each CTA attends one KV head's query heads to one split of one row's keys.
//
// Keys are the mma's M dimension and query heads its N dimension: S^T = K Q^T and O^T = V^T P^T, so
// a group of up to 8 query heads fills an n8 tile and every K/V byte is read once. Each warp owns
// 16 keys of a 64-key tile: it loads, scores and weighs them alone, and warps meet only at the end.
#pragma once

#include <math_constants.h>

#include "decode_rows.cuh"

namespace lighttransfer::cuda {

// A warp's running attention over its keys; heads 8 * tile + 2t, 2t + 1 live in lane t of a group
// of 4.
template <int kHeadDim, int kGroupTiles>
struct WarpState {
  float out[kGroupTiles][kHeadDim / 16][4] = {};  // O^T: 16 dims x 8 heads
  float top[kGroupTiles][2];                      // maximum scaled score so far, per head
  float sum[kGroupTiles][2] = {};                 // this lane's keys only, until the end
  float sink[kGroupTiles][2] = {};
  float kept[kGroupTiles][2] = {};
};

__device__ __forceinline__ float max_over_keys(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}
__device__ __forceinline__ float sum_over_keys(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// Scores and weighs 16 keys: kMass also sorts their weight by the window's parts.
template <class T, int kHeadDim, int kGroupTiles>
__device__ __forceinline__ void attend(const StreamingDecodeParams& p, const DecodeRow& row,
                                       int first_slot, bool first, const char* k_shared,
                                       const char* v_shared,
                                       const uint32_t (&q)[kGroupTiles][kHeadDim / 16][2],
                                       WarpState<kHeadDim, kGroupTiles>& state) {
  using Shape = DecodeShape<kHeadDim, kGroupTiles>;
  const int lane = threadIdx.x % 32;
  float scores[kGroupTiles][4] = {};
  const char* k_row = k_shared + lane % 16 * Shape::kRowBytes + lane / 16 * 16;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t k[4];
    ldmatrix(k, k_row + step * 32);
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) mma<T>(scores[n], k, q[n][step][0], q[n][step][1]);
  }

  const int slot = first_slot + lane / 4;
  bool visible[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = slot + half * 8;
    visible[half] = s < row.n_slots && (s == row.new_slot || key_address(p, row, s).valid);
  }
  uint32_t weights[kGroupTiles][2];
#pragma unroll
  for (int n = 0; n < kGroupTiles; ++n) {
    float (&s)[4] = scores[n];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = visible[i / 2] ? s[i] * p.scale : -CUDART_INF_F;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = max_over_keys(fmaxf(s[h], s[h + 2]));
      if (!first) {
        top = fmaxf(top, state.top[n][h]);
        const float shrink = top == -CUDART_INF_F ? 1.0f : expf(state.top[n][h] - top);
        state.sum[n][h] *= shrink;
        state.sink[n][h] *= shrink;
        state.kept[n][h] *= shrink;
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d) {
          state.out[n][d][h] *= shrink;
          state.out[n][d][h + 2] *= shrink;
        }
      }
      state.top[n][h] = top;
      const float base = top == -CUDART_INF_F ? 0.0f : top;
      s[h] = expf(s[h] - base);
      s[h + 2] = expf(s[h + 2] - base);
      state.sum[n][h] += s[h] + s[h + 2];
    }
    weights[n][0] = transpose8x8(Half<T>::pack(s[0], s[1]));
    weights[n][1] = transpose8x8(Half<T>::pack(s[2], s[3]));
  }
  if (p.mass != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int s = slot + half * 8;
      const bool is_sink = s < p.window.n_sink;
      const bool is_kept = !is_sink && row.ring.position(s, int64_t(row.length) + 1) >
                                           row.length - p.window.n_recent;
#pragma unroll
      for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          state.sink[n][h] += is_sink ? scores[n][half * 2 + h] : 0.0f;
          state.kept[n][h] += is_kept ? scores[n][half * 2 + h] : 0.0f;
        }
      }
    }
  }

  const char* v_row = v_shared + (lane % 8 + lane / 16 * 8) * Shape::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
    uint32_t v[4];
    ldmatrix_transposed(v, v_row + d * 32);
#pragma unroll
    for (int n = 0; n < kGroupTiles; ++n) mma<T>(state.out[n][d], v, weights[n][0], weights[n][1]);
  }
}

// The query heads of the group as mma B fragments, zeros beyond the group and beyond head_dim.
template <class T, int kHeadDim, int kGroupTiles>
__device__ __forceinline__ void load_queries(const StreamingDecodeParams& p, int64_t b,
                                             int64_t first_head, int n_heads,
                                             uint32_t (&q)[kGroupTiles][kHeadDim / 16][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kGroupTiles; ++n) {
    const int head = n * 8 + lane / 4;
    const T* row = static_cast<const T*>(p.q.data) + b * p.q.batch_stride +
                   (first_head + head) * p.q.head_stride + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = step * 16 + half * 8;
        q[n][step][half] =
            head < n_heads && d < p.head_dim ? *reinterpret_cast<const uint32_t*>(row + d) : 0u;
      }
    }
  }
}

// Merges the warps' states through shared memory and stores the split's partial.
template <int kHeadDim, int kGroupTiles>
__device__ __forceinline__ void store_partial(const StreamingDecodeParams& p, int64_t b,
                                              int64_t first_head, int n_heads, char* shared,
                                              WarpState<kHeadDim, kGroupTiles>& state) {
  using Shape = DecodeShape<kHeadDim, kGroupTiles>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* outs = reinterpret_cast<float*>(shared);                         // [warp][head][kOutPitch]
  float4* states = reinterpret_cast<float4*>(shared + Shape::kOutBytes);  // [warp][head]
  __syncthreads();  // every warp has read its keys: their memory is free
#pragma unroll
  for (int n = 0; n < kGroupTiles; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_over_keys(state.sum[n][h]);
      float sink = 0.0f, kept = 0.0f;
      if (p.mass != nullptr) {
        sink = sum_over_keys(state.sink[n][h]);
        kept = sum_over_keys(state.kept[n][h]);
      }
      const int head = n * 8 + lane % 4 * 2 + h;
      if (lane < 4) states[warp * Shape::kHeads + head] = {state.top[n][h], sum, sink, kept};
      float* out = outs + (warp * Shape::kHeads + head) * Shape::kOutPitch + lane / 4;
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        out[d * 16] = state.out[n][d][h];
        out[d * 16 + 8] = state.out[n][d][h + 2];
      }
    }
  }
  __syncthreads();

  const int max_splits = gridDim.y;
  float* partial_outs = static_cast<float*>(p.workspace);
  DecodePartial* partials =
      reinterpret_cast<DecodePartial*>(partial_outs + decode_n_partials(p) * p.head_dim);
  const int vectors = static_cast<int>(p.head_dim) / 4;
  for (int i = threadIdx.x; i < n_heads * vectors; i += kDecodeThreads) {
    const int head = i / vectors, vector = i - head * vectors;
    float4 s[kDecodeWarps];
    float top = -CUDART_INF_F;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      s[w] = states[w * Shape::kHeads + head];
      top = fmaxf(top, s[w].x);
    }
    const float base = top == -CUDART_INF_F ? 0.0f : top;
    float sum = 0.0f, sink = 0.0f, kept = 0.0f;
    float4 out = {};
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float weight = expf(s[w].x - base);
      sum += weight * s[w].y;
      sink += weight * s[w].z;
      kept += weight * s[w].w;
      const float4 o = *reinterpret_cast<const float4*>(
          outs + (w * Shape::kHeads + head) * Shape::kOutPitch + vector * 4);
      out.x += weight * o.x;
      out.y += weight * o.y;
      out.z += weight * o.z;
      out.w += weight * o.w;
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int64_t index = (b * p.n_heads + first_head + head) * max_splits + blockIdx.y;
    reinterpret_cast<float4*>(partial_outs + index * p.head_dim)[vector] = {
        out.x * inverse, out.y * inverse, out.z * inverse, out.w * inverse};
    if (vector == 0) {
      partials[index] = {top, sum, {sink * inverse, kept * inverse}};
    }
  }
}

// Grid: x = rows x KV heads x groups of kHeads query heads, y = splits.
template <class T, int kHeadDim, int kGroupTiles>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_split_kernel(const StreamingDecodeParams p) {
  using Shape = DecodeShape<kHeadDim, kGroupTiles>;
  extern __shared__ __align__(16) char shared[];
  const int group = static_cast<int>(p.n_heads / p.n_kv_heads);
  const int n_groups = (group + Shape::kHeads - 1) / Shape::kHeads;
  const int part = blockIdx.x % n_groups;
  const int pair = blockIdx.x / n_groups;
  const DecodeRow row = decode_row(p, pair / p.n_kv_heads, pair % p.n_kv_heads);

  const int keys_per_split = decode_keys_per_split(row.n_slots);
  const int begin = blockIdx.y * keys_per_split;
  if (begin >= row.n_slots) return;
  const int end = min(row.n_slots, begin + keys_per_split);
  const int64_t first_head = row.kv_head * group + part * Shape::kHeads;
  const int n_heads = min(Shape::kHeads, group - part * Shape::kHeads);

  const int warp = threadIdx.x / 32;
  const auto k_tile = [&](int stage) {
    return shared + stage * 2 * Shape::kTileBytes + warp * kWarpKeys * Shape::kRowBytes;
  };
  const auto v_tile = [&](int stage) { return k_tile(stage) + Shape::kTileBytes; };
  const int first_slot = begin + warp * kWarpKeys;
  load_keys<T, kHeadDim>(p, row, first_slot, k_tile(0), v_tile(0));
  const int new_offset = row.new_slot - begin;
  if (part == 0 && new_offset >= 0 && row.new_slot < end &&
      new_offset % kDecodeTile / kWarpKeys == warp) {
    store_new_token<T>(p, row);
  }
  uint32_t q[kGroupTiles][kHeadDim / 16][2];
  load_queries<T, kHeadDim, kGroupTiles>(p, row.b, first_head, n_heads, q);

  WarpState<kHeadDim, kGroupTiles> state;
#pragma unroll
  for (int n = 0; n < kGroupTiles; ++n) state.top[n][0] = state.top[n][1] = -CUDART_INF_F;
  int stage = 0;
  for (int tile = begin; tile < end; tile += kDecodeTile) {
    const int slot = tile + warp * kWarpKeys;
    if (tile + kDecodeTile < end) {
      load_keys<T, kHeadDim>(p, row, slot + kDecodeTile, k_tile(stage ^ 1), v_tile(stage ^ 1));
      cute::cp_async_wait<2>();
    } else {
      cute::cp_async_wait<0>();
    }
    __syncwarp();  // the other lanes' copies
    attend<T, kHeadDim, kGroupTiles>(p, row, slot, tile == begin, k_tile(stage), v_tile(stage), q,
                                     state);
    __syncwarp();  // all lanes have read before the stage is filled again
    stage ^= 1;
  }
  store_partial<kHeadDim, kGroupTiles>(p, row.b, first_head, n_heads, shared, state);
}

}  // namespace lighttransfer::cuda
