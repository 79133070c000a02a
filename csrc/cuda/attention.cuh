// Prefill attention: FlashAttention-2's schedule (Dao, 2023) for sm_80. One CTA per 128 query rows
// and head walks over the tiles of keys that any of its rows sees, from right to left.
#pragma once

#include "attention_tiles.cuh"
#include "launch.h"

namespace lighttransfer::cuda {

template <class Element, class Shape>
class PrefillCta : PrefillTiles<Element, Shape> {
  using Tiles = PrefillTiles<Element, Shape>;
  using Tiles::args_, Tiles::cta_, Tiles::kFragments, Tiles::kN, Tiles::kSteps, Tiles::o_,
      Tiles::p_, Tiles::softmax_;
  using typename Tiles::Queries, typename Tiles::Scores, typename Tiles::Softmax,
      typename Tiles::Weights;

 public:
  __device__ __forceinline__ PrefillCta(const PrefillArgs& args, char* smem) : Tiles(args, smem) {}

  __device__ __forceinline__ void run() {
    const int tile = first_tile(0);
    if (tile >= 0) {
      this->load_queries();
      this->template load_k<true>(tile);
      this->prepare_queries();
    }
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (int i = 0; i < RowTile::kSegments; ++i) {
        const Columns columns = cta_.segment(i);
        if (!columns.empty()) visit(i, columns);
        if (cta_.measures(cta_.row_end - 1) && i != RowTile::kSinks) this->set_aside(i);
      }
      const bool careful = cta_.careful;
      if (!__syncthreads_or(softmax_.overflowed()) || careful) break;
      start_again();
    }
    this->finish();
  }

 private:
  // Weights of the first pass were infinite: now maxima are looked for in every tile.
  __device__ __forceinline__ void start_again() {
    if (threadIdx.x == 0) cta_.careful = true;
    this->clear();
    this->template load_k<true>(first_tile(0));
    __syncthreads();  // everybody knows
  }

  // The rightmost tile of segment i or, if it is empty, of the next one that is not; -1: none.
  __device__ __forceinline__ int first_tile(int i) const {
#pragma unroll 1
    for (; i < RowTile::kSegments; ++i) {
      const Columns columns = cta_.segment(i);
      if (!columns.empty()) return (columns.end - 1) / Shape::kBlockN;
    }
    return -1;
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
        attend_masked(tile, next, i);
        --tile;
      } else {
        softmax_.before_whole_tiles(tile - full_begin + 1, cta_.careful);
#pragma unroll 1
        for (; tile >= full_begin; --tile) {
          // The sinks outgrow what fp16 holds.
          if (Softmax::kFindsLastMaximum && tile == full_begin) softmax_.tiles_to_raise = 1;
          attend_whole(tile, tile > first ? tile - 1 : next_segment);
        }
      }
    }
  }

  // A tile that some mask cuts. K and V have one buffer each: V arrives while the scores are
  // computed, the next K while V is used.
  __device__ __forceinline__ void attend_masked(int tile, int next_tile, int segment) {
    wait_for_copies();
    __syncthreads();  // K is there, and nobody reads the previous V
    this->template load_v<true>(tile);

    const bool active = warp_sees(tile, segment);
    Weights p;
    if (active) weigh_masked(tile, segment, p);

    wait_for_copies();
    __syncthreads();  // V is there, and nobody reads K
    if (next_tile >= 0) this->template load_k<true>(next_tile);
    if (active) static_for<kN / 2>([&](auto step) { this->template multiply<step>(p); });
  }

  // The weights of a tile's keys. Where the shifts turn out too high the scores, whose registers
  // now hold the weights, are computed once more.
  __device__ __forceinline__ void weigh_masked(int tile, int segment, Weights& p) {
    bool raise = softmax_.tiles_to_raise > 0;
#pragma unroll 1
    for (;; raise = true) {
      Scores s = {};
      this->score(s);
      mask(s, tile, segment);
      if (raise) softmax_.raise(s, o_);
      if (softmax_.weigh_masked(s, p, raise)) return;
    }
  }

  // A tile that every row sees whole. The barriers are those of attend_masked. Weights are made
  // while the tensor cores multiply others by V, so all of it is one stretch of code. Copies of V
  // begin behind the first products, whose operands would else wait for them.
  __device__ __forceinline__ void attend_whole(int tile, int next_tile) {
    Queries a;
    this->template queries<0>(a);
    wait_for_copies();
    __syncthreads();  // K is there, and nobody reads the previous V
    Scores s = {};
    this->template score<0>(s, a);
    static_for<kSteps - 1>([&](auto before) {
      constexpr int kStep = before + 1;
      this->template queries<kStep>(a);
      this->template score<kStep>(s, a);
      if constexpr (kStep == 1) this->template load_v<false>(tile);
    });
    if (softmax_.tiles_to_raise > 0) softmax_.raise(s, o_);

    wait_for_copies();
    __syncthreads();  // V is there, and nobody reads K
    if (next_tile >= 0) this->template load_k<false>(next_tile);
    Weights p;
    softmax_.template weigh<false>(s, p, softmax_.sum);
    static_for<kN / 2>([&](auto step) {
      this->template multiply<step>(p);
      if constexpr (Shape::kFencesProducts && step == kN / 4 - 1) scheduling_fence();
    });
    softmax_.settle(o_);
  }

  // Does any row of this warp see a key of the tile?
  __device__ __forceinline__ bool warp_sees(int tile, int segment) const {
    const int first = cta_.row_begin + this->warp_row();
    const int last = min(first + Shape::kRowsPerWarp, cta_.row_end) - 1;
    const int begin = tile * Shape::kBlockN;
    return first <= last && begin < cta_.end_of_row(last) &&
           begin + Shape::kBlockN > cta_.begin_of_row(first, segment);
  }

  // Scores of hidden keys become -inf.
  __device__ __forceinline__ void mask(Scores& s, int tile, int segment) const {
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
};

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    prefill_attn_kernel(const __grid_constant__ PrefillArgs args) {
  extern __shared__ __align__(128) char smem[];
  PrefillCta<Element, Shape>(args, smem).run();
}

}  // namespace lighttransfer::cuda
