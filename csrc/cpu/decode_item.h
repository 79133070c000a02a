// What a decode step hands to a thread at a time: some KV heads of one split, in tiles of slots.
#pragma once

#include "decode_split.h"
#include "decode_tile.h"
#include "parallel.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// Query heads share a walk over memory in blocks, at most so many.
constexpr int64_t kMaxBlocks = 16;

// Slots of a tile: fewer where a slot is large. The tile and the next one, keys and values, then
// span at most half the pages that a first-level TLB knows. From the shape alone: the sums of a row
// must not depend on its company.
inline int64_t tile_slots(const StreamingDecodeParams& p, int64_t element) {
  const int64_t bytes = p.n_kv_heads * p.head_dim * element;
  return bytes > 1024 ? kTile / 4 : (bytes > 512 ? kTile / 2 : kTile);
}

// How many KV heads make an item. It decides nothing but speed: every head is computed by itself.
struct HeadGroups {
  int64_t size, count;

  HeadGroups(const StreamingDecodeParams& p, int64_t n_splits, int64_t element) {
    // What is walked together of a slot; its tiles must leave room in a second-level cache.
    constexpr int64_t kMaxBytes = 4096;
    const int64_t group = p.n_heads / p.n_kv_heads, n_blocks = (group + kHeads - 1) / kHeads;
    const int64_t by_bytes = kMaxBytes / (p.head_dim * element), by_blocks = kMaxBlocks / n_blocks;
    size = by_bytes < by_blocks ? by_bytes : by_blocks;
    if (size > p.n_kv_heads) size = p.n_kv_heads;
    if (size < 1) size = 1;
    // Enough items that threads end together.
    const int64_t threads = n_threads(), wanted = threads > 1 ? 4 * threads : 1;
    const auto groups = [&] { return (p.n_kv_heads + size - 1) / size; };
    while (size > 1 && n_splits * groups() < wanted) size = (size + 1) / 2;
    count = groups();
  }
};

// One (row, split, group of KV heads).
struct SplitItem {
  int64_t b, split, kv_head, n_kv_heads;
  int64_t begin, end;  // slots

  SplitItem(const StreamingDecodeParams& p, const DecodeSplits& splits, HeadGroups groups,
            int64_t b, int64_t i)
      : b(b), split(i / groups.count), kv_head(i % groups.count * groups.size) {
    const int64_t left = p.n_kv_heads - kv_head;
    n_kv_heads = left < groups.size ? left : groups.size;
    const int64_t n_slots = p.ring(b).n_slots(int64_t{p.seq_len[b]} + 1);
    begin = (split - splits.first_split()[b]) * kSplitSlots;
    end = n_slots < begin + kSplitSlots ? n_slots : begin + kSplitSlots;
  }
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
