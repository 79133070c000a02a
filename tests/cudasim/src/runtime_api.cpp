// The part of the CUDA runtime's C interface that nvcc's host code and launchers call. Types are
// declared here as the ABI has them, so that nothing of CUDA is needed to build this library.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memory.h"
#include "runtime.h"

using cudasim::DeviceMemory;
using cudasim::KernelEntry;
using cudasim::Runtime;

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

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDeviceFunction = 98,
              kNotSupported = 801;
constexpr int kMaxThreadsPerSm = 2048, kMaxBlocksPerSm = 32;
constexpr int64_t kSharedPerSm = 164 * 1024, kReservedSharedPerBlock = 1024;

int fail(int error) {
  Runtime::instance().set_error(error);
  return error;
}

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

// An A100, as far as cudaDeviceGetAttribute goes.
int device_attribute(int attribute) {
  switch (attribute) {
    case 1:
      return 1024;  // threads per block
    case 2:
    case 3:
      return 1024;  // block x, y
    case 4:
      return 64;
    case 5:
      return 0x7FFFFFFF;  // grid x
    case 6:
    case 7:
      return 65535;
    case 8:
      return 48 * 1024;  // shared memory per block
    case 9:
      return 64 * 1024;  // constant memory
    case 10:
      return 32;  // warp size
    case 12:
      return 65536;  // registers per block
    case 13:
      return 1410000;  // kHz
    case 16:
      return 108;  // multiprocessors
    case 37:
      return 5120;  // memory bus width, bits
    case 38:
      return 40 * 1024 * 1024;  // L2
    case 39:
      return kMaxThreadsPerSm;
    case 75:
      return 8;  // compute capability
    case 76:
      return 0;
    case 81:
      return static_cast<int>(kSharedPerSm);
    case 82:
      return 65536;  // registers per multiprocessor
    case 95:
      return 1;  // cooperative launch
    case 97:
      return 163 * 1024;  // shared memory per block, opted in
    case 106:
      return kMaxBlocksPerSm;
    case 111:
      return static_cast<int>(kReservedSharedPerBlock);
    default:
      return 0;
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

int cudaGetLastError() {
  return Runtime::instance().last_error(true);
}
int cudaPeekAtLastError() {
  return Runtime::instance().last_error(false);
}
const char* cudaGetErrorName(int error) {
  return error == 0     ? "cudaSuccess"
         : error == 1   ? "cudaErrorInvalidValue"
         : error == 2   ? "cudaErrorMemoryAllocation"
         : error == 9   ? "cudaErrorInvalidConfiguration"
         : error == 98  ? "cudaErrorInvalidDeviceFunction"
         : error == 719 ? "cudaErrorLaunchFailure"
         : error == 801 ? "cudaErrorNotSupported"
                        : "cudaErrorUnknown";
}
const char* cudaGetErrorString(int error) {
  return error == 0     ? "no error"
         : error == 1   ? "invalid argument"
         : error == 2   ? "out of memory"
         : error == 9   ? "invalid configuration argument"
         : error == 98  ? "invalid device function"
         : error == 719 ? "unspecified launch failure (see the simulator's findings)"
         : error == 801 ? "operation not supported"
                        : "unknown error";
}

int cudaGetDevice(int* device) {
  return *device = 0, kSuccess;
}
int cudaSetDevice(int device) {
  return device == 0 ? kSuccess : fail(101);
}
int cudaGetDeviceCount(int* count) {
  return *count = 1, kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  return *value = device_attribute(attribute), kSuccess;
}
int cudaDeviceSynchronize() {
  return kSuccess;
}
int cudaDeviceReset() {
  return kSuccess;
}
int cudaDriverGetVersion(int* version) {
  return *version = 13000, kSuccess;
}
int cudaRuntimeGetVersion(int* version) {
  return *version = 13000, kSuccess;
}

int cudaMalloc(void** p, size_t bytes) {
  return (*p = DeviceMemory::instance().allocate(bytes)) ? kSuccess : fail(kMemoryAllocation);
}
int cudaMallocAsync(void** p, size_t bytes, void*) {
  return cudaMalloc(p, bytes);
}
int cudaFree(void* p) {
  return !p || DeviceMemory::instance().release(p) ? kSuccess : fail(kInvalidValue);
}
int cudaFreeAsync(void* p, void*) {
  return cudaFree(p);
}
int cudaMallocHost(void** p, size_t bytes) {
  return (*p = std::malloc(bytes)) ? kSuccess : fail(kMemoryAllocation);
}
int cudaFreeHost(void* p) {
  return std::free(p), kSuccess;
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  return std::memmove(to, from, bytes), kSuccess;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void*) {
  return std::memmove(to, from, bytes), kSuccess;
}
int cudaMemset(void* p, int value, size_t bytes) {
  return std::memset(p, value, bytes), kSuccess;
}
int cudaMemsetAsync(void* p, int value, size_t bytes, void*) {
  return std::memset(p, value, bytes), kSuccess;
}
int cudaGetSymbolAddress(void** p, const void* symbol) {
  return (*p = Runtime::instance().symbol_address(symbol)) ? kSuccess : fail(13);
}
int cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, int) {
  void* p = Runtime::instance().symbol_address(symbol);
  return p ? (std::memcpy(static_cast<char*>(p) + offset, from, bytes), kSuccess) : fail(13);
}
int cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset, int) {
  void* p = Runtime::instance().symbol_address(symbol);
  return p ? (std::memcpy(to, static_cast<char*>(p) + offset, bytes), kSuccess) : fail(13);
}

int cudaStreamCreate(void** s) {
  return *s = nullptr, kSuccess;
}
int cudaStreamCreateWithFlags(void** s, unsigned) {
  return *s = nullptr, kSuccess;
}
int cudaStreamDestroy(void*) {
  return kSuccess;
}
int cudaStreamSynchronize(void*) {
  return kSuccess;
}
int cudaStreamWaitEvent(void*, void*, unsigned) {
  return kSuccess;
}
int cudaStreamIsCapturing(void*, int* status) {
  return *status = 0, kSuccess;
}
int cudaEventCreate(void** e) {
  return *e = nullptr, kSuccess;
}
int cudaEventCreateWithFlags(void** e, unsigned) {
  return *e = nullptr, kSuccess;
}
int cudaEventDestroy(void*) {
  return kSuccess;
}
int cudaEventRecord(void*, void*) {
  return kSuccess;
}
int cudaEventSynchronize(void*) {
  return kSuccess;
}
int cudaEventElapsedTime(float* ms, void*, void*) {
  return *ms = 0, kSuccess;
}

// For the binding layer: which host memory the kernels may touch.
void cudasim_register_buffer(const void* p, size_t bytes, int writable, const char* name) {
  DeviceMemory::instance().add(p, bytes, writable != 0, name ? name : "");
}
void cudasim_unregister_buffer(const void* p) {
  DeviceMemory::instance().remove(p);
}

}  // extern "C"
