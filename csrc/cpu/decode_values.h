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

// How weights meet values: kRows rows at a time, kColumns of their columns as a pair of vectors.
template <class E>
struct Weighting {
  static constexpr int kRows = 1;
  static constexpr int64_t kColumns = 2 * kLanes;

  static inline void prepare(TileScores&, int) {}
  static inline Vec weight(const TileScores& weights, int h, int i) {
    return broadcast(weights.values[TileScores::at(h, i)]);
  }
  static inline VecPair load(const ValueRows<E>& rows, int i, int64_t column) {
    return load_pair<E>(rows[i] + column);
  }
  // The last n columns, in the order of memory.
  static inline VecPair load(const ValueRows<E>& rows, int i, int64_t column, int64_t n) {
    return load_first<E>(rows[i] + column, n);
  }
  static inline Vec madd(Vec weight, Vec value, Vec acc) { return fma(weight, value, acc); }
  // Outputs in the order that loads leave, as E.
  static inline void store(typename E::Storage* to, VecPair v) { store_pair<E>(to, v); }
  static inline void store(typename E::Storage* to, VecPair v, int64_t n) {
    store_first<E>(to, v, n);
  }
};

#if defined(__AVX512BF16__)
// Two rows' elements side by side are operands of vdpbf16ps; the weights are rounded to bf16, as in
// every attention kernel that multiplies matrices in bf16.
template <>
struct Weighting<Element<DType::kBFloat16>> {
  using E = Element<DType::kBFloat16>;
  static constexpr int kRows = 2;
  static constexpr int64_t kColumns = 32;

  // Every weight vector becomes 16 bf16 in its place: those of keys i and i + 1 are 4 bytes.
  static inline void prepare(TileScores& weights, int n) {
    for (int i = 0; i < n; i += 4) {
      const __m256bh narrow = _mm512_cvtneps_pbh(weights.get(i / 4, 0));
      std::memcpy(weights.values + i / 4 * kLanes, &narrow, sizeof(narrow));
    }
  }
  static inline Vec weight(const TileScores& weights, int h, int i) {
    float both;
    std::memcpy(&both,
                reinterpret_cast<const uint16_t*>(weights.values + i / 4 * kLanes) + 4 * h + i % 4,
                4);
    return bit_cast<Vec>(_mm512_set1_ps(both));
  }
  static inline VecPair load(const ValueRows<E>& rows, int i, int64_t column) {
    return load(rows, i, column, kColumns);
  }
  static inline VecPair load(const ValueRows<E>& rows, int i, int64_t column, int64_t n) {
    const __m512i a = row(rows, i, column, n), b = row(rows, i + 1, column, n);
    return {bit_cast<Vec>(_mm512_unpacklo_epi16(a, b)), bit_cast<Vec>(_mm512_unpackhi_epi16(a, b))};
  }
  static inline Vec madd(Vec weight, Vec value, Vec acc) {
    return _mm512_dpbf16_ps(acc, bit_cast<__m512bh>(weight), bit_cast<__m512bh>(value));
  }
  static inline void store(uint16_t* to, VecPair v) { store(to, v, kColumns); }
  static inline void store(uint16_t* to, VecPair v, int64_t n) {
    const auto upper = [](Vec x) {
      return _mm512_srli_epi32(bit_cast<__m512i>(round_to_bf16(x)), 16);
    };
    const __m512i both = _mm512_packus_epi32(upper(v.first), upper(v.second));
    _mm512_mask_storeu_epi16(to, mask(n), both);
  }

 private:
  static inline __mmask32 mask(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }
  // Zeros where a tile has no more rows.
  static inline __m512i row(const ValueRows<E>& rows, int i, int64_t column, int64_t n) {
    if (i >= rows.n) return _mm512_setzero_si512();
    if (n == kColumns) return _mm512_loadu_epi16(rows[i] + column);
    return _mm512_maskz_loadu_epi16(mask(n), rows[i] + column);
  }
};
#endif

// acc_h = correction_h * acc_h + sum over the tile of weight_hi * v_i, for n_pairs pairs of column
// vectors from `column` on; with n_pairs = 1 for only n columns. Asks for `units` units of `ahead`
// per value.
template <class E, int n_heads, int n_pairs>
inline void accumulate_pairs(const ValueRows<E>& rows, const TileScores& weights,
                             const float* correction, int64_t column, int64_t n, BlockOutputs acc,
                             RowStream& ahead, int64_t units) {
  using W = Weighting<E>;
  // From zero rather than from acc: short sums round less.
  VecPair sums[n_heads][n_pairs] = {};
  const auto add = [&](int i, const auto& load) __attribute__((always_inline)) {
    VecPair values[n_pairs];
    LT_UNROLL
    for (int c = 0; c < n_pairs; ++c) values[c] = load(i, column + c * W::kColumns);
    LT_UNROLL
    for (int h = 0; h < n_heads; ++h) {
      const Vec weight = W::weight(weights, h, i);
      LT_UNROLL
      for (int c = 0; c < n_pairs; ++c) {
        sums[h][c].first = W::madd(weight, values[c].first, sums[h][c].first);
        sums[h][c].second = W::madd(weight, values[c].second, sums[h][c].second);
      }
    }
  };
  const bool whole = n == n_pairs * W::kColumns;
  int i = 0;
  if (whole) {
    for (; i + W::kRows <= rows.n; i += W::kRows) {
      ahead.ask(W::kRows * units);
      add(i, [&](int i, int64_t c) { return W::load(rows, i, c); });
    }
  }
  // Behind the last whole group of rows, or of columns.
  for (; i < rows.n; i += W::kRows) {
    ahead.ask(W::kRows * units);
    add(i, [&](int i, int64_t c) {
      return W::load(rows, i, c, n - (c - column) < W::kColumns ? n - (c - column) : W::kColumns);
    });
  }
  LT_UNROLL
  for (int h = 0; h < n_heads; ++h) {
    const Vec scale = broadcast(correction[h]);
    LT_UNROLL
    for (int c = 0; c < n_pairs; ++c) {
      float* to = acc.head(h) + column + c * W::kColumns;
      store<F32>(to, fma(load<F32>(to), scale, sums[h][c].first));
      store<F32>(to + kLanes, fma(load<F32>(to + kLanes), scale, sums[h][c].second));
    }
  }
}

template <class E, int n_heads>
void accumulate_tile(const ValueRows<E>& rows, const TileScores& weights, const float* correction,
                     int64_t head_dim, BlockOutputs acc, RowStream& ahead, int64_t units) {
  constexpr int64_t kColumns = Weighting<E>::kColumns;
  const int64_t passes =
      head_dim / (kPairs * kColumns) + (head_dim % (kPairs * kColumns) + kColumns - 1) / kColumns;
  const int64_t units_per_pass = (units + passes - 1) / passes;
  int64_t d = 0;
  for (; d + kPairs * kColumns <= head_dim; d += kPairs * kColumns) {
    accumulate_pairs<E, n_heads, kPairs>(rows, weights, correction, d, kPairs * kColumns, acc,
                                         ahead, units_per_pass);
  }
  for (; d < head_dim; d += kColumns) {
    const int64_t n = head_dim - d < kColumns ? head_dim - d : kColumns;
    accumulate_pairs<E, n_heads, 1>(rows, weights, correction, d, n, acc, ahead, units_per_pass);
  }
}

// A head's outputs as E.
template <class E>
inline void narrow_row(const float* from, int64_t head_dim, typename E::Storage* to) {
  constexpr int64_t kColumns = Weighting<E>::kColumns;
  for (int64_t d = 0; d < head_dim; d += kColumns) {
    const VecPair v{load<F32>(from + d), load<F32>(from + d + kLanes)};
    if (head_dim - d < kColumns) {
      Weighting<E>::store(to + d, v, head_dim - d);
    } else {
      Weighting<E>::store(to + d, v);
    }
  }
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
