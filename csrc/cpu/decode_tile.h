// One tile of a decode step, in the registers of the instruction set: up to kTile cached keys of
// one KV head against a few of its query heads.
#pragma once

#include "simd.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// Slots that go through scores, softmax and values together.
constexpr int kTile = 64;
// Query heads that share a pass over a tile, and vectors of output columns that they hold in
// registers: as many as the registers take.
constexpr int kHeads = kLanes == 16 ? 4 : 2;
constexpr int kColumns = kLanes == 16 ? 4 : 2;

// The running softmax of one query head over a split, stored behind its accumulator. After finish()
// the accumulator and the masses are divided by sum, and lse is set.
struct Statistics {
  float max, sum, mass[2], lse;
};

struct SlotRange {
  int64_t begin, end;
};

// The slots whose probability makes up each mass: the sinks; the other kept positions, which are
// consecutive but may wrap in the ring.
struct MassRanges {
  SlotRange sinks, recent[2];
};

MassRanges mass_ranges(Ring ring, RetainedWindow window, int64_t length) {
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

// Where each row of a tile lies, in one KV head.
template <class T>
struct TileRows {
  const T *k[kTile], *v[kTile];
  int64_t begin;
  int n;
};

template <class T>
void find_rows(const KvCache& cache, int64_t b, int64_t h, int64_t begin, int64_t end,
               TileRows<T>& rows) {
  rows.begin = begin;
  rows.n = 0;
  while (begin < end) {
    const int64_t page = cache.page(b, begin), offset = begin % cache.page_size;
    const int64_t left = cache.page_size - offset, run = left < end - begin ? left : end - begin;
    const auto first = [&](const KvCache::Side& side) {
      return static_cast<const T*>(side.data) + page * side.page_stride + h * side.head_stride +
             offset * side.slot_stride;
    };
    const T *k = first(cache.k), *v = first(cache.v);
    for (int64_t i = 0; i < run; ++i, ++rows.n) {
      rows.k[rows.n] = k + i * cache.k.slot_stride;
      rows.v[rows.n] = v + i * cache.v.slot_stride;
    }
    begin += run;
  }
}

// scores[h][i] = q_h . k_i, four keys at a time; the count is rounded up, with the last key
// repeated.
template <class E, int n_heads>
void score_tile(const typename E::Storage* const* q, const TileRows<typename E::Storage>& rows,
                int64_t head_dim, float (*scores)[kTile]) {
  using D = Dot<E>;
  for (int i = 0; i < rows.n; i += 4) {
    const typename E::Storage* k[4];
    for (int j = 0; j < 4; ++j) k[j] = rows.k[i + j < rows.n ? i + j : rows.n - 1];
    Vec sums[n_heads][4] = {};
    const auto step = [&](auto load) {
      typename D::Operand keys[4];
      for (int j = 0; j < 4; ++j) keys[j] = load(k[j]);
      for (int h = 0; h < n_heads; ++h) {
        const typename D::Operand query = load(q[h]);
        for (int j = 0; j < 4; ++j) sums[h][j] = D::madd(query, keys[j], sums[h][j]);
      }
    };
    int64_t d = 0;
    for (; d + D::kWidth <= head_dim; d += D::kWidth) {
      step([&](const auto* row) { return D::load(row + d); });
    }
    if (d < head_dim) step([&](const auto* row) { return D::load(row + d, head_dim - d); });
    for (int h = 0; h < n_heads; ++h) {
      reduce_add4(sums[h][0], sums[h][1], sums[h][2], sums[h][3], scores[h] + i);
    }
  }
}

// The part of `range` that lies in the tile, summed.
float range_sum(const float* weights, SlotRange range, int64_t begin, int n) {
  const int64_t first = range.begin > begin ? range.begin - begin : 0;
  const int64_t last = range.end - begin < n ? range.end - begin : n;
  Vec sum{};
  for (int64_t i = first; i < last; i += kLanes) {
    const int64_t left = last - i;
    sum += load<Element<DType::kFloat32>>(weights + i, left < kLanes ? left : kLanes);
  }
  return reduce_add(sum);
}

// Turns one head's raw scores into weights e^(scale * score - max) and returns what the accumulator
// must be multiplied with because the maximum rose.
float softmax_tile(float* scores, int n, float scale, Statistics& s) {
  using F = Element<DType::kFloat32>;
  for (int i = 0; i < n; i += kLanes) store<F>(scores + i, load<F>(scores + i) * scale);
  for (int i = n; i % kLanes != 0; ++i) scores[i] = -INFINITY;
  Vec top = broadcast(s.max);
  for (int i = 0; i < n; i += kLanes) top = max(top, load<F>(scores + i));
  const float new_max = reduce_max(top);
  // As long as every score is -inf, the weights are 0 and not e^(inf - inf).
  const float base = new_max == -INFINITY ? 0.0f : new_max;
  const float correction = new_max == s.max ? 1.0f : exp(broadcast(s.max - base))[0];
  Vec sum{};
  for (int i = 0; i < n; i += kLanes) {
    const Vec weights = exp(load<F>(scores + i) - base);
    sum += weights;
    store<F>(scores + i, weights);
  }
  s.max = new_max;
  s.sum = s.sum * correction + reduce_add(sum);
  s.mass[0] *= correction;
  s.mass[1] *= correction;
  return correction;
}

// acc_h = correction_h * acc_h + sum over the tile of weight_hi * v_i, for kVectors vectors of
// columns from `column` on; of the last one only `left` columns exist.
template <class E, int n_heads, int n_vectors, bool partial>
inline void accumulate_columns(const TileRows<typename E::Storage>& rows,
                               const float (*weights)[kTile], const float* correction,
                               int64_t column, int64_t left, float* const* acc) {
  using F = Element<DType::kFloat32>;
  // From zero rather than from acc: short sums round less.
  Vec sums[n_heads][n_vectors] = {};
  for (int i = 0; i < rows.n; ++i) {
    const typename E::Storage* v = rows.v[i] + column;
    Vec values[n_vectors];
    for (int c = 0; c < n_vectors; ++c) {
      values[c] = partial ? load<E>(v + c * kLanes, left) : load<E>(v + c * kLanes);
    }
    for (int h = 0; h < n_heads; ++h) {
      const Vec weight = broadcast(weights[h][i]);
      for (int c = 0; c < n_vectors; ++c) sums[h][c] = fma(weight, values[c], sums[h][c]);
    }
  }
  for (int h = 0; h < n_heads; ++h) {
    const Vec scale = broadcast(correction[h]);
    for (int c = 0; c < n_vectors; ++c) {
      float* to = acc[h] + column + c * kLanes;
      store<F>(to, fma(load<F>(to), scale, sums[h][c]));
    }
  }
}

template <class E, int n_heads>
void accumulate_tile(const TileRows<typename E::Storage>& rows, const float (*weights)[kTile],
                     const float* correction, int64_t head_dim, float* const* acc) {
  int64_t d = 0;
  for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes) {
    accumulate_columns<E, n_heads, kColumns, false>(rows, weights, correction, d, 0, acc);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    accumulate_columns<E, n_heads, 1, false>(rows, weights, correction, d, 0, acc);
  }
  if (d < head_dim) {
    accumulate_columns<E, n_heads, 1, true>(rows, weights, correction, d, head_dim - d, acc);
  }
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
