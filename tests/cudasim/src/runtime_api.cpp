// The part of the CUDA runtime's C interface that nvcc's host code calls: registration, launches,
// kernel attributes. Types are declared here as the ABI has them, so that nothing of CUDA is needed
// to build this library.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "api.h"
#include "runtime.h"

using cudasim::KernelEntry;
using cudasim::Runtime;
using namespace cudasim::api;

namespace {

struct Dim3 {
  unsigned x, y, z;
};
struct CallConfiguration {
  Dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<CallConfiguration> g_configurations;

constexpr int kInvalidDeviceFunction = 98, kNotSupported = 801;

int launch(KernelEntry* kernel, Dim3 grid, Dim3 block, void** args, size_t shared) {
  if (!kernel) return fail(kInvalidDeviceFunction);
  const uint32_t g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  try {
    return Runtime::instance().launch(*kernel, g, b, args, static_cast<int64_t>(shared));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cudasim: %s: %s\n", kernel->name.c_str(), e.what());
    return fail(kNotSupported);
  }
}

KernelEntry* kernel_of(const void* function) {
  try {
    return Runtime::instance().by_stub(function);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cudasim: %s\n", e.what());
    return nullptr;
  }
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return static_cast<void**>(Runtime::instance().register_fatbin(wrapper));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) {
  Runtime::instance().unregister_fatbin(handle);
}
char __cudaInitModule(void**) {
  return 1;
}

void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  Runtime::instance().register_function(handle, host, name);
}
void __cudaRegisterVar(void** handle, char* host, char*, const char* name, int, size_t, int, int) {
  Runtime::instance().register_variable(handle, host, name);
}
void __cudaRegisterManagedVar(void** handle, void** host, char*, const char* name, int, size_t, int,
                              int) {
  Runtime::instance().register_variable(handle, host, name);
}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  g_configurations.push_back({grid, block, shared, stream});
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  if (g_configurations.empty()) return kInvalidValue;
  const CallConfiguration& c = g_configurations.back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<void**>(stream) = c.stream;
  g_configurations.pop_back();
  return kSuccess;
}

int __cudaGetKernel(void** kernel, const void* stub) {
  *kernel = kernel_of(stub);
  return *kernel ? kSuccess : fail(kInvalidDeviceFunction);
}
int __cudaLaunchKernel(void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, void*) {
  return launch(static_cast<KernelEntry*>(kernel), grid, block, args, shared);
}
int __cudaLaunchKernel_ptsz(void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared,
                            void*) {
  return launch(static_cast<KernelEntry*>(kernel), grid, block, args, shared);
}
int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared,
                     void*) {
  return launch(kernel_of(function), grid, block, args, shared);
}
struct LaunchConfig {
  Dim3 grid, block;
  size_t shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};
int cudaLaunchKernelExC(const LaunchConfig* c, const void* function, void** args) {
  return launch(kernel_of(function), c->grid, c->block, args, c->shared);
}
int cudaGetKernel(void** kernel, const void* stub) {
  return __cudaGetKernel(kernel, stub);
}

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  KernelEntry* kernel = kernel_of(function);
  if (!kernel) return fail(kInvalidDeviceFunction);
  if (attribute == 8) {  // cudaFuncAttributeMaxDynamicSharedMemorySize
    if (value < 0 || value > 163 * 1024) return fail(kInvalidValue);
    kernel->max_dynamic_shared = value;
  }
  return kSuccess;
}
int cudaFuncSetCacheConfig(const void*, int) {
  return kSuccess;
}
struct FuncAttributes {
  size_t shared, constant, local;
  int max_threads, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared, carveout;
};
int cudaFuncGetAttributes(FuncAttributes* a, const void* function) {
  KernelEntry* kernel = kernel_of(function);
  if (!kernel) return fail(kInvalidDeviceFunction);
  auto program = Runtime::instance().program(*kernel);
  *a = FuncAttributes();
  a->shared = program->kernel->static_shared;
  a->local = program->kernel->local_size;
  a->max_threads = program->kernel->max_threads;
  a->ptx_version = a->binary_version = 80;
  a->max_dynamic_shared = static_cast<int>(kernel->max_dynamic_shared);
  return kSuccess;
}

// Registers are not modelled: the limit is by threads, blocks and shared memory alone.
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int block_size,
                                                  size_t shared) {
  KernelEntry* kernel = kernel_of(function);
  if (!kernel || block_size <= 0) return fail(kInvalidValue);
  const int64_t bytes = Runtime::instance().program(*kernel)->kernel->static_shared +
                        int64_t(shared) + kReservedSharedPerBlock;
  *blocks = static_cast<int>(
      std::min<int64_t>({kMaxThreadsPerSm / block_size, kMaxBlocksPerSm, kSharedPerSm / bytes}));
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function,
                                                           int block_size, size_t shared,
                                                           unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

}  // extern "C"
