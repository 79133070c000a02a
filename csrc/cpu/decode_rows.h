// The rows of a decode step's tile in memory, and the order in which they are asked for.
#pragma once

#include "decode_tile.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// Where a tile's rows lie, in the first of the KV heads that are walked together; k is padded to a
// multiple of kKeys with its last row.
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
  for (int i = rows.n; i % kKeys != 0; ++i) rows.k[i] = rows.k[rows.n - 1];
}

// Brings one side of a tile into the second-level cache, a unit of two lines at a time: slot by
// slot, every slot with all the KV heads. That is the order of memory, in which it is fastest; the
// products, head by head, come back to a slot again and again. Units are asked for at an even pace
// between the products: a core waits for a few lines only, and a burst would stop it.
class RowStream {
 public:
  // n_runs contiguous runs of run_bytes in each slot, run_stride bytes apart.
  RowStream(int64_t n_runs, int64_t run_bytes, int64_t run_stride)
      : n_runs_(n_runs), run_bytes_(run_bytes), run_stride_(run_stride) {}

  // The runs of a KvCache::Side's slot, for n_heads KV heads.
  static RowStream of(const KvCache::Side& side, int64_t n_heads, int64_t head_dim,
                      int64_t element) {
    if (side.head_stride == head_dim) return {1, n_heads * head_dim * element, 0};
    return {n_heads, head_dim * element, side.head_stride * element};
  }

  // Units of a slot, at most.
  int64_t units() const { return n_runs_ * ((run_bytes_ + kUnit - 1) / kUnit); }

  template <class T>
  void start(const T* const* rows, int n) {
    rows_ = reinterpret_cast<const void* const*>(rows);
    n_rows_ = n, row_ = 0, run_ = 0, step_ = kUnit;
    begin_run();
  }

  // Short, because it stands in the innermost loops. Lines behind a run's end do no harm.
  void ask(int64_t n_units) {
    for (; n_units > 0; --n_units) {
      __builtin_prefetch(line_, 0, 2);
      __builtin_prefetch(line_ + kUnit / 2, 0, 2);
      line_ += step_;
      if (__builtin_expect(line_ >= end_, 0)) {
        if (++run_ == n_runs_) run_ = 0, ++row_;
        begin_run();
      }
    }
  }

 private:
  static constexpr int64_t kUnit = 128;  // bytes

  void begin_run() {
    if (row_ < n_rows_) {
      line_ = static_cast<const char*>(rows_[row_]) + run_ * run_stride_;
      end_ = line_ + run_bytes_;
    } else {  // what is asked for once more costs little
      line_ = reinterpret_cast<const char*>(this);
      end_ = line_ + 1, step_ = 0;
    }
  }

  int64_t n_runs_, run_bytes_, run_stride_;
  const void* const* rows_ = nullptr;
  int n_rows_ = 0, row_ = 0;
  int64_t run_ = 0;
  const char *line_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
};

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
