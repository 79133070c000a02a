// Attention on the CPU returns tensors: the memory is torch's, which saves a copy of the output.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../params.h"

namespace lighttransfer::cpu {

struct AttentionResult {
  torch::stable::Tensor out;  // [B, S_q, H_q, D] contiguous
  torch::stable::Tensor lse;  // [B, H_q, S_q] contiguous
};

// Computes p.mass too where it is asked for; ignores p.out and p.lse. No size is 0.
AttentionResult attend(const AttentionParams& p);

// out and lse by torch's kernel in p.dtype.
AttentionResult attend_pieces(const AttentionParams& p);

// The same of fp16 or bf16 inputs, computed in fp32.
AttentionResult attend_in_fp32(const AttentionParams& p);

// p.mass from the LSE of the pass.
void measure_mass(const AttentionParams& p, const torch::stable::Tensor& lse);

}  // namespace lighttransfer::cpu
