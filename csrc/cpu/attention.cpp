// Attention by torch's own CPU kernel, which knows two masks: none, and a causal one that starts at
// the first query and the first key. Every mask of ours is a union of such calls over disjoint
// keys, merged by their LSE, plus one additive mask for the diagonal band of the streaming mask. A
// piece is laid out so that each of its queries sees a key of it: torch's LSE of an empty row is
// not -inf.
#include "attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "attention_pieces.h"
#include "kernels.h"

namespace lighttransfer::cpu {
namespace {

class Attention {
 public:
  explicit Attention(const AttentionParams& p) : p_(p), dtype_(scalar_type(p.dtype)) {}

  AttentionResult run() {
    int64_t begin = 0;
    while (begin < p_.batch) {  // rows with the same start share their calls
      int64_t end = begin + 1;
      while (end < p_.batch && start(end) == start(begin)) ++end;
      rows(begin, end - begin, start(begin));
      begin = end;
    }
    return {out_, lse_};
  }

 private:
  int64_t start(int64_t b) const { return p_.seq_start == nullptr ? 0 : p_.seq_start[b]; }

  Tokens tokens(const Activation& a, int64_t b, int64_t s, int64_t n_batch,
                int64_t n_tokens) const {
    const int64_t element = dtype_ == ScalarType::Float ? 4 : 2;
    Tokens t{a, n_batch, n_tokens};
    t.a.data = static_cast<char*>(a.data) + (b * a.batch_stride + s * a.token_stride) * element;
    return t;
  }

  Tensor view(const Tokens& t, int64_t n_heads) const {  // [B, H, S, D]
    const std::array<int64_t, 4> sizes{t.n_batch, n_heads, t.n_tokens, p_.head_dim};
    const std::array<int64_t, 4> strides{t.a.batch_stride, t.a.head_stride, t.a.token_stride, 1};
    return torch::stable::from_blob(t.a.data, sizes, strides, kCpu, dtype_);
  }

  void allocate() {
    if (out_.defined()) return;
    const std::array<int64_t, 4> sizes{p_.batch, p_.n_queries, p_.n_heads, p_.head_dim};
    out_ = torch::stable::empty(sizes, dtype_);
    allocate_lse();
  }

  void allocate_lse() {
    const std::array<int64_t, 3> sizes{p_.batch, p_.n_heads, p_.n_queries};
    lse_ = torch::stable::empty(sizes, ScalarType::Float);
  }

  Target target(int64_t b, int64_t s, int64_t n_batch, int64_t n_tokens) {
    allocate();
    const Activation out{out_.data_ptr(), out_.stride(0), out_.stride(1), out_.stride(2)};
    float* lse = static_cast<float*>(lse_.data_ptr()) + b * lse_.stride(0) + s;
    return {tokens(out, b, s, n_batch, n_tokens), lse, {lse_.stride(0), lse_.stride(1), 1}};
  }

  Target target_blocks(int64_t b, int64_t s, int64_t n_blocks, int64_t size) {
    Target t = target(b, s, 1, n_blocks * size);
    t.out = t.out.blocks(n_blocks, size, size);
    t.lse_strides[0] = size;
    return t;
  }

  Tensor lse_view(const Target& t) const {
    const std::array<int64_t, 3> sizes{t.out.n_batch, p_.n_heads, t.out.n_tokens};
    return torch::stable::from_blob(t.lse, sizes, {t.lse_strides, 3}, kCpu, ScalarType::Float);
  }

  // One call of torch's kernel. `mask` is added to the scores where it is given.
  State attend(const Tokens& q, const Tokens& k, const Tokens& v, bool causal,
               const std::optional<Tensor>& mask = std::nullopt) const {
    using torch::stable::detail::from;
    using torch::stable::detail::to;
    std::array<StableIValue, 7> stack{from(view(q, p_.n_heads)),
                                      from(view(k, p_.n_kv_heads)),
                                      from(view(v, p_.n_kv_heads)),
                                      from(0.0),
                                      from(causal),
                                      from(mask),
                                      from(std::optional<double>(p_.scale))};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(
        "aten::_scaled_dot_product_flash_attention_for_cpu", "", stack.data(), TORCH_ABI_VERSION));
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
  }

  // Queries [s, s + n) of the rows are done.
  void put(const State& state, int64_t b, int64_t s, int64_t n_batch, int64_t n) {
    const Tensor out = torch::stable::transpose(state.out, 1, 2);
    if (n_batch == p_.batch && n == p_.n_queries && out.is_contiguous()) {
      out_ = out;
      allocate_lse();
      torch::stable::copy_(lse_, state.lse);
      return;
    }
    put(state, target(b, s, n_batch, n));
  }

  void put(const State& state, const Target& t) const {
    Tensor out = view(t.out, p_.n_heads), lse = lse_view(t);
    torch::stable::copy_(out, state.out);
    torch::stable::copy_(lse, state.lse);
  }

  void put_merged(const State& a, const State& b, const Target& t) const {
    const auto activation = [](const Tensor& out) {
      return Activation{out.data_ptr(), out.stride(0), out.stride(2), out.stride(1)};
    };
    MergeStatesParams m{};
    m.out_a = activation(a.out), m.out_b = activation(b.out), m.out = t.out.a;
    m.lse_a = static_cast<const float*>(a.lse.data_ptr());
    m.lse_b = static_cast<const float*>(b.lse.data_ptr());
    m.lse = t.lse;
    for (int i = 0; i < 3; ++i) {
      m.lse_a_strides[i] = a.lse.stride(i);
      m.lse_b_strides[i] = b.lse.stride(i);
      m.lse_strides[i] = t.lse_strides[i];
    }
    m.dtype = p_.dtype;
    m.batch = t.out.n_batch, m.n_tokens = t.out.n_tokens;
    m.n_heads = p_.n_heads, m.head_dim = p_.head_dim;
    cpu::run(m);
  }

  void put_empty(int64_t b, int64_t s, int64_t n_batch, int64_t n) {
    if (n == 0) return;
    const Target t = target(b, s, n_batch, n);
    torch::stable::fill_(view(t.out, p_.n_heads), 0.0);
    torch::stable::fill_(lse_view(t), -INFINITY);
  }

  // Rows [b, b + n_batch), whose first real key is `first`. Positions count from there.
  void rows(int64_t b, int64_t n_batch, int64_t first) {
    const int64_t length = p_.n_keys - first;
    const int64_t n_empty = p_.causal ? std::clamp<int64_t>(p_.n_queries - length, 0, p_.n_queries)
                                      : (length == 0 ? p_.n_queries : 0);
    put_empty(b, 0, n_batch, n_empty);
    if (n_empty == p_.n_queries) return;
    if (!p_.causal) {
      const State whole =
          attend(tokens(p_.q, b, 0, n_batch, p_.n_queries), tokens(p_.k, b, first, n_batch, length),
                 tokens(p_.v, b, first, n_batch, length), false);
      return put(whole, b, 0, n_batch, p_.n_queries);
    }

    const int64_t t_begin = length - (p_.n_queries - n_empty);  // the first query's position
    const int64_t window = p_.mask.n_sink + p_.mask.n_recent;   // a query below it sees all
    if (!p_.mask.limited() || window >= length) {
      return causal(b, n_batch, first, t_begin, length);
    }
    if (t_begin < window) causal(b, n_batch, first, t_begin, window);
    for (int64_t i = b; i < b + n_batch; ++i) {
      streaming(i, first, std::max(t_begin, window), length);
    }
  }

  int64_t query(int64_t first, int64_t t) const { return t + first + p_.n_queries - p_.n_keys; }

  // The queries at positions [t_begin, t_end) over every key that causality lets them see.
  void causal(int64_t b, int64_t n_batch, int64_t first, int64_t t_begin, int64_t t_end) {
    const int64_t n = t_end - t_begin, s = query(first, t_begin);
    const Tokens q = tokens(p_.q, b, s, n_batch, n);
    const auto piece = [&](int64_t k_begin, int64_t k_end, bool is_causal) {
      return attend(q, tokens(p_.k, b, first + k_begin, n_batch, k_end - k_begin),
                    tokens(p_.v, b, first + k_begin, n_batch, k_end - k_begin), is_causal);
    };
    if (n == 1) return put(piece(0, t_end, false), b, s, n_batch, n);
    if (t_begin == 0) return put(piece(0, t_end, true), b, s, n_batch, n);
    const State before = piece(0, t_begin, false);
    put_merged(before, piece(t_begin, t_end, true), target(b, s, n_batch, n));
  }

  // The queries at positions [t_begin, t_end), all of which lie beyond the window, of row b.
  void streaming(int64_t b, int64_t first, int64_t t_begin, int64_t t_end) {
    if (p_.mask.n_recent == 0) return sinks_only(b, first, t_begin, t_end);
    // Torch's kernel takes 32 queries at a time; a larger block only computes more hidden scores.
    const int64_t block = std::min<int64_t>(t_end - t_begin, 32);
    const BandMask mask(block, p_.mask.n_recent);
    const int64_t n_blocks = (t_end - t_begin) / block;
    band(b, first, t_begin, n_blocks, block, mask);
    const int64_t rest = t_begin + n_blocks * block;
    if (rest < t_end) band(b, first, rest, 1, t_end - rest, mask);
  }

  void sinks_only(int64_t b, int64_t first, int64_t t_begin, int64_t t_end) {
    const int64_t s = query(first, t_begin), n = t_end - t_begin;
    if (p_.mask.n_sink == 0) return put_empty(b, s, 1, n);
    put(attend(tokens(p_.q, b, s, 1, n), tokens(p_.k, b, first, 1, p_.mask.n_sink),
               tokens(p_.v, b, first, 1, p_.mask.n_sink), false),
        b, s, 1, n);
  }

  // n_blocks blocks of `size` queries from position t on: the sinks and the band of recent keys.
  void band(int64_t b, int64_t first, int64_t t, int64_t n_blocks, int64_t size,
            const BandMask& mask) {
    const int64_t s = query(first, t), k_begin = first + t - p_.mask.n_recent + 1;
    const int64_t n_keys = p_.mask.n_recent - 1 + size;
    const Tokens q = tokens(p_.q, b, s, 1, 0).blocks(n_blocks, size, size);
    const State recent = attend(q, tokens(p_.k, b, k_begin, 1, 0).blocks(n_blocks, n_keys, size),
                                tokens(p_.v, b, k_begin, 1, 0).blocks(n_blocks, n_keys, size),
                                false, mask.view(size));
    const Target t_out = target_blocks(b, s, n_blocks, size);
    if (p_.mask.n_sink == 0) return put(recent, t_out);
    const State sinks =
        attend(q, tokens(p_.k, b, first, 1, 0).blocks(n_blocks, p_.mask.n_sink, 0),
               tokens(p_.v, b, first, 1, 0).blocks(n_blocks, p_.mask.n_sink, 0), false);
    put_merged(sinks, recent, t_out);
  }

  const AttentionParams& p_;
  const ScalarType dtype_;
  Tensor out_, lse_;
};

// Does the CPU multiply matrices of bf16? Without, torch's kernel is no faster in 16 bits than in
// fp32, in which its exp is exact.
bool has_amx() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-bf16");
#else
  return false;
#endif
}

}  // namespace

AttentionResult attend_pieces(const AttentionParams& p) {
  return Attention(p).run();
}

AttentionResult attend(const AttentionParams& p) {
  const bool in_fp32 = p.dtype != DType::kFloat32 && !has_amx();
  const AttentionResult result = in_fp32 ? attend_in_fp32(p) : attend_pieces(p);
  if (p.mass != nullptr) measure_mass(p, result.lse);
  return result;
}

}  // namespace lighttransfer::cpu
