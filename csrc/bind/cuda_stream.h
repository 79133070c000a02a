// The current CUDA stream, without a hard reference to a CUDA build of torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

// Exists only in CUDA builds of torch: a strong reference would make this library unloadable in the
// others.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace lighttransfer::bind {

#ifdef LIGHTTRANSFER_SIMULATOR
// The simulator runs the CUDA launchers on CPU tensors; it has one stream.
class CudaLaunchScope {
 public:
  explicit CudaLaunchScope(const torch::stable::Tensor&) {}
  void* stream() const { return nullptr; }
};
#else
class CudaLaunchScope {
 public:
  explicit CudaLaunchScope(const torch::stable::Tensor& t)
      : guard_(checked_index(t)), stream_(nullptr) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }

 private:
  static int32_t checked_index(const torch::stable::Tensor& t) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      throw std::runtime_error(
          "lighttransfer: a CUDA tensor, but this torch is built without CUDA");
    }
    return t.get_device_index();
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};
#endif

}  // namespace lighttransfer::bind
