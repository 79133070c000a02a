#include <math_constants.h>

#include "decode_launch.h"
#include "kernels.h"
#include "launch.h"
#include "warp.h"

namespace lighttransfer::cuda {
namespace {

constexpr int kCombineWarps = 4;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// Merges a head's splits, in their order: one warp per (row, query head).
template <class T>
__global__ void __launch_bounds__(32 * kCombineWarps, 1)
    decode_combine_kernel(const StreamingDecodeParams p, int max_splits) {
  const int lane = threadIdx.x % 32;
  const int64_t head = int64_t(blockIdx.x) * kCombineWarps + threadIdx.x / 32;  // of B x H_q
  if (head >= p.batch * p.n_heads) return;
  const int64_t b = head / p.n_heads, h = head - b * p.n_heads;
  const Ring ring = p.ring(b);
  const int64_t capacity = p.cache.capacity();
  int64_t n_slots = p.seq_len[b] < 0 ? 0 : ring.n_slots(int64_t(p.seq_len[b]) + 1);
  if (n_slots > capacity) n_slots = capacity;
  const int keys = decode_keys_per_split(n_slots);
  const int n_splits = static_cast<int>((n_slots + keys - 1) / keys);

  const float* outs = static_cast<const float*>(p.workspace) + head * max_splits * p.head_dim;
  const DecodePartial* partials =
      reinterpret_cast<const DecodePartial*>(static_cast<const float*>(p.workspace) +
                                             decode_n_partials(p) * p.head_dim) +
      head * max_splits;

  constexpr int kPerLane = kDecodeMaxSplits / 32;
  float tops[kPerLane], weights[kPerLane];
  float top = -CUDART_INF_F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int split = i * 32 + lane;
    const DecodePartial partial =
        split < n_splits ? partials[split] : DecodePartial{-CUDART_INF_F, 0.0f, {}};
    tops[i] = partial.top;
    weights[i] = partial.sum;
    top = fmaxf(top, partial.top);
  }
  top = warp_max(top);
  const float base = top == -CUDART_INF_F ? 0.0f : top;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    weights[i] *= expf(tops[i] - base);
    sum += weights[i];
  }
  sum = warp_sum(sum);
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) weights[i] *= inverse;

  T* out = static_cast<T*>(p.out.data) + b * p.out.batch_stride + h * p.out.head_stride;
  for (int d = lane * 4; d - lane * 4 < p.head_dim; d += 128) {
    float4 total = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      for (int split = i * 32; split < min(n_splits, i * 32 + 32); ++split) {
        const float weight = __shfl_sync(0xffffffffu, weights[i], split % 32);
        if (d >= p.head_dim) continue;
        const float4 o = *reinterpret_cast<const float4*>(outs + split * p.head_dim + d);
        total.x += weight * o.x;
        total.y += weight * o.y;
        total.z += weight * o.z;
        total.w += weight * o.w;
      }
    }
    if (d < p.head_dim) {
      *reinterpret_cast<uint2*>(out + d) = {Half<T>::pack(total.x, total.y),
                                            Half<T>::pack(total.z, total.w)};
    }
  }
  if (p.mass != nullptr) {
    float mass[2] = {};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int split = i * 32 + lane;
      if (split >= n_splits) continue;
      mass[0] += weights[i] * partials[split].mass[0];
      mass[1] += weights[i] * partials[split].mass[1];
    }
    mass[0] = warp_sum(mass[0]);
    mass[1] = warp_sum(mass[1]);
    if (lane < 2) p.mass[head * 2 + lane] = lane == 0 ? mass[0] : mass[1];
  }
  if (lane == 0) p.lse[head] = sum > 0.0f ? top + logf(sum) : -CUDART_INF_F;
}

template <class T>
void launch(const StreamingDecodeParams& p, cudaStream_t stream) {
  launch_decode_split<T>(p, stream);
  const int max_splits = decode_max_splits(p.cache.capacity());
  const int64_t n_heads = p.batch * p.n_heads;
  decode_combine_kernel<T><<<static_cast<unsigned>(ceil_div<int64_t>(n_heads, kCombineWarps)),
                             32 * kCombineWarps, 0, stream>>>(p, max_splits);
  check_launch("streaming_decode's combine");
}

}  // namespace

int64_t workspace_bytes(const StreamingDecodeParams& p) {
  return decode_workspace_bytes(p);
}

void run(const StreamingDecodeParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, as_stream(stream));
  launch<__half>(p, as_stream(stream));
}

}  // namespace lighttransfer::cuda
