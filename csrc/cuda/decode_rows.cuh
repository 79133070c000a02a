// What a decode CTA knows of its row, and how a warp brings keys of it into shared memory.
#pragma once

#include "decode_shape.cuh"

namespace lighttransfer::cuda {

constexpr uint32_t kAllKeys = ~0u;

struct DecodeRow {
  unsigned b, kv_head;
  int length;    // tokens cached before this one: the new token's position; below 0: no row
  int n_slots;   // slots attended, the new token's included
  int new_slot;  // where the new token goes: beyond n_slots if the cache has no room for it
  RingOf<uint32_t> ring;

  __device__ __forceinline__ DecodeRow(const StreamingDecodeParams& p, unsigned n_sink,
                                       uint32_t capacity, unsigned b, unsigned kv_head)
      : b(b),
        kv_head(kv_head),
        length(p.seq_len[b]),
        ring{n_sink, static_cast<uint32_t>(p.n_recent[b])} {
    const bool wrapped = ring.wrapped(length + 1u);
    n_slots = length < 0 ? 0 : min(wrapped ? ring.n_slots(length + 1u) : length + 1u, capacity);
    new_slot = length;
    if (wrapped) {
      __builtin_assume(static_cast<uint32_t>(length) >= n_sink);  // what wrapped() implies
      new_slot = ring.slot(length);
    }
  }
};

// Where a warp's 32 keys and values come from. kRun: the keys follow each other in memory, all of
// them visible, and k and v are the lane's first chunk of the first pass. Else k and v are the row
// of the lane's own key, and `visible` has a bit for each key.
template <bool kRun>
struct WarpKeys {
  static constexpr bool kIsRun = kRun;

  const char *k, *v;
  uint32_t visible;

  // Starts the copies of the keys (from = k) or values (v) and ends their group. slot_stride: of
  // both, in a run.
  template <class Rows>
  __device__ __forceinline__ void copy(const char* from, int64_t slot_stride, uint32_t to,
                                       unsigned lane,
                                       const typename Rows::ChunkBytes& bytes) const {
    constexpr int kPasses = kWarpKeys / Rows::kRowsPerPass;
    const int64_t pass_bytes = 2 * Rows::kRowsPerPass * slot_stride;
    static_for<kPasses>([&](auto pass) {
      if constexpr (kRun) {
        Rows::template copy<pass>(to, from, bytes);
        from += pass_bytes;
      } else {
        const int key = pass * Rows::kRowsPerPass + Rows::row(lane);
        const char* row = from_lane(from, key);
        Rows::template copy<pass>(to, row + 2 * Rows::col(lane), bytes, visible >> key & 1);
      }
    });
    commit_copies();
  }

  static __device__ __forceinline__ const char* from_lane(const char* pointer, unsigned lane) {
    return reinterpret_cast<const char*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
  }
};

// Address of a slot's key or value.
__device__ __forceinline__ char* cache_slot(const KvCache::Side& side, int64_t page, unsigned slot,
                                            unsigned kv_head) {
  return static_cast<char*>(side.data) +
         2 * (page * side.page_stride + slot * side.slot_stride + kv_head * side.head_stride);
}

__device__ __forceinline__ const char* new_token(const Activation& x, const DecodeRow& row) {
  return static_cast<const char*>(x.data) +
         2 * (row.b * x.batch_stride + row.kv_head * x.head_stride);
}

// Keys that end beyond the row, cross pages or include the new token: each lane looks one up. The
// new token is read from where it came, and stored in its slot on the way if `stores`.
__device__ __forceinline__ WarpKeys<false> find_single_keys(const StreamingDecodeParams& p,
                                                            const DecodeRow& row, int first,
                                                            unsigned lane, bool stores) {
  const KvCache& c = p.cache;
  const unsigned slot = first + lane;
  const bool exists = static_cast<int>(slot) < row.n_slots;
  int64_t page = row.b;
  unsigned in_page = slot;
  bool mapped = exists;
  if (c.block_table != nullptr) {
    const unsigned page_size = static_cast<unsigned>(c.page_size);
    const unsigned index = slot / page_size;
    in_page = slot - index * page_size;
    page = exists ? c.block_table[row.b * c.table_stride + index] : 0;
    mapped = exists && page >= 0 && page < c.n_pages;
  }
  const char* k = cache_slot(c.k, page, in_page, row.kv_head);
  const char* v = cache_slot(c.v, page, in_page, row.kv_head);
  const int owner = row.new_slot - first;
  const bool is_new = static_cast<int>(lane) == owner;
  const char* const k_new = new_token(p.k, row);
  const char* const v_new = new_token(p.v, row);
  if (stores && owner >= 0 && owner < kWarpKeys) {
    auto* k_to = const_cast<char*>(WarpKeys<false>::from_lane(k, owner));
    auto* v_to = const_cast<char*>(WarpKeys<false>::from_lane(v, owner));
    if (__shfl_sync(~0u, mapped, owner) && lane * 8 < p.head_dim) {
      reinterpret_cast<uint4*>(k_to)[lane] = reinterpret_cast<const uint4*>(k_new)[lane];
      reinterpret_cast<uint4*>(v_to)[lane] = reinterpret_cast<const uint4*>(v_new)[lane];
    }
  }
  const bool visible = mapped || (is_new && exists);
  return {is_new ? k_new : k, is_new ? v_new : v, __ballot_sync(~0u, visible)};
}

// Calls f with the WarpKeys of the 32 keys from `first` on.
template <class Rows, class F>
__device__ __forceinline__ void find_keys(const StreamingDecodeParams& p, const DecodeRow& row,
                                          int first, unsigned lane, const DecodeLaunch& launch,
                                          bool stores, const F& f) {
  const KvCache& c = p.cache;
  const bool has_new =
      static_cast<unsigned>(row.new_slot - first) < static_cast<unsigned>(kWarpKeys);
  bool run = first + kWarpKeys <= row.n_slots && !has_new && launch.has_runs != 0;
  int64_t page = row.b;
  unsigned slot = first;
  if (run && c.block_table != nullptr) {
    const unsigned page_size = static_cast<unsigned>(c.page_size);
    const unsigned index = slot / page_size;
    slot -= index * page_size;
    page = c.block_table[row.b * c.table_stride + index];
    run = page >= 0 && page < c.n_pages;
  }
  if (run) {
    slot += Rows::row(lane);
    const char* k = cache_slot(c.k, page, slot, row.kv_head) + 2 * Rows::col(lane);
    f(WarpKeys<true>{k, k + launch.v_from_k, kAllKeys});
  } else {
    f(find_single_keys(p, row, first, lane, stores));
  }
}

}  // namespace lighttransfer::cuda
