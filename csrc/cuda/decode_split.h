// How decode splits a row's keys over CTAs. Host and device agree through these functions.
#pragma once

#include <cstdint>

#include "../params.h"

namespace lighttransfer::cuda {

constexpr int kDecodeTile = 64;        // keys that a CTA holds at a time
constexpr int kDecodeWarps = 2;        // share its keys for the scores and head_dim for the output
constexpr int kDecodeMaxSplits = 128;  // of one row: bounds the workspace and the combine

// A function of the row's own number of keys and nothing else, so that a row gives the same bits
// alone and in any batch. A ring of 1,024 keys makes 16 splits: with 8 KV heads, 128 CTAs.
LT_HOST_DEVICE constexpr int decode_keys_per_split(uint32_t n_slots) {
  unsigned keys = kDecodeTile;
  while (keys * kDecodeMaxSplits < n_slots) keys *= 2;
  return static_cast<int>(keys);
}

// The most splits that any row can have whose cache holds `capacity` slots.
LT_HOST_DEVICE constexpr int decode_max_splits(int64_t capacity) {
  const int64_t tiles = (capacity + kDecodeTile - 1) / kDecodeTile;
  return static_cast<int>(tiles < kDecodeMaxSplits ? tiles : kDecodeMaxSplits);
}

// What a warp of a split knows of a query head, beside the split's out: what combine merges. The
// pair (top, sum) is kept apart, since its logarithm would lose digits where scores are large.
struct alignas(16) DecodePartial {
  float top;         // greatest score of the split, times scale_log2; -inf: it has no visible key
  float sum;         // of 2^(score * scale_log2 - top) over the warp's keys, as the next two
  float sink, kept;  // written where masses are asked for
};

// Where a warp's record of a part's head lies among per_part: as its lanes come to hold the sums.
LT_HOST_DEVICE constexpr unsigned decode_place(unsigned head) {
  return head / 8 * 8 + head % 8 / 2 + head % 2 * 4;
}

// How query heads are dealt to CTAs: parts of kHeads (8 or 16) heads of one KV head.
struct DecodeHeads {
  int group;    // query heads of a KV head
  int n_parts;  // of a group
  int per_part;

  DecodeHeads() = default;
  LT_HOST_DEVICE explicit constexpr DecodeHeads(const StreamingDecodeParams& p)
      : group(static_cast<int>(p.n_heads / p.n_kv_heads)),
        n_parts((group + 15) / 16),
        per_part(group <= 8 ? 8 : 16) {}
};

// A cache's capacity for kernels, whose positions are int32.
constexpr uint32_t decode_capacity(int64_t capacity) {
  return static_cast<uint32_t>(capacity < INT32_MAX ? capacity : INT32_MAX);
}

// Instantiated head_dims: the others are rounded up, and zeros fill the rest.
LT_HOST_DEVICE constexpr int decode_head_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 256;
}

// Workspace: sums of weighted values, fp32 [B x H_kv x parts, max_splits, per_part,
// decode_head_dim], then DecodePartial [B x H_kv x parts, max_splits, kDecodeWarps, per_part]: a
// CTA's share is one run. What belongs to no head is never written.
struct DecodeWorkspace {
  int64_t n_outs, n_partials;

  explicit DecodeWorkspace(const StreamingDecodeParams& p) {
    const DecodeHeads heads(p);
    const int64_t n = p.batch * p.n_kv_heads * heads.n_parts *
                      decode_max_splits(p.cache.capacity()) * heads.per_part;
    n_outs = n * decode_head_dim(p.head_dim);
    n_partials = n * kDecodeWarps;
  }
  int64_t bytes() const { return n_outs * 4 + n_partials * int64_t(sizeof(DecodePartial)); }
  DecodePartial* partials(const StreamingDecodeParams& p) const {
    return reinterpret_cast<DecodePartial*>(static_cast<float*>(p.workspace) + n_outs);
  }
};

}  // namespace lighttransfer::cuda
