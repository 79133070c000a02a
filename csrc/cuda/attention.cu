#include "attention.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"

namespace lighttransfer::cuda {
namespace {

template <class Element>
void launch(const AttentionParams& p, void* stream) {
  if (p.head_dim <= 64) return launch_prefill<Element, 64>(p, stream);
  if (p.head_dim <= 96) return launch_prefill<Element, 96>(p, stream);
  if (p.head_dim <= 128) return launch_prefill<Element, 128>(p, stream);
  launch_prefill<Element, 256>(p, stream);
}

}  // namespace

void run(const AttentionParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, stream);
  launch<__half>(p, stream);
}

}  // namespace lighttransfer::cuda
