#pragma once

#include "decode_kernel.cuh"
#include "decode_launch.h"
#include "launch.h"

namespace lighttransfer::cuda {

template <class T, int kHeadDim, int kGroupTiles>
void launch_decode_shape(const StreamingDecodeParams& p, cudaStream_t stream) {
  using Shape = DecodeShape<kHeadDim, kGroupTiles>;
  const auto kernel = decode_split_kernel<T, kHeadDim, kGroupTiles>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Shape::kSharedBytes),
        "streaming_decode");
  const int64_t n_groups = ceil_div<int64_t>(p.n_heads / p.n_kv_heads, Shape::kHeads);
  const dim3 grid(static_cast<unsigned>(p.batch * p.n_kv_heads * n_groups),
                  static_cast<unsigned>(decode_max_splits(p.cache.capacity())));
  kernel<<<grid, kDecodeThreads, Shape::kSharedBytes, stream>>>(p);
  check_launch("streaming_decode");
}

template <class T, int kHeadDim>
void launch_decode_head_dim(const StreamingDecodeParams& p, cudaStream_t stream) {
  if (p.n_heads / p.n_kv_heads <= 8) return launch_decode_shape<T, kHeadDim, 1>(p, stream);
  launch_decode_shape<T, kHeadDim, 2>(p, stream);
}

// head_dim is rounded up; the loads fill the rest with zeros.
template <class T>
void launch_decode_split(const StreamingDecodeParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_decode_head_dim<T, 64>(p, stream);
  if (p.head_dim <= 96) return launch_decode_head_dim<T, 96>(p, stream);
  if (p.head_dim <= 128) return launch_decode_head_dim<T, 128>(p, stream);
  launch_decode_head_dim<T, 256>(p, stream);
}

}  // namespace lighttransfer::cuda
