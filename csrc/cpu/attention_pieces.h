// What the CPU's attention is pieced together from: rectangles of tokens, their states, where those
// go, and the mask of a band.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../params.h"

namespace lighttransfer::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const torch::stable::Device kCpu(torch::headeronly::DeviceType::CPU);

inline ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return ScalarType::Half;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat32:
      break;
  }
  return ScalarType::Float;
}

// The state of a piece of the attention matrix, in torch's strides.
struct State {
  Tensor out;  // [B, H, S, D]
  Tensor lse;  // [B, H, S]
};

// A rectangle of queries or keys: [n_batch, n_tokens] of one side of the op.
struct Tokens {
  Activation a;
  int64_t n_batch, n_tokens;

  // n_blocks runs of block_size tokens, which start `step` tokens apart, as a batch of their own.
  Tokens blocks(int64_t n_blocks, int64_t block_size, int64_t step) const {
    Tokens t = *this;
    t.a.batch_stride = step * a.token_stride;
    t.n_batch = n_blocks, t.n_tokens = block_size;
    return t;
  }
};

// Where the state of a rectangle of queries goes.
struct Target {
  Tokens out;
  float* lse;
  int64_t lse_strides[3];
};

// The streaming mask of a block of queries over the n_recent - 1 + block keys up to its last query:
// query r sees the n_recent keys from key r on. It is the same for every block, so that the blocks
// of a row can be the batch of one call.
class BandMask {
 public:
  BandMask(int64_t block, int64_t n_recent)
      : n_recent_(n_recent), width_(n_recent - 1 + block), values_(block * width_, -INFINITY) {
    for (int64_t r = 0; r < block; ++r) {
      std::fill_n(values_.begin() + r * width_ + r, n_recent, 0.0f);
    }
  }

  // Of a block of `size` queries, at most the block's size.
  Tensor view(int64_t size) const {
    return torch::stable::from_blob(const_cast<float*>(values_.data()),
                                    {size, n_recent_ - 1 + size}, {width_, 1}, kCpu,
                                    ScalarType::Float);
  }

 private:
  int64_t n_recent_, width_;
  std::vector<float> values_;
};

}  // namespace
}  // namespace lighttransfer::cpu
