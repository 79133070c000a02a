// One tile of a decode step, in the registers of the instruction set: up to kTile cached keys of
// one KV head against a block of kHeads of its query heads, one head to a group of four lanes.
#pragma once

#include "simd_dot.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

using F32 = Element<DType::kFloat32>;

constexpr int kTile = 64;
constexpr int kMaxHeadDim = 256;
// A score vector holds kGroups heads and 4 keys; kVecs of them make a block of heads.
constexpr int kVecs = kLanes == 16 ? 1 : 2;
constexpr int kHeads = kVecs * kGroups;
// Keys whose sums, and pairs of column vectors whose outputs, are in registers at a time.
constexpr int kKeys = 8 / kVecs;
constexpr int kPairs = kLanes == 16 ? 2 : 1;

// Where each row of a tile lies, in one KV head; k is padded to a multiple of kKeys with its last
// row.
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

// A row of E as fp32; its order of elements is load_pair's.
template <class E>
inline void widen_row(const typename E::Storage* from, int64_t head_dim, float* to) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    store_pair<F32>(to + d, load_pair<E>(from + d));
  }
  for (; d < head_dim; d += kLanes) {
    const int64_t n = head_dim - d;
    store<F32>(to + d, n < kLanes ? load<E>(from + d, n) : load<E>(from + d));
  }
}

// The other way round.
template <class E>
inline void narrow_row(const float* from, int64_t head_dim, typename E::Storage* to) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    store_pair<E>(to + d, load_pair<F32>(from + d));
  }
  for (; d < head_dim; d += kLanes) {
    const int64_t n = head_dim - d;
    if (n < kLanes) {
      store<E>(to + d, load<F32>(from + d), n);
    } else {
      store<E>(to + d, load<F32>(from + d));
    }
  }
}

// Scores of a tile: vector i * kVecs + w holds, in group g, head w * kGroups + g's scores of the
// keys 4i .. 4i + 3. So the score of head h for key i is at scores[at(h, i)].
struct TileScores {
  alignas(64) float values[kTile * kHeads];

  static constexpr int at(int h, int i) { return i / 4 * (4 * kHeads) + 4 * h + i % 4; }
  Vec get(int i, int w) const { return load<F32>(values + (i * kVecs + w) * kLanes); }
  void set(int i, int w, Vec v) { store<F32>(values + (i * kVecs + w) * kLanes, v); }
};

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

  // scores = scale * q . k for every key of the tile, rounded up to a multiple of kKeys. Asks for
  // the keys of the tile `ahead`.
  void score(const TileRows<T>& rows, float scale, const TileRows<T>& ahead, TileScores& scores) {
    const int64_t row_bytes = head_dim_ * static_cast<int64_t>(sizeof(T));
    for (int i = 0; i < rows.n; i += kKeys) {
      const typename Key::Storage* k[kKeys];
      for (int j = 0; j < kKeys; ++j) k[j] = key(rows.k[i + j], j);
      for (int j = i; j < i + kKeys && j < ahead.n; ++j) prefetch(ahead.k[j], row_bytes);
      Vec sums[kKeys][kVecs] = {};
      const typename Key::Storage* q = values_;
      for (int64_t d = 0; d < head_dim_; d += Product::kStep) {
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

// acc_h = correction_h * acc_h + sum over the tile of weight_hi * v_i, for n_pairs pairs of column
// vectors from `column` on. Asks for the values of the tile `ahead`.
template <class E, int n_heads, int n_pairs>
inline void accumulate_pairs(const TileRows<typename E::Storage>& rows, const TileScores& weights,
                             const float* correction, int64_t column, float (*acc)[kMaxHeadDim],
                             const TileRows<typename E::Storage>& ahead, int64_t ahead_bytes) {
  // From zero rather than from acc: short sums round less.
  VecPair sums[n_heads][n_pairs] = {};
  for (int i = 0; i < rows.n; ++i) {
    if (i < ahead.n && ahead_bytes > 0) prefetch(ahead.v[i], ahead_bytes);
    const typename E::Storage* v = rows.v[i] + column;
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
      float* to = acc[h] + column + c * 2 * kLanes;
      store<F32>(to, fma(load<F32>(to), scale, sums[h][c].first));
      store<F32>(to + kLanes, fma(load<F32>(to + kLanes), scale, sums[h][c].second));
    }
  }
}

// The same for the `n` columns, at most kLanes, behind the last pair.
template <class E, int n_heads>
inline void accumulate_rest(const TileRows<typename E::Storage>& rows, const TileScores& weights,
                            const float* correction, int64_t column, int64_t n,
                            float (*acc)[kMaxHeadDim]) {
  Vec sums[n_heads] = {};
  for (int i = 0; i < rows.n; ++i) {
    const typename E::Storage* v = rows.v[i] + column;
    const Vec values = n < kLanes ? load<E>(v, n) : load<E>(v);
    LT_UNROLL
    for (int h = 0; h < n_heads; ++h) {
      sums[h] = fma(broadcast(weights.values[TileScores::at(h, i)]), values, sums[h]);
    }
  }
  LT_UNROLL
  for (int h = 0; h < n_heads; ++h) {
    float* to = acc[h] + column;
    store<F32>(to, fma(load<F32>(to), broadcast(correction[h]), sums[h]));
  }
}

template <class E, int n_heads>
void accumulate_tile(const TileRows<typename E::Storage>& rows, const TileScores& weights,
                     const float* correction, int64_t head_dim, float (*acc)[kMaxHeadDim],
                     const TileRows<typename E::Storage>& ahead) {
  constexpr int64_t kColumns = 2 * kLanes;
  int64_t d = 0, ahead_bytes = head_dim * static_cast<int64_t>(sizeof(typename E::Storage));
  for (; d + kPairs * kColumns <= head_dim; d += kPairs * kColumns, ahead_bytes = 0) {
    accumulate_pairs<E, n_heads, kPairs>(rows, weights, correction, d, acc, ahead, ahead_bytes);
  }
  for (; d + kColumns <= head_dim; d += kColumns, ahead_bytes = 0) {
    accumulate_pairs<E, n_heads, 1>(rows, weights, correction, d, acc, ahead, ahead_bytes);
  }
  for (; d < head_dim; d += kLanes) {
    accumulate_rest<E, n_heads>(rows, weights, correction, d,
                                head_dim - d < kLanes ? head_dim - d : kLanes, acc);
  }
}

}  // namespace
}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
