#pragma once

#include "decode_kernel.cuh"
#include "decode_launch.h"
#include "launch.h"

namespace lighttransfer::cuda {

template <class T, int kHeadDim, int kGroupTiles>
void launch_decode_shape(const StreamingDecodeParams& p, cudaStream_t stream) {
  using Shape = DecodeShape<kHeadDim, kGroupTiles>;
  const auto kernel = decode_split_kernel<T, Shape>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
        "streaming_decode");
  const int64_t capacity = p.cache.capacity();
  DecodeLaunch launch{};
  launch.heads = DecodeHeads(p);
  launch.n_kv_heads = static_cast<unsigned>(p.n_kv_heads);
  launch.n_sink = static_cast<unsigned>(p.n_sink);
  launch.head_dim = static_cast<int>(p.head_dim);
  launch.capacity = decode_capacity(capacity);
  launch.has_mass = p.mass != nullptr;
  const KvCache& c = p.cache;
  launch.has_runs = (c.block_table == nullptr || c.page_size % kWarpKeys == 0) &&
                    c.k.page_stride == c.v.page_stride && c.k.slot_stride == c.v.slot_stride &&
                    c.k.head_stride == c.v.head_stride;
  launch.v_from_k = static_cast<const char*>(c.v.data) - static_cast<const char*>(c.k.data);
  launch.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  launch.partials = DecodeWorkspace(p).partials(p);
  const dim3 grid(static_cast<unsigned>(p.batch * p.n_kv_heads * launch.heads.n_parts),
                  static_cast<unsigned>(decode_max_splits(capacity)));
  kernel<<<grid, dim3(32, kDecodeWarps), Shape::kBytes, stream>>>(p, launch);
  check_launch("streaming_decode");
}

template <class T, int kHeadDim>
void launch_decode_head_dim(const StreamingDecodeParams& p, cudaStream_t stream) {
  if (DecodeHeads(p).per_part == 8) return launch_decode_shape<T, kHeadDim, 1>(p, stream);
  launch_decode_shape<T, kHeadDim, 2>(p, stream);
}

template <class T>
void launch_decode_split(const StreamingDecodeParams& p, cudaStream_t stream) {
  switch (decode_head_dim(p.head_dim)) {
    case 64:
      return launch_decode_head_dim<T, 64>(p, stream);
    case 96:
      return launch_decode_head_dim<T, 96>(p, stream);
    case 128:
      return launch_decode_head_dim<T, 128>(p, stream);
    default:
      return launch_decode_head_dim<T, 256>(p, stream);
  }
}

}  // namespace lighttransfer::cuda
