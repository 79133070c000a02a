// The mass of a prompt's last queries, measured after the full pass.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "kernels.h"

namespace lighttransfer::cpu {
namespace {

// In 16 bits torch's exp has a relative error of 6e-5, and so has the sum that a mass is a share
// of. Where the window keeps every key the shares must sum to 1, and nowhere to more.
void normalise(const AttentionParams& p) {
  const int64_t n_rows = p.n_heads * p.n_last;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = p.n_keys - (p.seq_start == nullptr ? 0 : p.seq_start[b]);
    const bool keeps_all = p.window.recent_begin(length) <= p.window.n_sink;
    for (int64_t i = 0; i < n_rows; ++i) {
      float* mass = p.mass + (b * n_rows + i) * 2;
      const float sum = mass[0] + mass[1];
      if (sum > 1.0f || (keeps_all && sum > 0.0f)) mass[0] /= sum, mass[1] /= sum;
    }
  }
}

}  // namespace

void measure_mass(const AttentionParams& p, const torch::stable::Tensor& lse) {
  RetainedMassParams m{};
  m.n_queries = std::min(p.n_last, p.n_queries);
  const int64_t first = p.n_queries - m.n_queries;
  const int64_t element = p.dtype == DType::kFloat32 ? 4 : 2;
  m.q = p.q, m.k = p.k;
  m.q.data = static_cast<char*>(p.q.data) + first * p.q.token_stride * element;
  m.lse = static_cast<const float*>(lse.data_ptr()) + first;
  for (int i = 0; i < 3; ++i) m.lse_strides[i] = lse.stride(i);
  m.seq_start = p.seq_start;
  m.dtype = p.dtype;
  m.batch = p.batch, m.n_keys = p.n_keys;
  m.n_heads = p.n_heads, m.n_kv_heads = p.n_kv_heads, m.head_dim = p.head_dim;
  m.scale = p.scale;
  m.window = p.window;

  const int64_t n_heads = p.batch * p.n_heads, row = 2 * p.n_last, real = 2 * m.n_queries;
  std::vector<float> fewer;  // where there are fewer queries than n_last, zeros come first
  if (real < row) fewer.resize(n_heads * real);
  m.mass = real < row ? fewer.data() : p.mass;
  cpu::run(m);
  for (int64_t h = 0; real < row && h < n_heads; ++h) {
    float* end = std::fill_n(p.mass + h * row, row - real, 0.0f);
    std::copy_n(fewer.data() + h * real, real, end);
  }
  normalise(p);
}

}  // namespace lighttransfer::cpu
