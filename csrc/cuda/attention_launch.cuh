// Host side of the prefill kernels.
#pragma once

#include <climits>

#include "attention.cuh"
#include "attention.h"
#include "launch.h"
#include "vector.h"

namespace lighttransfer::cuda {

template <class Shape>
PrefillArgs prefill_args(const AttentionParams& p) {
  using QCopy = TileCopy<typename Shape::QTile, Shape::kThreads>;
  using KvCopy = TileCopy<typename Shape::KvTile, Shape::kThreads>;
  PrefillArgs args{};
  args.p = p;
  args.row_tiles = static_cast<int>(ceil_div<int64_t>(p.n_queries, Shape::kBlockM));
  args.aligned = rows_aligned(p.q) && rows_aligned(p.k) && rows_aligned(p.v);
  args.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  args.q_pass = 2 * QCopy::kRowsPerPass * p.q.token_stride;
  args.k_pass = 2 * KvCopy::kRowsPerPass * p.k.token_stride;
  args.v_pass = 2 * KvCopy::kRowsPerPass * p.v.token_stride;
  args.k_tile = 2 * Shape::kBlockN * p.k.token_stride;
  args.v_tile = 2 * Shape::kBlockN * p.v.token_stride;
  return args;
}

template <class Element, int kHeadDim>
void launch_prefill(const AttentionParams& p, void* stream) {
  using Shape = PrefillShape<kHeadDim>;
  // Key columns and row numbers are 32-bit in the kernel, with room for a tile beyond the end.
  constexpr int64_t kMaxTokens = INT_MAX - 1024;
  if (p.n_queries > kMaxTokens || p.n_keys > kMaxTokens || p.n_last > kMaxTokens) {
    throw std::runtime_error("prefill_attn: S_q, S_k and n_last must be below 2^31 - 1024 on CUDA");
  }
  const PrefillArgs args = prefill_args<Shape>(p);
  // The tiles of a head lie next to each other: they read the same keys. The longest comes first.
  const int64_t blocks = args.row_tiles * p.n_heads * p.batch;
  if (blocks > INT_MAX) {
    throw std::runtime_error("prefill_attn: more than 2^31 - 1 tiles of 128 queries on CUDA");
  }
  const auto kernel = prefill_attn_kernel<Element, Shape>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(Shape::kSmemBytes)),
        "prefill_attn");
  kernel<<<static_cast<unsigned>(blocks), Shape::kThreads, Shape::kSmemBytes, as_stream(stream)>>>(
      args);
  check_launch("prefill_attn");
}

}  // namespace lighttransfer::cuda
