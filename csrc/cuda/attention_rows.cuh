// What a CTA of the prefill kernels has to show for its rows, and how it writes it.
#pragma once

#include <new>

#include "attention_shape.cuh"
#include "softmax.cuh"

namespace lighttransfer::cuda {

// The attention state of a tile of rows: the softmax and the output, not yet divided by the sums.
template <class Element, class Shape>
class PrefillRows {
 protected:
  static constexpr int kFragments = Shape::kRowsPerWarp / 16;
  static constexpr int kD = Shape::kHeadDim / 8;
  using QTile = typename Shape::QTile;
  using Softmax = OnlineSoftmax<Element, kFragments>;

  __device__ __forceinline__ PrefillRows(const PrefillArgs& args, char* smem)
      : args_(args),
        p_(args.p),
        smem_(smem),
        base_(shared_address(smem)),
        cta_(*reinterpret_cast<RowTile*>(smem + Shape::kRowTile)),
        softmax_(args.scale_log2) {
    if (threadIdx.x == 0) new (&cta_) RowTile(p_, args.row_tiles, Shape::kBlockM);
    __syncthreads();
  }

  __device__ __forceinline__ void clear() {
    softmax_.clear();
#pragma unroll
    for (int i = 0; i < kFragments * kD * 4; ++i) o_[i / (4 * kD)][i / 4 % kD][i % 4] = 0.0f;
  }

  // This thread's element of an activation of the CTA's batch row.
  __device__ __forceinline__ char* element(const Activation& a, int head, int row, int col) const {
    return static_cast<char*>(a.data) +
           2 * (cta_.batch * a.batch_stride + head * a.head_stride + row * a.token_stride + col);
  }

  // Ends segment i of a tile with measured rows: its sums make way for the next segment's.
  __device__ __forceinline__ void set_aside(int i) {
    softmax_.reduce_sums();
    float2* partial = partials(i);
    const bool leads = lane() % 4 == 0;
#pragma unroll
    for (int r = 0; r < Softmax::kRows; ++r) {
      if (leads) partial[8 * r] = {softmax_.sum[r], softmax_.shift[r]};
      softmax_.sum[r] = 0.0f;
    }
  }
  // What segment i had for the thread's first row; 8 further on for its next one.
  __device__ __forceinline__ float2* partials(int i) const {
    return reinterpret_cast<float2*>(smem_ + Shape::kPartials) + i * Shape::kBlockM + first_row();
  }

  __device__ __forceinline__ void finish() {
    softmax_.reduce_sums();
    if (p_.mass != nullptr) write_mass();
    write_lse();
#pragma unroll
    for (int r = 0; r < Softmax::kRows; ++r) {
      const float total = softmax_.sum[r], factor = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        o_[r / 2][d][r % 2 * 2] *= factor;
        o_[r / 2][d][r % 2 * 2 + 1] *= factor;
      }
    }
    write_output();
  }

  // The last segment's sums are those of the sinks. Afterwards softmax_.sum is that of the whole
  // row.
  __device__ __forceinline__ void write_mass() {
    const int n_last = static_cast<int>(p_.n_last), n_queries = static_cast<int>(p_.n_queries);
    auto* mass =
        reinterpret_cast<float2*>(p_.mass) + (cta_.batch * p_.n_heads + cta_.head) * p_.n_last;
    if (cta_.row_end == n_queries) {
#pragma unroll 1
      for (int i = threadIdx.x; i < n_last - cta_.n_measured(); i += Shape::kThreads) {
        mass[i] = {0.0f, 0.0f};
      }
    }
    if (!cta_.measures(cta_.row_end - 1)) return;
    const int quad = lane() / 4 * 4, first = cta_.row_begin + first_row();
    const bool leads = lane() % 4 == 0;
    const float2 *recents = partials(RowTile::kRecent), *middles = partials(RowTile::kMiddle);
#pragma unroll
    for (int r = 0; r < Softmax::kRows; ++r) {
      // Read by the lane that wrote them; the others get the total from it.
      float2 recent{0.0f, INFINITY}, middle = recent;
      if (leads) recent = recents[8 * r], middle = middles[8 * r];
      const float sinks_sum = softmax_.sum[r];
      const float shift = softmax_.shift[r];
      const float recent_sum = recent.x * Softmax::rescale(recent.y, shift);
      const float total = sinks_sum + recent_sum + middle.x * Softmax::rescale(middle.y, shift);
      const int row = first + 8 * r;
      if (leads && row < cta_.row_end && cta_.measures(row)) {
        mass[n_last - (n_queries - row)] = {sinks_sum / total, recent_sum / total};
      }
      softmax_.sum[r] = __shfl_sync(~0u, total, quad);
    }
  }

  // Each of a row's four lanes has all of its rows: lane t % 4 writes row t.
  __device__ __forceinline__ void write_lse() const {
    const int lane_of_row = lane() % 4, r = lane_of_row % Softmax::kRows;
    float shift = softmax_.shift[0], sum = softmax_.sum[0];
#pragma unroll
    for (int i = 1; i < Softmax::kRows; ++i) {
      if (r == i) shift = softmax_.shift[i], sum = softmax_.sum[i];
    }
    const int row = cta_.row_begin + first_row() + 8 * r;
    if (lane_of_row == r && row < cta_.row_end) {
      p_.lse[(cta_.batch * p_.n_heads + cta_.head) * p_.n_queries + row] = Softmax::lse(shift, sum);
    }
  }

  // Through the warp's own rows of the query tile, so that every store is of 16 bytes.
  __device__ __forceinline__ void write_output() const {
    const uint32_t to = base_ + QTile::offset(first_row(), 0) + lane() % 4 * 4;
#pragma unroll
    for (int r = 0; r < Softmax::kRows; ++r) {
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        const auto& o = o_[r / 2][d];
        store_shared(QTile::within(to, 8 * d) + QTile::offset_of(8 * r, 8 * d),
                     pack<Element>(o[r % 2 * 2], o[r % 2 * 2 + 1]));
      }
    }
    __syncwarp();
    constexpr int kLanes = QTile::kBlockCols / 8, kRowsPerPass = 32 / kLanes;
    const int col = lane() % kLanes * 8, first = warp_row() + lane() / kLanes;
    const int n_rows = cta_.row_end - cta_.row_begin;
    char* out = element(p_.out, cta_.head, cta_.row_begin + first, col);
    const int64_t pass_bytes = 2 * kRowsPerPass * p_.out.token_stride;
#pragma unroll
    for (int pass = 0; pass < Shape::kRowsPerWarp / kRowsPerPass; ++pass, out += pass_bytes) {
      const int row = first + pass * kRowsPerPass;
      if (row >= n_rows) break;
#pragma unroll
      for (int block = 0; block < QTile::kBlocks; ++block) {
        if (col + block * QTile::kBlockCols >= p_.head_dim) break;
        *reinterpret_cast<uint4*>(out + block * QTile::kRowBytes) = *reinterpret_cast<const uint4*>(
            smem_ + QTile::offset(row, col) + block * QTile::kBlockBytes);
      }
    }
  }

  static __device__ __forceinline__ int lane() { return thread_anew() % 32; }
  static __device__ __forceinline__ int warp_row() {
    return thread_anew() / 32 * Shape::kRowsPerWarp;
  }

  // The first of the thread's rows, which are 8 apart.
  static __device__ __forceinline__ int first_row() { return warp_row() + lane() / 4; }

  const PrefillArgs& args_;
  const AttentionParams& p_;
  char* smem_;
  uint32_t base_;  // shared address of smem_
  RowTile& cta_;   // in shared memory, since only masked tiles and the ends of segments look at it
  Softmax softmax_;
  float o_[kFragments][kD][4] = {};
};

}  // namespace lighttransfer::cuda
