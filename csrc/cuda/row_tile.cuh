// Which keys the queries of one row tile see, as ranges of key columns.
#pragma once

#include "../params.h"

namespace lighttransfer::cuda {

// Key columns [begin, end): physical indices into k and v.
struct Columns {
  int begin, end;
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// The keys of a row tile, in up to three segments that are visited from right to left. All of them
// are ranges of columns, so that one loop serves the causal mask, the streaming mask and the mass:
//
//   plain       recent = every visible key
//   streaming   recent = what the tile's bands cover | hidden | sinks
//   mass        recent = kept, not sinks | middle = what a cut drops | sinks
//
// Between segments the mass takes the sums so far, which is why the loop itself knows nothing of
// it.
class RowTile {
 public:
  static constexpr int kSegments = 3;
  static constexpr int kRecent = 0;
  static constexpr int kMiddle = 1;
  static constexpr int kSinks = 2;

  int batch, head;
  int row_begin, row_end;
  bool careful = false;  // look for the maxima of all tiles

  // The CTAs of a head lie next to each other, since they read the same keys, and of these the last
  // rows come first: with a causal mask they take longest.
  __device__ __forceinline__ RowTile(const AttentionParams& p, int row_tiles, int size)
      : shift_(static_cast<int>(p.n_keys - p.n_queries)), causal_(p.causal), mask_(p.mask) {
    const int n_heads = static_cast<int>(p.n_heads), index = blockIdx.x / row_tiles;
    batch = index / n_heads, head = index % n_heads;
    row_begin = (row_tiles - 1 - static_cast<int>(blockIdx.x % row_tiles)) * size;
    row_end = min(row_begin + size, static_cast<int>(p.n_queries));
    start_ = p.seq_start == nullptr ? 0 : p.seq_start[batch];
    start_ = max(0, min(start_, static_cast<int>(p.n_keys)));
    end_ = p.causal ? row_end + shift_ : static_cast<int>(p.n_keys);
    recent_begin_ = sinks_end_ = start_;
    const int64_t length = p.n_keys - start_;
    // Real queries of the last n_last, and the first of them.
    n_measured_ = p.mass == nullptr ? 0 : static_cast<int>(min(min(p.n_last, p.n_queries), length));
    measured_begin_ = static_cast<int>(p.n_queries) - n_measured_;
    if (row_end > measured_begin_) {
      sinks_end_ = start_ + static_cast<int>(min(p.window.n_sink, length));
      recent_begin_ = start_ + static_cast<int>(p.window.recent_begin(length));
      has_middle_ = true;
    } else if (p.mask.limited()) {
      const int sinks_end = start_ + static_cast<int>(min(p.mask.n_sink, length));
      // Where even the last row's band touches the sinks, nothing is hidden.
      if (first_of_band(row_end - 1) > sinks_end) {
        sinks_end_ = sinks_end;
        recent_begin_ = max(sinks_end, first_of_band(row_begin));
        banded_ = true;
      }
    }
  }

  __device__ __forceinline__ Columns segment(int i) const {
    if (i == kRecent) return {recent_begin_, end_};
    if (i == kSinks) return {start_, min(sinks_end_, end_)};
    return {has_middle_ ? sinks_end_ : recent_begin_, min(recent_begin_, end_)};
  }

  // One past the last column that a row sees.
  __device__ __forceinline__ int end_of_row(int row) const {
    return causal_ ? row + shift_ + 1 : end_;
  }

  // The first column of segment i that a row sees.
  __device__ __forceinline__ int begin_of_row(int row, int i) const {
    const int begin = segment(i).begin;
    return banded_ && i == kRecent ? max(begin, first_of_band(row)) : begin;
  }

  __device__ __forceinline__ bool measures(int row) const { return row >= measured_begin_; }
  __device__ __forceinline__ int n_measured() const { return n_measured_; }
  __device__ __forceinline__ int start() const { return start_; }

 private:
  // First column that the streaming mask shows to a row besides the sinks.
  __device__ __forceinline__ int first_of_band(int row) const {
    const int64_t position = row + shift_ - start_;
    return start_ + static_cast<int>(mask_.recent_begin(max(position + 1, int64_t{0})));
  }

  int shift_, start_, end_;
  int sinks_end_, recent_begin_;
  int n_measured_, measured_begin_;
  bool causal_, has_middle_ = false, banded_ = false;
  RetainedWindow mask_;
};

}  // namespace lighttransfer::cuda
