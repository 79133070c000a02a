// The scores of a decode step's tile: products of its keys with the queries of a block of heads.
#pragma once

#include "decode_rows.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// The queries of a block of heads, laid out for GroupDot: products are taken in bf16 where the
// instruction set can, else in fp32.
template <class E>
class BlockQueries {
 public:
  using T = typename E::Storage;
  static constexpr bool kDirect = sizeof(T) == 4 || (kIsBf16<E> && kHasBf16Dot);
  using Key = std::conditional_t<kDirect, E, F32>;
  using Product = GroupDot<Key>;

  // Query heads at q, q + stride, ...; of the kHeads only n exist.
  void load(const T* q, int64_t stride, int64_t n, int64_t head_dim) {
    constexpr int kStep = Product::kStep;
    head_dim_ = head_dim;
    std::memset(values_, 0, sizeof(values_[0]) * kHeads * head_dim);
    for (int64_t h = 0; h < n; ++h) {
      const auto* row = key(q + h * stride, 0);
      for (int64_t d = 0; d < head_dim; d += kStep) {
        std::memcpy(values_ + d * kHeads + h * kStep, row + d, kStep * sizeof(*row));
      }
    }
  }

  // scores = scale * q . k for the n keys at rows[i] + offset, rounded up to a multiple of kKeys.
  // Asks for `lines` lines of `ahead` per key.
  void score(const T* const* rows, int n, int64_t offset, float scale, RowStream& ahead,
             int64_t lines, TileScores& scores) {
    const int64_t steps = head_dim_ / Product::kStep,
                  per_step = (kKeys * lines + steps - 1) / steps;
    for (int i = 0; i < n; i += kKeys) {
      const typename Key::Storage* k[kKeys];
      for (int j = 0; j < kKeys; ++j) k[j] = key(rows[i + j] + offset, j);
      Vec sums[kKeys][kVecs] = {};
      const typename Key::Storage* q = values_;
      for (int64_t d = 0; d < head_dim_; d += Product::kStep) {
        ahead.ask(per_step);
        typename Product::Operand queries[kVecs];
        LT_UNROLL
        for (int w = 0; w < kVecs; ++w, q += Product::kWidth) queries[w] = Product::load(q);
        LT_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          const typename Product::Operand keys = Product::load_same(k[j] + d);
          LT_UNROLL
          for (int w = 0; w < kVecs; ++w) {
            sums[j][w] = Product::madd(queries[w], keys, sums[j][w]);
          }
        }
      }
      LT_UNROLL
      for (int j = 0; j < kKeys; j += 4) {
        LT_UNROLL
        for (int w = 0; w < kVecs; ++w) {
          const Vec four = group_add4(sums[j][w], sums[j + 1][w], sums[j + 2][w], sums[j + 3][w]);
          scores.set((i + j) / 4, w, four * scale);
        }
      }
    }
  }

 private:
  // The row as Product takes it, in the scratch row `j` where it must be converted.
  const typename Key::Storage* key(const T* row, int j) {
    if constexpr (kDirect) {
      return row;
    } else {
      widen_row<E>(row, head_dim_, scratch_[j]);
      return scratch_[j];
    }
  }

  int64_t head_dim_;
  alignas(64) typename Key::Storage values_[kHeads * kMaxHeadDim];
  alignas(64) float scratch_[kDirect ? 1 : kKeys][kMaxHeadDim];
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
