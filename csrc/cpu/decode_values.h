// The outputs of a block of heads: weighted sums of a decode step's values, tile by tile.
#pragma once

#include "decode_rows.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// fp32 rows of a block's heads, `stride` apart.
struct BlockOutputs {
  float* first;
  int64_t stride;

  float* head(int h) const { return first + h * stride; }
};

// A tile's values: n rows, `offset` elements behind those of the first KV head.
template <class E>
struct ValueRows {
  const typename E::Storage* const* rows;
  int64_t offset;
  int n;

  const typename E::Storage* operator[](int i) const { return rows[i] + offset; }
};

// acc_h = correction_h * acc_h + sum over the tile of weight_hi * v_i, for n_pairs pairs of column
// vectors from `column` on. Asks for `lines` lines of `ahead` per value.
template <class E, int n_heads, int n_pairs>
inline void accumulate_pairs(const ValueRows<E>& rows, const TileScores& weights,
                             const float* correction, int64_t column, BlockOutputs acc,
                             RowStream& ahead, int64_t lines) {
  // From zero rather than from acc: short sums round less.
  VecPair sums[n_heads][n_pairs] = {};
  for (int i = 0; i < rows.n; ++i) {
    ahead.ask(lines);
    const typename E::Storage* v = rows[i] + column;
    VecPair values[n_pairs];
    LT_UNROLL
    for (int c = 0; c < n_pairs; ++c) values[c] = load_pair<E>(v + c * 2 * kLanes);
    LT_UNROLL
    for (int h = 0; h < n_heads; ++h) {
      const Vec weight = broadcast(weights.values[TileScores::at(h, i)]);
      LT_UNROLL
      for (int c = 0; c < n_pairs; ++c) {
        sums[h][c].first = fma(weight, values[c].first, sums[h][c].first);
        sums[h][c].second = fma(weight, values[c].second, sums[h][c].second);
      }
    }
  }
  LT_UNROLL
  for (int h = 0; h < n_heads; ++h) {
    const Vec scale = broadcast(correction[h]);
    LT_UNROLL
    for (int c = 0; c < n_pairs; ++c) {
      float* to = acc.head(h) + column + c * 2 * kLanes;
      store<F32>(to, fma(load<F32>(to), scale, sums[h][c].first));
      store<F32>(to + kLanes, fma(load<F32>(to + kLanes), scale, sums[h][c].second));
    }
  }
}

// The same for the `n` columns, at most kLanes, behind the last pair.
template <class E, int n_heads>
inline void accumulate_rest(const ValueRows<E>& rows, const TileScores& weights,
                            const float* correction, int64_t column, int64_t n, BlockOutputs acc) {
  Vec sums[n_heads] = {};
  for (int i = 0; i < rows.n; ++i) {
    const typename E::Storage* v = rows[i] + column;
    const Vec values = n < kLanes ? load<E>(v, n) : load<E>(v);
    LT_UNROLL
    for (int h = 0; h < n_heads; ++h) {
      sums[h] = fma(broadcast(weights.values[TileScores::at(h, i)]), values, sums[h]);
    }
  }
  LT_UNROLL
  for (int h = 0; h < n_heads; ++h) {
    float* to = acc.head(h) + column;
    store<F32>(to, fma(load<F32>(to), broadcast(correction[h]), sums[h]));
  }
}

template <class E, int n_heads>
void accumulate_tile(const ValueRows<E>& rows, const TileScores& weights, const float* correction,
                     int64_t head_dim, BlockOutputs acc, RowStream& ahead, int64_t lines) {
  constexpr int64_t kColumns = 2 * kLanes;
  const int64_t passes = head_dim / (kPairs * kColumns) + head_dim / kColumns % kPairs;
  const int64_t lines_per_pass = passes == 0 ? 0 : (lines + passes - 1) / passes;
  int64_t d = 0;
  for (; d + kPairs * kColumns <= head_dim; d += kPairs * kColumns) {
    accumulate_pairs<E, n_heads, kPairs>(rows, weights, correction, d, acc, ahead, lines_per_pass);
  }
  for (; d + kColumns <= head_dim; d += kColumns) {
    accumulate_pairs<E, n_heads, 1>(rows, weights, correction, d, acc, ahead, lines_per_pass);
  }
  for (; d < head_dim; d += kLanes) {
    accumulate_rest<E, n_heads>(rows, weights, correction, d,
                                head_dim - d < kLanes ? head_dim - d : kLanes, acc);
  }
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
