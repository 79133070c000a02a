// The softmax of a decode step, tile by tile: weights, their sums and the masses.
#pragma once

#include <cmath>

#include "../window.h"
#include "decode_tile.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// The running softmax of a block of heads. max is the same in all lanes of a head's group; of the
// sums each lane holds a part.
struct BlockSoftmax {
  Vec max[kVecs], sum[kVecs], sinks[kVecs], recent[kVecs];

  void clear() {
    LT_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      max[w] = broadcast(-INFINITY);
      sum[w] = sinks[w] = recent[w] = Vec{};
    }
  }
};

inline Vec select(IntVec mask, Vec yes, Vec no) {
  return bit_cast<Vec>((bit_cast<IntVec>(yes) & mask) | (bit_cast<IntVec>(no) & ~mask));
}

// Which lanes of score vector i hold keys in [begin, end) of the tile.
inline IntVec keys_between(int i, int64_t begin, int64_t end) {
  IntVec key;
  for (int lane = 0; lane < kLanes; ++lane) key[lane] = 4 * i + lane % 4;
  const auto bound = [](int64_t x) {
    return static_cast<int32_t>(x < 0 ? 0 : (x > kTile ? kTile : x));
  };
  return (key >= bound(begin)) & (key < bound(end));
}

// Turns scores into weights e^(score - max). correction: what the outputs so far must be multiplied
// with, by head, because the maximum rose.
inline void softmax_tile(TileScores& scores, int n, BlockSoftmax& s, float* correction) {
  const int n_vectors = (n + 3) / 4;
  LT_UNROLL
  for (int w = 0; w < kVecs; ++w) {
    if (n % 4 != 0) {
      const IntVec real = keys_between(n_vectors - 1, 0, n);
      const Vec last = scores.get(n_vectors - 1, w);
      scores.set(n_vectors - 1, w, select(real, last, broadcast(-INFINITY)));
    }
    Vec top = s.max[w];
    for (int i = 0; i < n_vectors; ++i) top = max(top, scores.get(i, w));
    top = group_max(top);
    // While every score is -inf, the weights are 0 and not e^(inf - inf).
    const Vec base = select(top == -INFINITY, Vec{}, top);
    const Vec rise = exp(s.max[w] - base);
    Vec sum{};
    for (int i = 0; i < n_vectors; ++i) {
      const Vec weights = exp(scores.get(i, w) - base);
      sum += weights;
      scores.set(i, w, weights);
    }
    s.max[w] = top;
    s.sum[w] = fma(s.sum[w], rise, sum);
    s.sinks[w] *= rise;
    s.recent[w] *= rise;
    for (int g = 0; g < kGroups; ++g) correction[w * kGroups + g] = rise[4 * g];
  }
}

// Adds the weights of the keys [begin, end) of the tile.
inline void add_range(const TileScores& scores, int n, int64_t begin, int64_t end, Vec* sums) {
  const int64_t first = begin < 0 ? 0 : begin, last = end < n ? end : n;
  for (int64_t i = first / 4; 4 * i < last; ++i) {
    const IntVec inside = keys_between(static_cast<int>(i), first, last);
    LT_UNROLL
    for (int w = 0; w < kVecs; ++w) {
      sums[w] += select(inside, scores.get(static_cast<int>(i), w), Vec{});
    }
  }
}

struct SlotRange {
  int64_t begin, end;
};

// The slots whose probability makes up each mass: the sinks; the other kept positions, which are
// consecutive but may wrap in the ring.
struct MassRanges {
  SlotRange sinks, recent[2];
};

inline MassRanges mass_ranges(Ring ring, RetainedWindow window, int64_t length) {
  MassRanges ranges{{0, ring.n_sink < length ? ring.n_sink : length}, {}};
  const int64_t kept = window.recent_begin(length), stored = ring.recent_begin(length);
  const int64_t begin = kept > stored ? kept : stored;
  if (begin >= length) return ranges;
  const int64_t first = ring.slot(begin), last = ring.slot(length - 1);
  if (first <= last) {
    ranges.recent[0] = {first, last + 1};
  } else {
    ranges.recent[0] = {first, ring.n_slots(length)};
    ranges.recent[1] = {ring.n_sink, last + 1};
  }
  return ranges;
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
