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
    const int64_t steps = padded_ / Product::kWidth * (kKeys / kAtOnce);
    const int64_t units_per_step = (kKeys * units + steps - 1) / steps;
    for (int i = 0; i < n; i += kKeys) {
      const T* k[kKeys];
      LT_UNROLL
      for (int j = 0; j < kKeys; ++j) k[j] = rows[i + j] + offset;
      Vec sums[kHeads][kKeys] = {};
      LT_UNROLL
      for (int j = 0; j < kKeys; j += kAtOnce) {
        multiply<n_heads>(k + j, ahead, units_per_step,
                          [&](int h, int i) -> Vec& { return sums[h][j + i]; });
      }
      LT_UNROLL
      for (int w = 0; w < kVecs; ++w) {
        Vec heads[kGroups];
        LT_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          const Vec* sum = sums[w * kGroups + g];
          heads[g] = group_add4(sum[0], sum[1], sum[2], sum[3]);
        }
        scores.set(i / kKeys, w, add_groups(heads) * scale);
      }
    }
  }

 private:
  // Keys whose sums with a block of heads fit in registers.
  static constexpr int kAtOnce = kLanes == 8 ? 2 : 4;

  // sum(h, j) = the products of head h and the key at k[j], not yet added up across lanes.
  template <int n_heads, class Sum>
  void multiply(const T* const* k, RowStream& ahead, int64_t units, const Sum& sum) const {
    Vec sums[n_heads][kAtOnce] = {};
    const auto step = [&](int64_t d, const auto& load) __attribute__((always_inline)) {
      LT_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const typename Product::Operand keys = load(k[j] + d);
        LT_UNROLL
        for (int h = 0; h < n_heads; ++h) {
          sums[h][j] = Product::madd(head(h) + d, keys, sums[h][j]);
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
    LT_UNROLL
    for (int h = 0; h < n_heads; ++h) {
      LT_UNROLL
      for (int j = 0; j < kAtOnce; ++j) sum(h, j) = sums[h][j];
    }
  }

  typename Product::Prepared* head(int64_t h) { return values_ + h * padded_; }
  const typename Product::Prepared* head(int64_t h) const { return values_ + h * padded_; }

  int64_t head_dim_, padded_;
  alignas(64) typename Product::Prepared values_[kHeads * kMaxHeadDim];
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
