// How a decode step is cut into parts, and where each part's attention state lies until all of a
// row's are merged. A part is kSplitSlots slots of one row: the same cut for every
// batch and every number of threads, so a row's result never depends on its company.
#pragma once

#include "../params.h"

namespace lighttransfer::cpu {
namespace {

constexpr int64_t kSplitSlots = 256;

// The workspace of a call: first_split, then the states.
class DecodeSplits {
 public:
  explicit DecodeSplits(const StreamingDecodeParams& p)
      : p_(p), width_((p.head_dim + 31) / 32 * 32 + 16) {}

  int64_t bytes() const {
    int64_t n_splits = 0;
    for (int64_t b = 0; b < p_.batch; ++b) n_splits += count(b);
    return (header() + n_splits * p_.n_heads * width_) * static_cast<int64_t>(sizeof(float));
  }

  // Splits that row b needs once its new token is written; an inactive row needs none.
  int64_t count(int64_t b) const {
    if (p_.seq_len[b] < 0) return 0;
    return (p_.ring(b).n_slots(int64_t{p_.seq_len[b]} + 1) + kSplitSlots - 1) / kSplitSlots;
  }

  // [B + 1]: row b owns the splits [first_split[b], first_split[b + 1]).
  int64_t* first_split() const { return static_cast<int64_t*>(p_.workspace); }

  // The state of query head h in a split: head_dim values padded to a multiple of 32, and
  // statistics behind them. Cache lines are not shared.
  float* state(int64_t split, int64_t h) const {
    return static_cast<float*>(p_.workspace) + header() + (split * p_.n_heads + h) * width_;
  }
  int64_t stride() const { return width_; }  // from one head's state to the next
  int64_t padded_head_dim() const { return width_ - 16; }

 private:
  int64_t header() const { return (2 * (p_.batch + 1) + 15) / 16 * 16; }  // in floats

  const StreamingDecodeParams& p_;
  int64_t width_;
};

}  // namespace
}  // namespace lighttransfer::cpu
