#include "../attention_launch.cuh"

namespace lighttransfer::cuda {

template void launch_prefill<__half, 256>(const AttentionParams& p, void* stream);

}  // namespace lighttransfer::cuda
