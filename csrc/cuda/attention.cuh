// Prefill attention: FlashAttention-2's schedule (Dao, 2023) for sm_80. One CTA per 128 query rows
// and head walks over the tiles of keys that any of its rows sees, from right to left.
#pragma once

#include "attention_rows.cuh"
#include "launch.h"

namespace lighttransfer::cuda {

template <class Element, class Shape>
class PrefillCta : PrefillRows<Element, Shape> {
  using Rows = PrefillRows<Element, Shape>;
  using Rows::args_, Rows::base_, Rows::cta_, Rows::kD, Rows::kFragments, Rows::o_, Rows::p_,
      Rows::softmax_;
  static constexpr int kN = Shape::kBlockN / 8;
  static constexpr int kSteps = Shape::kHeadDim / 16;
  using QTile = typename Shape::QTile;
  using KvTile = typename Shape::KvTile;
  using QCopy = TileCopy<QTile, Shape::kThreads>;
  using KvCopy = TileCopy<KvTile, Shape::kThreads>;

 public:
  __device__ __forceinline__ PrefillCta(const PrefillArgs& args, char* smem)
      : Rows(args, smem), copy_(base_ + Shape::kK) {
    const int kv_head = cta_.head / static_cast<int>(p_.n_heads / p_.n_kv_heads);
    k_source_ = this->element(p_.k, kv_head, KvCopy::row(), KvCopy::col());
    v_source_ = this->element(p_.v, kv_head, KvCopy::row(), KvCopy::col());
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Shape::kRowsPerWarp;
    q_lane_ = QTile::lane_rows_first(base_, warp_row, lane);
    k_lane_ = KvTile::lane_columns_first(base_ + Shape::kK, 0, lane);
    v_lane_ = KvTile::lane_rows_first(base_ + Shape::kV, 0, lane);
  }

  __device__ __forceinline__ void run() {
    int tile = first_tile(0);
    if (tile >= 0) {
      load_queries();
      load_k<true>(tile);
      prepare_queries();
    }
#pragma unroll 1
    for (int i = 0; i < RowTile::kSegments; ++i) {
      const Columns columns = cta_.segment(i);
      if (!columns.empty()) visit(i, columns);
      if (cta_.measures(cta_.row_end - 1) && i != RowTile::kSinks) this->set_aside(i);
    }
    this->finish();
  }

 private:
  // The rightmost tile of segment i or, if it is empty, of the next one that is not; -1: none.
  __device__ __forceinline__ int first_tile(int i) const {
#pragma unroll 1
    for (; i < RowTile::kSegments; ++i) {
      const Columns columns = cta_.segment(i);
      if (!columns.empty()) return (columns.end - 1) / Shape::kBlockN;
    }
    return -1;
  }

  __device__ __forceinline__ void load_queries() {
    const QCopy copy(base_);
    const char* from = this->element(p_.q, cta_.head, cta_.row_begin + QCopy::row(), QCopy::col());
    const int head_dim = static_cast<int>(p_.head_dim);
    const RowRange rows{0, cta_.row_end - cta_.row_begin};
    if (args_.aligned) {
      copy.copy(from, args_.q_pass, head_dim, rows);
    } else {
      copy.copy_unaligned(from, args_.q_pass, head_dim, rows);
    }
  }

  // kChecked: the tile may reach beyond the keys, or its rows may be unaligned.
  template <bool kChecked>
  __device__ __forceinline__ void load_k(int tile) {
    load_keys<kChecked>(copy_, k_source_ + tile * args_.k_tile, args_.k_pass,
                        {0, static_cast<int>(p_.n_keys) - tile * Shape::kBlockN});
  }
  // Masked columns of V meet a weight of 0, which does not hide an inf or NaN: padding is left out.
  template <bool kChecked>
  __device__ __forceinline__ void load_v(int tile) {
    KvCopy copy = copy_;
    copy.destination += Shape::kV - Shape::kK;
    const int first = tile * Shape::kBlockN;
    load_keys<kChecked>(copy, v_source_ + tile * args_.v_tile, args_.v_pass,
                        {cta_.start() - first, static_cast<int>(p_.n_keys) - first});
  }
  template <bool kChecked>
  __device__ __forceinline__ void load_keys(const KvCopy& copy, const char* from, int64_t pass,
                                            RowRange rows) const {
    const int head_dim = static_cast<int>(p_.head_dim);
    if constexpr (!kChecked) {
      copy.copy(from, pass, head_dim);
    } else if (args_.aligned) {
      copy.copy(from, pass, head_dim, rows);
    } else {
      copy.copy_unaligned(from, pass, head_dim, rows);
    }
  }

  __device__ __forceinline__ void prepare_queries() {
    // Queries that stay in shared memory are read behind the first tile's barrier.
    if constexpr (Shape::kQueriesInRegisters) {
      wait_for_copies();
      __syncthreads();
      static_for<kSteps>([&](auto step) { read_queries<step>(q_[step]); });
    }
  }

  template <int kStep>
  __device__ __forceinline__ void read_queries(uint32_t (&a)[kFragments][4]) const {
    const uint32_t lane = QTile::within(in_loop(q_lane_), 16 * kStep);
    static_for<kFragments>(
        [&](auto m) { load_matrices<QTile::offset_of(16 * m, 16 * kStep)>(a[m], lane); });
  }

  template <int kStep>
  __device__ __forceinline__ void queries(uint32_t (&a)[kFragments][4]) const {
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < 4 * kFragments; ++i) a[i / 4][i % 4] = q_[kStep][i / 4][i % 4];
    } else {
      read_queries<kStep>(a);
    }
  }

  // All tiles of segment i. Only tiles that some mask cuts are masked.
  __device__ __forceinline__ void visit(int i, Columns columns) {
    constexpr int kTile = Shape::kBlockN;
    const int begin_of_all = cta_.begin_of_row(cta_.row_end - 1, i);
    const int end_of_all = min(columns.end, cta_.end_of_row(cta_.row_begin));
    const int first = columns.begin / kTile, next_segment = first_tile(i + 1);
    // Tiles [full_begin, full_end) are seen by every row, whole.
    int full_begin = ceil_div(begin_of_all, kTile), full_end = max(end_of_all, 0) / kTile;
    if (full_begin >= full_end || !args_.aligned) full_begin = full_end = first;

    int tile = (columns.end - 1) / kTile;
    while (tile >= first) {
      if (tile >= full_end || tile < full_begin) {
        const int next = tile > first ? tile - 1 : next_segment;
        attend<true>(tile, next, i);
        --tile;
      } else {
        softmax_.before_whole_tiles(tile - full_begin + 1);
#pragma unroll 1
        for (; tile >= full_begin; --tile) {
          attend<false>(tile, tile > first ? tile - 1 : next_segment, i);
        }
      }
    }
  }

  // One tile of keys. K and V have one buffer each: V arrives while the scores are computed, the
  // next K while V is used.
  template <bool kMasked>
  __device__ __forceinline__ void attend(int tile, int next_tile, int segment) {
    wait_for_copies();
    __syncthreads();  // K is there, and nobody reads the previous V
    load_v<kMasked>(tile);

    const bool active = !kMasked || warp_sees(tile, segment);
    uint32_t p[kFragments][kN / 2][4];
    if (active) weigh<kMasked>(tile, segment, p);

    wait_for_copies();
    __syncthreads();  // V is there, and nobody reads K
    if (next_tile >= 0) load_k<kMasked>(next_tile);
    if (active) accumulate(p);
  }

  // The weights of a tile's keys. Where the anchors turn out too low the scores, whose registers
  // now hold the weights, are computed once more.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(int tile, int segment,
                                        uint32_t (&p)[kFragments][kN / 2][4]) {
    bool raise = softmax_.tiles_to_raise > 0;
#pragma unroll 1
    for (;; raise = true) {
      float s[kFragments][kN][4] = {};
      score(s);
      if constexpr (kMasked) mask(s, tile, segment);
      if (raise) softmax_.raise(s, o_);
      if (softmax_.template weigh<kMasked>(s, p, raise)) return;
    }
  }

  // Does any row of this warp see a key of the tile?
  __device__ __forceinline__ bool warp_sees(int tile, int segment) const {
    const int first = cta_.row_begin + this->warp_row();
    const int last = min(first + Shape::kRowsPerWarp, cta_.row_end) - 1;
    const int begin = tile * Shape::kBlockN;
    return first <= last && begin < cta_.end_of_row(last) &&
           begin + Shape::kBlockN > cta_.begin_of_row(first, segment);
  }

  // Keeps the few instructions that derive addresses from this one inside the loop: hoisted, they
  // would hold registers through the softmax, where none are left.
  static __device__ __forceinline__ uint32_t in_loop(uint32_t address) {
    if constexpr (Shape::kHeadDim > 64) asm volatile("" : "+r"(address));
    return address;
  }

  // s = q * k^T
  __device__ __forceinline__ void score(float (&s)[kFragments][kN][4]) const {
    const uint32_t lane = in_loop(k_lane_);
    static_for<kSteps>([&](auto step) {
      uint32_t a[kFragments][4];
      queries<step>(a);
      static_for<kN / 2>([&](auto n) {
        uint32_t b[4];
        load_matrices<KvTile::offset_of(16 * n, 16 * step)>(b, KvTile::within(lane, 16 * step));
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          multiply_add<Element>(s[m][2 * n], a[m], b[0], b[1]);
          multiply_add<Element>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      });
    });
  }

  // o += p * v
  __device__ __forceinline__ void accumulate(const uint32_t (&p)[kFragments][kN / 2][4]) {
    const uint32_t lane = in_loop(v_lane_);
    static_for<kN / 2>([&](auto step) {
      static_for<kD / 2>([&](auto d) {
        uint32_t b[4];
        load_matrices_transposed<KvTile::offset_of(16 * step, 16 * d)>(
            b, KvTile::within(lane, 16 * d));
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
          multiply_add<Element>(o_[m][2 * d], p[m][step], b[0], b[1]);
          multiply_add<Element>(o_[m][2 * d + 1], p[m][step], b[2], b[3]);
        }
      });
    });
  }

  // Scores of hidden keys become -inf.
  __device__ __forceinline__ void mask(float (&s)[kFragments][kN][4], int tile, int segment) const {
    const int end_of_all = cta_.segment(segment).end;
    const bool cut_left = cta_.begin_of_row(cta_.row_end - 1, segment) > tile * Shape::kBlockN;
    const int column = tile * Shape::kBlockN + this->lane() % 4 * 2;  // of s[m][0][0]
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) {
      const int m = r / 2, i = r % 2 * 2;
      const int row = cta_.row_begin + this->first_row() + 8 * r;
      const int end = min(end_of_all, cta_.end_of_row(row)) - column;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (8 * n >= end) s[m][n][i] = -INFINITY;
        if (8 * n + 1 >= end) s[m][n][i + 1] = -INFINITY;
      }
      if (!cut_left) continue;
      const int begin = cta_.begin_of_row(row, segment) - column;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (8 * n < begin) s[m][n][i] = -INFINITY;
        if (8 * n + 1 < begin) s[m][n][i + 1] = -INFINITY;
      }
    }
  }

  KvCopy copy_;                        // of K; V's tile lies behind it
  const char *k_source_, *v_source_;   // this thread's element of tile 0
  uint32_t q_lane_, k_lane_, v_lane_;  // ldmatrix addresses
  uint32_t q_[Shape::kQueriesInRegisters ? kSteps : 1][kFragments][4];
};

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    prefill_attn_kernel(const __grid_constant__ PrefillArgs args) {
  extern __shared__ __align__(128) char smem[];
  PrefillCta<Element, Shape>(args, smem).run();
}

}  // namespace lighttransfer::cuda
