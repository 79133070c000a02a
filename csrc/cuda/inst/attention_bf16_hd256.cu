#include "../attention_launch.cuh"

namespace lighttransfer::cuda {

template void launch_prefill<__nv_bfloat16, 256>(const AttentionParams& p, void* stream);

}  // namespace lighttransfer::cuda
