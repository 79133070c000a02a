#include <math_constants.h>

#include <cfloat>

#include "decode_launch.h"
#include "decode_rows.cuh"
#include "kernels.h"
#include "launch.h"

namespace lighttransfer::cuda {
namespace {

constexpr int kCombineWarps = 4;

template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
  if constexpr (kLanes == 32) x = fmaxf(x, shuffle_xor<16>(x));
  x = fmaxf(x, shuffle_xor<8>(x));
  x = fmaxf(x, shuffle_xor<4>(x));
  x = fmaxf(x, shuffle_xor<2>(x));
  return fmaxf(x, shuffle_xor<1>(x));
}
template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
  if constexpr (kLanes == 32) x += shuffle_xor<16>(x);
  x += shuffle_xor<8>(x);
  x += shuffle_xor<4>(x);
  x += shuffle_xor<2>(x);
  return x + shuffle_xor<1>(x);
}

// What a launch derives from its params, once for all CTAs.
struct CombineLaunch {
  DecodeHeads heads;
  unsigned n_heads, n_kv_heads, n_sink;
  unsigned n_rows;  // heads of all rows
  int head_dim;
  uint32_t capacity;
  unsigned max_splits;
  const DecodePartial* partials;
};

// Merges a head's splits, in their order. kLanes lanes hold a (row, query head), four elements of
// head_dim a lane.
template <class T, int kHeadDim, int kLanes>
__global__ void __launch_bounds__(32 * kCombineWarps, 1)
    decode_combine_kernel(const StreamingDecodeParams p, const CombineLaunch launch) {
  constexpr int kHeads = 32 / kLanes * kCombineWarps;
  __shared__ float shared_weights[kHeads][kDecodeMaxSplits + 16];  // two heads, other banks
  const DecodeHeads& heads = launch.heads;
  const unsigned lane = threadIdx.x % kLanes, own = threadIdx.x / kLanes;
  // The last CTA's spare lanes repeat the last head, and store nothing.
  unsigned index = blockIdx.x * kHeads + own;
  const bool stores = index < launch.n_rows;
  index = min(index, launch.n_rows - 1);
  const unsigned b = index / launch.n_heads, h = index - b * launch.n_heads;
  const unsigned kv_head = h / heads.group, in_group = h - kv_head * heads.group;
  const unsigned part = in_group / heads.per_part, in_part = in_group - part * heads.per_part;
  const unsigned first_split =
      ((b * launch.n_kv_heads + kv_head) * heads.n_parts + part) * launch.max_splits;
  const DecodeRow row(p, launch.n_sink, launch.capacity, b, kv_head);
  const unsigned keys = decode_keys_per_split(row.n_slots);
  const unsigned n_splits = (row.n_slots + keys - 1) / keys;
  const unsigned split_partials = kDecodeWarps * heads.per_part;
  const DecodePartial* partials =
      launch.partials + ((first_split + lane) * split_partials + decode_place(in_part));
  float* weights = shared_weights[own];

  // The splits' weights: 2^(top - greatest top), for all that the split has summed.
  float top = -FLT_MAX;
  const DecodePartial* partial = partials;
  for (unsigned i = lane; i < n_splits; i += kLanes, partial += kLanes * split_partials) {
    top = fmaxf(top, partial->top);
  }
  top = group_max<kLanes>(top);
  float sum = 0.0f, sink = 0.0f, kept = 0.0f;
  partial = partials;
  for (unsigned i = lane; i < n_splits; i += kLanes, partial += kLanes * split_partials) {
    const float weight = fast_exp2(partial->top - top);
    weights[i] = weight;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      sum += weight * partial[w * heads.per_part].sum;
    }
    if (p.mass == nullptr) continue;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      sink += weight * partial[w * heads.per_part].sink;
      kept += weight * partial[w * heads.per_part].kept;
    }
  }
  sum = group_sum<kLanes>(sum);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  __syncwarp();  // the other lanes' weights

  const unsigned split_floats = heads.per_part * kHeadDim;
  T* out = static_cast<T*>(p.out.data) + (b * p.out.batch_stride + h * p.out.head_stride);
  static_for<(kHeadDim + 4 * kLanes - 1) / (4 * kLanes)>([&](auto step) {
    const unsigned d = (step * kLanes + lane) * 4;
    if (d >= launch.head_dim) return;
    const float* from = static_cast<const float*>(p.workspace) +
                        (int64_t(first_split) * split_floats + (in_part * kHeadDim + d));
    float4 total = {};
#pragma unroll 8
    for (unsigned i = 0; i < n_splits; ++i, from += split_floats) {
      const float weight = weights[i];
      const float4 o = *reinterpret_cast<const float4*>(from);
      total.x += weight * o.x;
      total.y += weight * o.y;
      total.z += weight * o.z;
      total.w += weight * o.w;
    }
    if (stores) {
      *reinterpret_cast<uint2*>(out + d) = {pack<T>(total.x * inverse, total.y * inverse),
                                            pack<T>(total.z * inverse, total.w * inverse)};
    }
  });
  if (p.mass != nullptr) {
    sink = group_sum<kLanes>(sink) * inverse;
    kept = group_sum<kLanes>(kept) * inverse;
    if (lane < 2 && stores) p.mass[int64_t(index) * 2 + lane] = lane == 0 ? sink : kept;
  }
  if (lane == 0 && stores) {
    p.lse[index] = sum == 0.0f ? -CUDART_INF_F : (top + log2f(sum)) * 0.6931471805599453f;
  }
}

template <class T, int kHeadDim>
void combine(const StreamingDecodeParams& p, cudaStream_t stream) {
  constexpr int kLanes = kHeadDim == 64 ? 16 : 32;
  constexpr int64_t kHeads = 32 / kLanes * kCombineWarps;
  const int64_t capacity = p.cache.capacity();
  CombineLaunch launch{};
  launch.heads = DecodeHeads(p);
  launch.n_heads = static_cast<unsigned>(p.n_heads);
  launch.n_kv_heads = static_cast<unsigned>(p.n_kv_heads);
  launch.n_sink = static_cast<unsigned>(p.n_sink);
  launch.n_rows = static_cast<unsigned>(p.batch * p.n_heads);
  launch.head_dim = static_cast<int>(p.head_dim);
  launch.capacity = decode_capacity(capacity);
  launch.max_splits = static_cast<unsigned>(decode_max_splits(capacity));
  launch.partials = DecodeWorkspace(p).partials(p);
  decode_combine_kernel<T, kHeadDim, kLanes>
      <<<static_cast<unsigned>(ceil_div(p.batch * p.n_heads, kHeads)), 32 * kCombineWarps, 0,
         stream>>>(p, launch);
  check_launch("streaming_decode's combine");
}

template <class T>
void launch(const StreamingDecodeParams& p, cudaStream_t stream) {
  launch_decode_split<T>(p, stream);
  switch (decode_head_dim(p.head_dim)) {
    case 64:
      return combine<T, 64>(p, stream);
    case 96:
      return combine<T, 96>(p, stream);
    case 128:
      return combine<T, 128>(p, stream);
    default:
      return combine<T, 256>(p, stream);
  }
}

}  // namespace

int64_t workspace_bytes(const StreamingDecodeParams& p) {
  return DecodeWorkspace(p).bytes();
}

void run(const StreamingDecodeParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, as_stream(stream));
  launch<__half>(p, as_stream(stream));
}

}  // namespace lighttransfer::cuda
