// How decode splits a row's keys over CTAs. Host and device agree through these functions.
#pragma once

#include <cstdint>

#include "../params.h"

namespace lighttransfer::cuda {

constexpr int kDecodeTile = 64;        // keys that a CTA holds at a time
constexpr int kDecodeMaxSplits = 128;  // of one row: bounds the workspace and the combine

// A function of the row's own number of keys and nothing else, so that a row gives the same bits
// alone and in any batch. A ring of 1,024 keys makes 16 splits: with 8 KV heads, 128 CTAs.
LT_HOST_DEVICE constexpr int decode_keys_per_split(int64_t n_slots) {
  int keys = kDecodeTile;
  while (int64_t(keys) * kDecodeMaxSplits < n_slots) keys *= 2;
  return keys;
}

// The most splits that any row can have whose cache holds `capacity` slots.
LT_HOST_DEVICE constexpr int decode_max_splits(int64_t capacity) {
  const int64_t tiles = (capacity + kDecodeTile - 1) / kDecodeTile;
  return static_cast<int>(tiles < kDecodeMaxSplits ? tiles : kDecodeMaxSplits);
}

// One split's attention state of one query head, beside its out (fp32 [D]): what combine merges.
// The pair (top, sum) is kept apart, since its logarithm would lose digits where scores are large.
struct alignas(16) DecodePartial {
  float top;      // greatest scaled score; -inf: the split has no visible key
  float sum;      // of exp(score - top)
  float mass[2];  // probability on sinks and on other kept keys, within the split
};

// Workspace: out fp32 [B, H_q, max_splits, D], then DecodePartial [B, H_q, max_splits].
LT_HOST_DEVICE constexpr int64_t decode_n_partials(const StreamingDecodeParams& p) {
  return p.batch * p.n_heads * decode_max_splits(p.cache.capacity());
}
LT_HOST_DEVICE constexpr int64_t decode_workspace_bytes(const StreamingDecodeParams& p) {
  return decode_n_partials(p) * (p.head_dim * 4 + int64_t(sizeof(DecodePartial)));
}

}  // namespace lighttransfer::cuda
