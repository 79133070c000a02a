// What a decode CTA knows of its row, and how it brings the row's keys into shared memory.
#pragma once

#include "decode_split.h"
#include "warp.h"

namespace lighttransfer::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kWarpKeys = 16;
constexpr int kDecodeStages = 2;

// Shapes that one instantiation fixes. kHeadDim is head_dim rounded up to 64, 96, 128 or 256;
// kGroupTiles n8 tiles hold the query heads.
template <int kHeadDim, int kGroupTiles>
struct DecodeShape {
  static constexpr int kHeads = 8 * kGroupTiles;
  // An odd number of 16-byte chunks: eight rows of a matrix start in eight different bank groups.
  static constexpr int kRowBytes = kHeadDim * 2 + 16;
  static constexpr int kTileBytes = kDecodeTile * kRowBytes;
  static constexpr int kKvBytes = kDecodeStages * 2 * kTileBytes;
  // fp32 rows of the warps' partial outs, padded so that an accumulator's stores spread over banks.
  static constexpr int kOutPitch = kHeadDim + 4;
  static constexpr int kOutBytes = kDecodeWarps * kHeads * kOutPitch * 4;
  static constexpr int kStateBytes = kDecodeWarps * kHeads * 4 * 4;
  static constexpr int kSharedBytes =
      kKvBytes > kOutBytes + kStateBytes ? kKvBytes : kOutBytes + kStateBytes;
};

// What a CTA knows of its row.
struct DecodeRow {
  int64_t b, kv_head;
  int length;    // tokens cached before this one: the new token's position
  int n_slots;   // slots attended, the new token's included
  int new_slot;  // where the new token goes; -1: the cache has no room for it
  Ring ring;
};

__device__ __forceinline__ DecodeRow decode_row(const StreamingDecodeParams& p, int64_t b,
                                                int64_t kv_head) {
  DecodeRow row{b, kv_head, p.seq_len[b], 0, -1, p.ring(b)};
  if (row.length < 0) return row;
  const int64_t capacity = p.cache.capacity();
  const int64_t slot = row.ring.slot(row.length);
  const int64_t n_slots = row.ring.n_slots(int64_t(row.length) + 1);
  row.n_slots = static_cast<int>(n_slots < capacity ? n_slots : capacity);
  if (slot < capacity) row.new_slot = static_cast<int>(slot);
  return row;
}

// Where a warp's 16 keys lie: offsets into k and v of the first one where they share a page (the
// usual case), else each key asks for itself.
struct KeyAddress {
  int64_t k, v;
  bool valid;
};

__device__ __forceinline__ KeyAddress key_address(const StreamingDecodeParams& p,
                                                  const DecodeRow& row, int slot) {
  const KvCache& c = p.cache;
  int64_t page = row.b;
  int in_page = slot;
  bool valid = slot < row.n_slots;
  if (c.block_table != nullptr) {
    const int page_size = static_cast<int>(c.page_size);
    const int index = slot / page_size;
    in_page = slot - index * page_size;
    page = valid ? c.block_table[row.b * c.table_stride + index] : 0;
    valid = valid && page >= 0 && page < c.n_pages;
  }
  return {page * c.k.page_stride + in_page * c.k.slot_stride + row.kv_head * c.k.head_stride,
          page * c.v.page_stride + in_page * c.v.slot_stride + row.kv_head * c.v.head_stride,
          valid};
}

// Starts the copies of a warp's 16 keys. Lanes lie as 8 rows x 4 chunks, rows paired four apart, so
// that each quarter of the warp writes eight different bank groups.
template <class T, int kHeadDim>
__device__ __forceinline__ void load_keys(const StreamingDecodeParams& p, const DecodeRow& row,
                                          int first_slot, char* k_shared, char* v_shared) {
  using Shape = DecodeShape<kHeadDim, 1>;
  const int lane = threadIdx.x % 32;
  const int pair = lane / 4;
  const int key_in_8 = (pair >> 1) | ((pair & 1) << 2);
  const int chunk = lane % 4;
  const T* k_new =
      static_cast<const T*>(p.k.data) + row.b * p.k.batch_stride + row.kv_head * p.k.head_stride;
  const T* v_new =
      static_cast<const T*>(p.v.data) + row.b * p.v.batch_stride + row.kv_head * p.v.head_stride;
  const T* sources[2][2];
  bool valid[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = first_slot + half * 8 + key_in_8;
    const KeyAddress at = key_address(p, row, slot);
    const bool is_new = slot == row.new_slot;
    valid[half] = at.valid || (is_new && slot < row.n_slots);
    sources[half][0] = is_new ? k_new : static_cast<const T*>(p.cache.k.data) + at.k;
    sources[half][1] = is_new ? v_new : static_cast<const T*>(p.cache.v.data) + at.v;
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    char* shared = (side == 0 ? k_shared : v_shared) + key_in_8 * Shape::kRowBytes + chunk * 16;
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c) {
      const bool in_head = c * 32 + chunk * 8 < p.head_dim;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_async(shared + half * 8 * Shape::kRowBytes + c * 64,
                   in_head ? sources[half][side] + c * 32 + chunk * 8 : sources[half][side],
                   valid[half] && in_head);
      }
    }
    cute::cp_async_fence();
  }
}

// The warp that holds the new token's slot also stores it in the cache.
template <class T>
__device__ __forceinline__ void store_new_token(const StreamingDecodeParams& p,
                                                const DecodeRow& row) {
  const KeyAddress at = key_address(p, row, row.new_slot);
  const int d = threadIdx.x % 32 * 8;
  if (!at.valid || d >= p.head_dim) return;
  const auto store = [&](const Activation& from, const KvCache::Side& to, int64_t offset) {
    const T* source = static_cast<const T*>(from.data) + row.b * from.batch_stride +
                      row.kv_head * from.head_stride + d;
    *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + offset + d) =
        *reinterpret_cast<const uint4*>(source);
  };
  store(p.k, p.cache.k, at.k);
  store(p.v, p.cache.v, at.v);
}

}  // namespace lighttransfer::cuda
