// One decode step: each CTA attends one KV head's query heads to one split of one row's keys.
//
// Keys are the mma's M dimension and query heads its N dimension: S^T = K Q^T and O^T = V^T P^T, so
// a group of up to 8 query heads fills an n8 tile and every K/V byte is read once. A warp scores
// its own 32 keys of the 64-key tile; the weights then cross through shared memory, and it sums
// its own half of head_dim over all keys. So no partial output is ever merged within a CTA.
#pragma once

#include "decode_warp.cuh"

namespace lighttransfer::cuda {

// The copies of the CTA's query heads, zeros for those that the part does not have. Left to the
// group of the first keys.
template <class Rows, int kHeads>
__device__ __forceinline__ void copy_queries(const StreamingDecodeParams& p, unsigned b,
                                             unsigned first_head, int n_heads, uint32_t to,
                                             unsigned lane,
                                             const typename Rows::ChunkBytes& bytes) {
  const char* q = static_cast<const char*>(p.q.data) +
                  2 * (b * p.q.batch_stride + (first_head + Rows::row(lane)) * p.q.head_stride +
                       Rows::col(lane));
  const int64_t pass_bytes = 2 * Rows::kRowsPerPass * p.q.head_stride;
  static_for<kHeads / Rows::kRowsPerPass>([&](auto pass) {
    Rows::template copy<pass>(to, q, bytes, pass * Rows::kRowsPerPass + Rows::row(lane) < n_heads);
    q += pass_bytes;
  });
}

// Grid: x = rows x KV heads x parts of kHeads query heads, y = splits. Block: 32 x kDecodeWarps.
template <class T, class Shape>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_split_kernel(const StreamingDecodeParams p, const DecodeLaunch launch) {
  using Rows = typename Shape::Rows;
  extern __shared__ __align__(16) char shared_memory[];
  const DecodeHeads& heads = launch.heads;
  // Up to 8 heads are one part.
  constexpr bool kOnePart = Shape::kGroupTiles == 1;
  const unsigned pair = kOnePart ? blockIdx.x : blockIdx.x / static_cast<unsigned>(heads.n_parts);
  const int part = kOnePart ? 0 : static_cast<int>(blockIdx.x) - pair * heads.n_parts;
  const unsigned b = pair / launch.n_kv_heads;
  const DecodeRow row(p, launch.n_sink, launch.capacity, b, pair - b * launch.n_kv_heads);
  const bool one_tile = row.n_slots <= kDecodeTile * kDecodeMaxSplits;  // a split, that is
  const int keys_per_split = one_tile ? kDecodeTile : decode_keys_per_split(row.n_slots);
  const int begin = static_cast<int>(blockIdx.y) * keys_per_split;
  if (begin >= row.n_slots) return;

  DecodeWarp<T, Shape> warp(p, launch, row, opaque(shared_address(shared_memory)));
  const unsigned lane = warp.lane;
  const typename Rows::ChunkBytes bytes(lane, launch.head_dim);
  const int n_heads =
      kOnePart ? heads.group : min(Shape::kHeads, heads.group - part * Shape::kHeads);
  copy_queries<Rows, Shape::kHeads>(p, b, row.kv_head * heads.group + part * Shape::kHeads, n_heads,
                                    warp.q_tile() + Rows::offset(lane), lane, bytes);
  const uint32_t k_to = warp.k_tile() + Rows::offset(lane);
  const uint32_t v_to = warp.v_tile() + Rows::offset(lane);
  const int64_t slot_stride = p.cache.k.slot_stride;
  int first = begin + warp.warp * kWarpKeys;
  uint32_t visible;
  const auto copy_keys = [&](const auto& keys) {
    keys.template copy<Rows>(keys.k, slot_stride, k_to, lane, bytes);
    visible = keys.visible;
  };
  find_keys<Rows>(p, row, first, lane, launch, part == 0, [&](const auto& keys) {
    copy_keys(keys);
    keys.template copy<Rows>(keys.v, slot_stride, v_to, lane, bytes);
  });

  if (one_tile) {
    wait_for_copies<1>();
    __syncwarp();  // the other lanes' keys
    warp.score();
    warp.template weigh<true>(visible);
    if (launch.has_mass != 0) warp.template add_masses<true>(first);
    wait_for_copies<0>();
    __syncthreads();
    warp.template add_values<true>();
  } else {
    warp.clear();
    for (int n_more = (min(row.n_slots - begin, keys_per_split) - 1) / kDecodeTile; n_more >= 0;
         --n_more, first += kDecodeTile) {
      wait_for_copies<1>();
      __syncwarp();
      warp.score();
      const uint32_t now_visible = visible;
      WarpKeys<false> next{};
      bool next_is_run = false;
      if (n_more > 0) {
        __syncwarp();  // all lanes have read the keys
        find_keys<Rows>(p, row, first + kDecodeTile, lane, launch, part == 0,
                        [&](const auto& keys) {
                          copy_keys(keys);
                          next = {keys.k, keys.v, keys.visible};
                          next_is_run = keys.kIsRun;
                        });
      }
      warp.template weigh<false>(now_visible);
      if (launch.has_mass != 0) warp.template add_masses<false>(first);
      if (n_more > 0) {
        wait_for_copies<1>();  // the values; the next keys are on their way
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();
      warp.template add_values<false>();
      if (n_more > 0) {
        __syncthreads();  // both warps have read the values and the weights
        if (next_is_run) {
          const WarpKeys<true> keys{next.k, next.v, next.visible};
          keys.template copy<Rows>(keys.v, slot_stride, v_to, lane, bytes);
        } else {
          next.template copy<Rows>(next.v, slot_stride, v_to, lane, bytes);
        }
      }
    }
  }
  warp.store_partial(n_heads);
}

}  // namespace lighttransfer::cuda
