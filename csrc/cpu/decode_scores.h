// The scores of a decode step's tile: products of its keys with the queries of a block of heads.
#pragma once

#include "decode_rows.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

template <class E>
class BlockQueries {
 public:
  using T = typename E::Storage;
  using Product = PreparedDot<E>;

  // Query heads at q, q + stride, ...; of the kHeads only n exist.
  void load(const T* q, int64_t stride, int64_t n, int64_t head_dim) {
    head_dim_ = head_dim;
    padded_ = (head_dim + Product::kWidth - 1) / Product::kWidth * Product::kWidth;
    for (int64_t h = 0; h < n; ++h) Product::prepare(q + h * stride, head_dim, head(h));
  }

  // scores = scale * q . k of n_heads heads for the n keys at rows[i] + offset, rounded up to a
  // multiple of kKeys; 0 for further heads. Asks for `units` units of `ahead` per key.
  template <int n_heads>
  void score(const T* const* rows, int n, int64_t offset, float scale, RowStream& ahead,
             int64_t units, TileScores& scores) const {
    const int64_t steps = padded_ / Product::kWidth;
    const int64_t units_per_step = (kKeys * units + steps - 1) / steps;
    for (int i = 0; i < n; i += kKeys) {
      const T* k[kKeys];
      LT_UNROLL
      for (int j = 0; j < kKeys; ++j) k[j] = rows[i + j] + offset;
      score_heads<0, n_heads>(k, scale, ahead, units_per_step, i / kKeys, scores);
      if constexpr (kVecs > 1) {
        score_heads<1, n_heads - kGroups>(k, scale, ahead, 0, i / kKeys, scores);
      }
    }
  }

 private:
  // Score vector i of the heads [w * kGroups, w * kGroups + n_heads).
  template <int w, int n_heads>
  void score_heads(const T* const (&k)[kKeys], float scale, RowStream& ahead, int64_t units, int i,
                   TileScores& scores) const {
    if constexpr (n_heads <= 0) return scores.set(i, w, Vec{});
    constexpr int kCount = n_heads < kGroups ? n_heads : kGroups;
    Vec sums[kGroups][kKeys] = {};
    const auto step = [&](int64_t d, const auto& load) __attribute__((always_inline)) {
      LT_UNROLL
      for (int j = 0; j < kKeys; ++j) {
        const typename Product::Operand keys = load(k[j] + d);
        LT_UNROLL
        for (int h = 0; h < kCount; ++h) {
          sums[h][j] = Product::madd(head(w * kGroups + h) + d, keys, sums[h][j]);
        }
      }
    };
    int64_t d = 0;
    for (; d + Product::kWidth <= head_dim_; d += Product::kWidth) {
      ahead.ask(units);
      step(d, [](const T* p) { return Product::load(p); });
    }
    if (d < head_dim_) {
      ahead.ask(units);
      step(d, [&](const T* p) { return Product::load(p, head_dim_ - d); });
    }
    Vec heads[kGroups] = {};
    LT_UNROLL
    for (int h = 0; h < kCount; ++h) {
      heads[h] = group_add4(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
    }
    scores.set(i, w, add_groups(heads) * scale);
  }

  typename Product::Prepared* head(int64_t h) { return values_ + h * padded_; }
  const typename Product::Prepared* head(int64_t h) const { return values_ + h * padded_; }

  int64_t head_dim_, padded_;
  alignas(64) typename Product::Prepared values_[kHeads * kMaxHeadDim];
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
