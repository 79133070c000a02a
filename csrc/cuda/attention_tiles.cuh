// The tiles of a prefill CTA: how queries, K and V come into shared memory, and the two products.
#pragma once

#include "attention_rows.cuh"

namespace lighttransfer::cuda {

template <class Element, class Shape>
class PrefillTiles : public PrefillRows<Element, Shape> {
 protected:
  using Rows = PrefillRows<Element, Shape>;
  using Rows::args_, Rows::base_, Rows::cta_, Rows::kD, Rows::kFragments, Rows::o_, Rows::p_;
  static constexpr int kN = Shape::kBlockN / 8;
  static constexpr int kSteps = Shape::kHeadDim / 16;
  using QTile = typename Shape::QTile;
  using KvTile = typename Shape::KvTile;
  using QCopy = TileCopy<QTile, Shape::kThreads>;
  using KvCopy = TileCopy<KvTile, Shape::kThreads>;
  using Queries = uint32_t[kFragments][4];          // A operands of 16 columns
  using Scores = float[kFragments][kN][4];          // C operands
  using Weights = uint32_t[kFragments][kN / 2][4];  // A operands

  __device__ __forceinline__ PrefillTiles(const PrefillArgs& args, char* smem)
      : Rows(args, smem), copy_(base_ + Shape::kK) {
    const int kv_head = cta_.head / static_cast<int>(p_.n_heads / p_.n_kv_heads);
    k_source_ = this->element(p_.k, kv_head, KvCopy::row(), KvCopy::col());
    v_source_ = this->element(p_.v, kv_head, KvCopy::row(), KvCopy::col());
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Shape::kRowsPerWarp;
    q_lane_ = QTile::lane_rows_first(base_, warp_row, lane);
    k_lane_ = KvTile::lane_columns_first(base_ + Shape::kK, 0, lane);
    v_lane_ = KvTile::lane_rows_first(base_ + Shape::kV, 0, lane);
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

  // Waits for the queries, and holds them in registers where these suffice.
  __device__ __forceinline__ void prepare_queries() {
    wait_for_copies();
    __syncthreads();
    if constexpr (Shape::kQueriesInRegisters) {
      static_for<kSteps>([&](auto step) { read_queries<step>(q_[step]); });
    }
  }

  template <int kStep>
  __device__ __forceinline__ void read_queries(Queries& a) const {
    const uint32_t lane = QTile::within(in_loop(q_lane_), 16 * kStep);
    static_for<kFragments>(
        [&](auto m) { load_matrices<QTile::offset_of(16 * m, 16 * kStep)>(a[m], lane); });
  }

  template <int kStep>
  __device__ __forceinline__ void queries(Queries& a) const {
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < 4 * kFragments; ++i) a[i / 4][i % 4] = q_[kStep][i / 4][i % 4];
    } else {
      read_queries<kStep>(a);
    }
  }

  // s = q * k^T
  __device__ __forceinline__ void score(Scores& s) const {
    static_for<kSteps>([&](auto step) {
      Queries a;
      queries<step>(a);
      score<step>(s, a);
    });
  }
  // The same for 16 of head_dim's columns.
  template <int kStep>
  __device__ __forceinline__ void score(Scores& s, const Queries& a) const {
    const uint32_t lane = in_loop(k_lane_);
    static_for<kN / 2>([&](auto n) {
      uint32_t b[4];
      load_matrices<KvTile::offset_of(16 * n, 16 * kStep)>(b, KvTile::within(lane, 16 * kStep));
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        multiply_add<Element>(s[m][2 * n], a[m], b[0], b[1]);
        multiply_add<Element>(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    });
  }

  // o += p * v for 16 of the tile's keys.
  template <int kStep>
  __device__ __forceinline__ void multiply(const Weights& p) {
    const uint32_t lane = in_loop(v_lane_);
    static_for<kD / 2>([&](auto d) {
      uint32_t b[4];
      load_matrices_transposed<KvTile::offset_of(16 * kStep, 16 * d)>(b,
                                                                      KvTile::within(lane, 16 * d));
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        multiply_add<Element>(o_[m][2 * d], p[m][kStep], b[0], b[1]);
        multiply_add<Element>(o_[m][2 * d + 1], p[m][kStep], b[2], b[3]);
      }
    });
  }

 private:
  // Keeps the few instructions that derive addresses from this one inside the loop: hoisted, they
  // would hold registers through the softmax, where none are left.
  static __device__ __forceinline__ uint32_t in_loop(uint32_t address) {
    if constexpr (Shape::kHeadDim > 64) asm volatile("" : "+r"(address));
    return address;
  }

  KvCopy copy_;                        // of K; V's tile lies behind it
  const char *k_source_, *v_source_;   // this thread's element of tile 0
  uint32_t q_lane_, k_lane_, v_lane_;  // ldmatrix addresses
  uint32_t q_[Shape::kQueriesInRegisters ? kSteps : 1][kFragments][4];
};

}  // namespace lighttransfer::cuda
