#include "parallel.h"

#include <torch/csrc/stable/ops.h>

namespace lighttransfer::cpu {

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction function,
                  void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, function, context));
}

int64_t n_threads() {
  return torch::stable::get_num_threads();
}

}  // namespace lighttransfer::cpu
